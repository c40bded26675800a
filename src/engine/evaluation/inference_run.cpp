#include "engine/evaluation/inference_run.h"

#include <algorithm>
#include <cstddef>

#include "core/log/log.h"
#include "data/read_only_file.h"
#include "engine/checkpoint/checkpoint_base.h"
#include "engine/checkpoint/checkpoint_weights.h"
#include "engine/checkpoint/saved_state.h"
#include "kernels/device/recording_device.h"

namespace parka {

namespace {

// All that inference queues, on a device that records: a batch with and without losses, and generation.
int64_t record_workspace_bytes(const Config& config, const CacheShape& cache) {
  RecordingDevice device(DeviceKind::kCuda);
  DeclaredInference declared(config, cache, /*workspace_bytes=*/0);
  const Arena arena(device, declared.plan);
  Model& model = declared.model;
  model.bind(device, arena);
  for (size_t i = 0; i < model.parameters().all.size(); ++i) {
    if (model.parameters().all[i].is_coded()) model.weights().encode(device, static_cast<int>(i));
  }
  model.weights_changed(device);
  const BatchShape shape = config.micro_batch_shape();
  const int32_t unread = 0;  // a device that records reads no tokens
  const Model::Batch batch = {&unread, &unread, shape, shape.separate_documents ? &unread : nullptr};
  model.evaluate(device, batch);
  model.logits(device, batch, shape.num_tokens() - 1, 1);
  if (cache.num_slots == 0) return device.workspace_bytes();
  model.prefill(device, 0, std::vector<int32_t>(static_cast<size_t>(cache.max_length)));
  std::vector<Model::CachedToken> next;
  for (int64_t slot = 0; slot < cache.num_slots; ++slot) {
    next.push_back({static_cast<int32_t>(slot), static_cast<int32_t>(cache.max_length - 1), 0});
  }
  model.decode(device, next);
  return device.workspace_bytes();
}

}  // namespace

LoadedCheckpoint open_checkpoint(const std::string& path, const std::vector<std::string>& overrides,
                                 Communicator& ranks) {
  const auto whole = [&](LoadedCheckpoint checkpoint) {
    if (has_base(checkpoint))
      attach_base(checkpoint, ranks, inference_config_of(checkpoint, overrides).checkpoint.init_from);
    return checkpoint;
  };
  if (file_exists(path + "/manifest.json")) return whole(load_checkpoint(path, ranks));
  if (!is_folder(path)) throw_bad_input("{}: no such checkpoint or run folder; check the path", path);
  auto newest = load_newest(
      path, [](const std::string& message) { log_line(LogLevel::kWarning, message); }, ranks);
  if (newest) return whole(std::move(*newest));
  const char* const of_models[] = {"/model.safetensors", "/model.safetensors.index.json", "/snapshots"};
  if (std::ranges::any_of(of_models, [&](const char* name) { return file_exists(path + name); })) {
    throw_bad_input("{}: is a Hugging Face model; `parka import {} --out NEW` makes a checkpoint of it", path,
                    path);
  }
  throw_bad_input("{}: holds no checkpoint (looked for step_*/manifest.json)", path);
}

std::string numerics_of(const Config& config) {
  const PrecisionConfig& precision = config.precision;
  if (precision.has_fp8() && precision.eval == EvalNumerics::kSame) {
    return fmt::format("those of training (recipe {})", name_of(precision.recipe));
  }
  return std::string(name_of(precision.compute));
}

DeclaredInference::DeclaredInference(const Config& config, const CacheShape& cache, DeviceKind device)
    : DeclaredInference(config, cache,
                        device == DeviceKind::kCuda ? record_workspace_bytes(config, cache) : int64_t{0}) {}

DeclaredInference::DeclaredInference(const Config& config, const CacheShape& cache, int64_t workspace_bytes)
    : model(config.model, config.precision, config.optimizer.decay_embeddings, config.micro_batch_shape(),
            config.training.logits_chunk_tokens, Model::Use::kInference, {}, plan, config.parameter_rules()) {
  if (cache.num_slots > 0) model.declare_cache(cache, plan);
  if (workspace_bytes > 0) workspace = plan.add(kWorkspaceCategory, "op_workspace", DType::kU8, {workspace_bytes});
  plan.finish();
}

InferenceRun::InferenceRun(Device& device, const LoadedCheckpoint& checkpoint, const Config& config,
                           const CacheShape& cache)
    : config_(config),
      declared_(config_, cache, device.kind()),
      arena_(std::make_unique<Arena>(device, declared_.plan)) {
  Model& model = declared_.model;
  const TensorView workspace = (*arena_)[declared_.workspace];
  if (!workspace.empty()) device.set_workspace(workspace.data, workspace.bytes());
  model.bind(device, *arena_);
  const std::vector<ParameterInfo>& parameters = model.parameters().all;
  const CheckpointWeights weights(checkpoint, parameters);
  for (size_t i = 0; i < parameters.size(); ++i) {
    const ParameterInfo& p = parameters[i];
    const auto index = static_cast<int>(i);
    const TensorView target = p.is_coded() ? model.weights().coded_buffer(index) : model.weights().own()[i];
    weights.read_as(target.dtype, p, [&](int64_t first, ByteSpan bytes) {
      device.copy_to_device(static_cast<std::byte*>(target.data) + first * size_of(target.dtype), bytes.data(),
                            static_cast<int64_t>(bytes.size()));
    });
    if (p.is_coded()) model.weights().encode(device, index);
  }
  model.weights_changed(device);
}

}  // namespace parka
