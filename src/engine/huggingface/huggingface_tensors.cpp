#include "engine/huggingface/huggingface_tensors.h"

#include <fmt/format.h>

namespace parka {

std::vector<HuggingFaceTensor> huggingface_tensors(const ModelConfig& config, const ParameterTable& table) {
  std::vector<HuggingFaceTensor> tensors;
  const auto add = [&](std::string name, int parameter, int64_t first_row, int64_t num_rows) {
    const ParameterInfo& p = table.all[static_cast<size_t>(parameter)];
    tensors.push_back({std::move(name), {num_rows, p.cols}, static_cast<size_t>(parameter), first_row, num_rows});
  };
  const auto add_whole = [&](std::string name, int parameter) {
    add(std::move(name), parameter, 0, table.all[static_cast<size_t>(parameter)].rows);
  };
  const auto add_norm = [&](std::string name, int parameter) {
    if (parameter < 0) return;
    add_whole(std::move(name), parameter);
    tensors.back().shape = {table.all[static_cast<size_t>(parameter)].cols};
  };
  const int64_t queries = config.d_heads(), keys = config.kv_heads() * config.head_dim(), f = config.d_ffn;
  add_whole(std::string(kHuggingFaceEmbedding), table.embedding);
  for (size_t l = 0; l < table.blocks.size(); ++l) {
    const BlockParameters& block = table.blocks[l];
    const std::string prefix = fmt::format("model.layers.{}.", l);
    add(prefix + "self_attn.q_proj.weight", block.qkv, 0, queries);
    add(prefix + "self_attn.k_proj.weight", block.qkv, queries, keys);
    add(prefix + "self_attn.v_proj.weight", block.qkv, queries + keys, keys);
    add_whole(prefix + "self_attn.o_proj.weight", block.attention_out);
    add(prefix + "mlp.gate_proj.weight", block.up_gate, f, f);
    add(prefix + "mlp.up_proj.weight", block.up_gate, 0, f);
    add_whole(prefix + "mlp.down_proj.weight", block.down);
    add_norm(prefix + "input_layernorm.weight", block.attention_norm);
    add_norm(prefix + "post_attention_layernorm.weight", block.ffn_norm);
  }
  add_norm("model.norm.weight", table.final_norm);
  if (!table.ties_head()) add_whole(std::string(kHuggingFaceHead), table.head);
  return tensors;
}

bool is_ignored_huggingface_tensor(std::string_view name) {
  return name.starts_with("model.") && name.ends_with("rotary_emb.inv_freq");
}

}  // namespace parka
