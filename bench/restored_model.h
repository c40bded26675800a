#pragma once
#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "engine/checkpoint/saved_state.h"
#include "engine/config/data_sources.h"
#include "engine/step/declared_run.h"
#include "kernels/ops/quantize/quantize.h"

namespace parka::bench {

// The elements of a plain tensor in fp32 on the host.
inline std::vector<float> as_floats(Device& device, const TensorView& x) {
  std::vector<float> values(static_cast<size_t>(x.numel()));
  quantize(device, {.x = TensorView(x.data, x.dtype, {1, x.numel()}),
                    .out = TensorView(values.data(), DType::kF32, {1, x.numel()})});
  return values;
}

// The model and the memory of a training step, with a checkpoint's weights.
class RestoredModel {
 public:
  // `config` is the checkpoint's, or has another precision with the same `compute`.
  RestoredModel(Device& device, const LoadedCheckpoint& checkpoint, const Config& config)
      : device_(device), config_(config), declared_(config, device.kind()), arena_(device, declared_.plan) {
    declared_.model.bind(device, arena_);
    declared_.optimizer.bind(arena_, declared_.model.weights().own());
    std::map<std::string, TensorView> weights;
    for (size_t i = 0; i < declared_.model.weights().own().size(); ++i) {
      weights.emplace(declared_.model.parameters().all[i].name, declared_.model.weights().own()[i]);
    }
    for (const SafetensorsEntry& tensor : checkpoint.tensors()) {
      const auto found = weights.find(tensor.name);
      if (found == weights.end()) continue;  // masters and moments
      if (tensor.dtype != found->second.dtype || tensor.num_bytes != found->second.bytes()) {
        throw_bad_input("{}: {} does not fit its config", checkpoint.path(), tensor.name);
      }
      device.copy_to_device(found->second.data, checkpoint.read(tensor).data(), found->second.bytes());
    }
    declared_.model.weights_changed(device);
  }

  // Forward and backward of the first sequences of the training data, with `hooks` told of units, if any.
  void run_batch(UnitHooks* hooks = nullptr) {
    const int64_t S = config_.data.sequence_length;
    const TokenFiles files = open_token_files(config_.data.train, config_);
    const int64_t sequences = std::min(config_.training.micro_batch_size, files.num_sequences());
    const bool separate = files.rules().separate_documents;
    std::vector<int32_t> tokens(static_cast<size_t>(sequences * S)), targets(tokens.size()), first_keys;
    if (separate) first_keys.resize(tokens.size());
    int64_t num_targets = 0;
    for (int64_t i = 0; i < sequences; ++i) {
      num_targets += files.read_example(
          i, {tokens.data() + i * S, targets.data() + i * S, separate ? first_keys.data() + i * S : nullptr});
    }
    const auto scale = static_cast<float>(1.0 / static_cast<double>(std::max<int64_t>(1, num_targets)));
    declared_.model.set_hooks(hooks);
    declared_.model.accumulate_gradients(
        device_, {tokens.data(), targets.data(), {sequences, S, separate}, separate ? first_keys.data() : nullptr},
        {.grad_scale = scale}, declared_.optimizer.gradients(), Model::Accumulation::kBegin);
    declared_.model.set_hooks(nullptr);
  }

  const ParameterTable& parameters() const { return declared_.model.parameters(); }
  const std::vector<TensorView>& weights() const { return declared_.model.weights().own(); }
  const std::vector<MemoryPlan::Entry>& entries() const { return declared_.plan.entries(); }
  TensorView tensor(size_t entry) const { return arena_[TensorId{static_cast<int>(entry)}]; }
  // The first tensor of this name; empty where there is none.
  TensorView tensor(const std::string& name) const {
    for (size_t i = 0; i < entries().size(); ++i) {
      if (entries()[i].name == name) return tensor(i);
    }
    return {};
  }

 private:
  Device& device_;
  Config config_;
  DeclaredRun declared_;
  Arena arena_;
};

}  // namespace parka::bench
