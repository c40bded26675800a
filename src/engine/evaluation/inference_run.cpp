#include "engine/evaluation/inference_run.h"

#include <algorithm>
#include <filesystem>
#include <unordered_map>

#include <spdlog/spdlog.h>

#include "data/read_only_file.h"
#include "engine/files/float_elements.h"
#include "model/op_workspace.h"

namespace parka {

namespace {

// An imported model has its own format, and a recipe that an override gives may compute in another.
void copy_converted(Device& device, DType dtype, ByteSpan bytes, const TensorView& view) {
  std::vector<float> values(static_cast<size_t>(view.numel()));
  decode_floats(dtype, bytes, values);
  std::vector<std::byte> converted(static_cast<size_t>(view.bytes()));
  encode_floats(values, view.dtype, converted);
  device.copy_to_device(view.data, converted.data(), view.bytes());
}

}  // namespace

LoadedCheckpoint open_checkpoint(const std::string& path, const LoadGroup& group) {
  if (file_exists(path + "/manifest.json")) return load_checkpoint(path, group);
  std::error_code ignored;
  if (!std::filesystem::is_directory(path, ignored))
    throw_bad_input("{}: no such checkpoint or run folder; check the path", path);
  auto newest = load_newest(
      path, [](const std::string& message) { spdlog::warn("{}", message); }, group);
  if (!newest) throw_bad_input("{}: holds no checkpoint (looked for step_*/manifest.json)", path);
  return std::move(*newest);
}

InferenceRun::InferenceRun(Device& device, const LoadedCheckpoint& checkpoint, const Config& config,
                           const CacheShape& cache)
    : config_(config),
      model_(config_.model, config_.precision, config_.optimizer.decay_embeddings,
             {config_.training.micro_batch_size, config_.data.sequence_length,
              config_.data.documents == DocumentMode::kSeparate},
             config_.training.logits_chunk_tokens, Model::Use::kInference, {}, plan_) {
  if (cache.num_slots > 0) model_.declare_cache(cache, plan_);
  TensorId workspace;
  if (device.kind() == DeviceKind::kCuda) {
    const int64_t tokens = config_.training.micro_batch_size * config_.data.sequence_length;
    workspace = declare_op_workspace(config_.model, config_.precision, tokens, model_.parameters(), plan_, cache);
  }
  plan_.finish();
  arena_ = std::make_unique<Arena>(device, plan_);
  if (workspace.valid()) device.set_workspace((*arena_)[workspace].data, (*arena_)[workspace].bytes());
  model_.bind(device, *arena_);
  std::unordered_map<std::string, TensorView> wanted;
  const std::vector<ParameterInfo>& parameters = model_.parameters().all;
  for (size_t i = 0; i < parameters.size(); ++i) {
    wanted.emplace(parameters[i].name,
                   model_.weights().own()[i].reshaped({parameters[i].rows, parameters[i].cols}));
  }
  checkpoint.for_each_tensor([&](const SafetensorsEntry& entry, ByteSpan bytes) {
    const auto found = wanted.find(entry.name);
    if (found == wanted.end()) return;  // masters and moments
    const TensorView& view = found->second;
    const bool same_shape =
        std::equal(entry.shape.begin(), entry.shape.end(), view.dim.begin(), view.dim.begin() + view.rank);
    if (!is_plain_float(entry.dtype) || !same_shape) {
      throw_bad_input("{}: {} does not fit its config, which wants {}", checkpoint.path(), entry.name,
                      describe(view));
    }
    if (entry.dtype == view.dtype) {
      device.copy_to_device(view.data, bytes.data(), view.bytes());
    } else {
      copy_converted(device, entry.dtype, bytes, view);
    }
    wanted.erase(found);
  });
  if (!wanted.empty()) throw_bad_input("{}: lacks the weight {}", checkpoint.path(), wanted.begin()->first);
  model_.weights_changed(device);
}

}  // namespace parka
