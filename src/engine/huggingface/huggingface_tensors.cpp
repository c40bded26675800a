#include "engine/huggingface/huggingface_tensors.h"

#include <algorithm>

#include <fmt/format.h>

#include "core/error.h"
#include "engine/huggingface/llava_tensors.h"

namespace parka {
namespace {

// Rows of a parameter.
struct Rows {
  int parameter = -1;
  int64_t first = 0;
  int64_t count = 0;
  bool is_vector = false;
  int64_t stride = 0;  // of the rows of experts, to those of the next one
};

// The rows of a tensor of block l, or of its first expert's; without a parameter if the block has no such tensor.
Rows rows_of(BlockTensor tensor, const ParameterTable& table, int64_t l, const ModelConfig& config) {
  const int64_t d = config.d_model, f = config.d_ffn, shared = config.moe.shared_width;
  const int64_t dense = config.moe.exists() ? config.moe.dense_width : f;
  const int64_t queries = config.d_heads(), keys = config.kv_heads() * config.head_dim();
  const auto index_of = [&](const char* name) { return table.index_of(block_prefix(kDecoder, l) + name); };
  switch (tensor) {
    case BlockTensor::kQuery: return {index_of("qkv"), 0, queries};
    case BlockTensor::kKey: return {index_of("qkv"), queries, keys};
    case BlockTensor::kValue: return {index_of("qkv"), queries + keys, keys};
    case BlockTensor::kAttentionOut: return {index_of("attention_out"), 0, d};
    case BlockTensor::kQueryBias: return {index_of("qkv_bias"), 0, queries, /*is_vector=*/true};
    case BlockTensor::kKeyBias: return {index_of("qkv_bias"), queries, keys, /*is_vector=*/true};
    case BlockTensor::kValueBias: return {index_of("qkv_bias"), queries + keys, keys, /*is_vector=*/true};
    case BlockTensor::kQueryNorm: return {index_of("q_norm"), 0, 1, /*is_vector=*/true};
    case BlockTensor::kKeyNorm: return {index_of("k_norm"), 0, 1, /*is_vector=*/true};
    case BlockTensor::kGate: return {index_of("up_gate"), dense, dense};
    case BlockTensor::kUp: return {index_of("up_gate"), 0, dense};
    case BlockTensor::kDown: return {index_of("down"), 0, d};
    case BlockTensor::kAttentionNorm: return {index_of("attention_norm"), 0, 1, /*is_vector=*/true};
    case BlockTensor::kFfnNorm: return {index_of("ffn_norm"), 0, 1, /*is_vector=*/true};
    case BlockTensor::kAttentionPostNorm: return {index_of("attention_post_norm"), 0, 1, /*is_vector=*/true};
    case BlockTensor::kFfnPostNorm: return {index_of("ffn_post_norm"), 0, 1, /*is_vector=*/true};
    case BlockTensor::kRouter: return {index_of("router"), 0, config.moe.num_experts};
    case BlockTensor::kRouterBias: return {index_of("router_bias"), 0, 1, /*is_vector=*/true};
    case BlockTensor::kExpertGate: return {index_of("experts.up_gate"), f, f, /*is_vector=*/false, 2 * f};
    case BlockTensor::kExpertUp: return {index_of("experts.up_gate"), 0, f, /*is_vector=*/false, 2 * f};
    case BlockTensor::kExpertDown: return {index_of("experts.down"), 0, d, /*is_vector=*/false, d};
    case BlockTensor::kSharedGate: return {index_of("shared.up_gate"), shared, shared};
    case BlockTensor::kSharedUp: return {index_of("shared.up_gate"), 0, shared};
    case BlockTensor::kSharedDown: return {index_of("shared.down"), 0, d};
  }
  throw_internal("a tensor of a block without a parameter");
}

// True if each row of each parameter is in one tensor.
bool covers(const std::vector<HuggingFaceTensor>& tensors, const ParameterTable& table) {
  std::vector<int64_t> rows(table.all.size());
  for (const HuggingFaceTensor& tensor : tensors) rows[tensor.parameter] += tensor.num_rows;
  for (size_t i = 0; i < rows.size(); ++i) {
    if (rows[i] != table.all[i].rows) return false;
  }
  return true;
}

}  // namespace

std::vector<HuggingFaceTensor> huggingface_tensors(const HuggingFaceFamily& family, const ModelConfig& config,
                                                   const ParameterTable& table, const LlavaNames* llava) {
  std::vector<HuggingFaceTensor> tensors;
  const auto add = [&](std::string name, const Rows& rows) {
    const int64_t cols = table.all.at(static_cast<size_t>(rows.parameter)).cols;
    const std::vector<int64_t> shape =
        rows.is_vector ? std::vector{rows.count * cols} : std::vector{rows.count, cols};
    tensors.push_back({std::move(name), shape, static_cast<size_t>(rows.parameter), rows.first, rows.count});
  };
  const TensorNames& names = family.tensors;
  constexpr size_t kOfExpert = 3;
  add(std::string(names.embedding), {table.embedding, 0, config.vocab_size});
  for (int64_t l = 0; l < table.num_blocks; ++l) {
    const std::string block = fmt::format("{}{}.", names.blocks, l);
    std::vector<std::pair<std::string_view, Rows>> of_experts;
    for (const auto& [holds, name] : names.in_block) {
      const Rows rows = rows_of(holds, table, l, config);
      if (rows.parameter < 0 && config.moe.exists()) continue;
      if (rows.stride == 0) {
        add(block + std::string(name), rows);
      } else if (of_experts.emplace_back(name, rows); of_experts.size() == kOfExpert) {
        for (int64_t e = 0; e < config.moe.num_experts; ++e) {
          for (auto [each, first] : of_experts) {
            first.first += e * first.stride;
            add(block + name_of_expert(each, e), first);
          }
        }
      }
    }
  }
  if (!names.final_norm.empty()) add(std::string(names.final_norm), {table.final_norm, 0, 1, /*is_vector=*/true});
  if (!config.tie_embeddings) add(std::string(names.head), {table.head, 0, config.vocab_size});
  if (config.vision.exists()) {
    tensors =
        llava_tensors(config, table, llava != nullptr ? *llava : all_llava_names().front(), std::move(tensors));
  }
  PARKA_REQUIRE(covers(tensors, table));
  return tensors;
}

std::string name_of_expert(std::string_view name, int64_t expert) {
  const size_t number = name.find('*');
  if (number == std::string_view::npos) return std::string(name);
  return fmt::format("{}{}{}", name.substr(0, number), expert, name.substr(number + 1));
}

int64_t HuggingFaceTensor::num_columns() const {
  int64_t elements = 1;
  for (const int64_t size : shape) elements *= size;
  return elements / num_rows;
}

const HuggingFaceTensor& embedding_of(const std::vector<HuggingFaceTensor>& tensors) {
  return *std::ranges::find_if(tensors, [](const HuggingFaceTensor& tensor) { return tensor.parameter == 0; });
}

std::string head_name(const HuggingFaceFamily& family, const LlavaNames* llava) {
  return in_language_model(std::string(family.tensors.head), llava);
}

bool is_ignored_huggingface_tensor(std::string_view name) {
  return name.find("model.") != std::string_view::npos && name.ends_with("rotary_emb.inv_freq");
}

}  // namespace parka
