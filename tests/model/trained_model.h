#pragma once
#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "tests/model/fixture_model.h"
#include "tests/model/small_model.h"

namespace parka::test {

// A model on a device with gradients in fp32 of what is trained, for fixtures.
struct TrainedModel {
  // `precision` must outlive it.
  TrainedModel(const ModelConfig& config, const PrecisionConfig& precision, const BatchShape& shape, Device& on,
               const ParameterRules& rules, int64_t logits_chunk = 1 << 20)
      : device(on), model(config, precision, false, shape, logits_chunk, Model::Use::kTraining, {}, plan, rules) {
    std::vector<TensorId> ids;
    for (const ParameterInfo& p : model.parameters().all) {
      ids.push_back(p.trainable ? plan.add("gradients", p.name, DType::kF32, {p.rows, p.cols}) : TensorId{});
    }
    plan.finish();
    arena = std::make_unique<Arena>(device, plan);
    model.bind(device, *arena);
    for (const TensorId id : ids) gradients.push_back(id.valid() ? (*arena)[id] : TensorView());
  }

  // `is_new` are those that the base does not have: they are taken from `added`, or are as they are at first.
  template <typename IsNew>
  void load(const Fixture& base, const Fixture* added, const IsNew& is_new) {
    const ParameterTable& table = model.parameters();
    for (size_t i = 0; i < table.all.size(); ++i) {
      const std::string name = "weight/" + table.all[i].name;
      std::vector<float> values;
      if (!is_new(table.all[i])) {
        values = base.tensors.at(name);
      } else if (added != nullptr) {
        values = added->tensors.at(name);
      } else {
        values = initial_weight(base.config, table, i, 1);
      }
      upload_weight(device, model.weights().own()[i], values);
    }
    model.weights_changed(device);
  }
  std::vector<float> logits(const Fixture& fixture) {
    const std::vector<int32_t> targets = next_token_targets(fixture.tokens, fixture.shape.sequence_length);
    return model.logits(device, {fixture.tokens.data(), targets.data(), fixture.shape}, 0,
                        fixture.shape.num_tokens());
  }
  // The mean loss.
  double backward(const Fixture& fixture, Model::Accumulation accumulation = Model::Accumulation::kBegin,
                  const Model::Batch::Place& place = {}) {
    const std::vector<int32_t> targets = next_token_targets(fixture.tokens, fixture.shape.sequence_length);
    const auto num_targets = static_cast<double>(fixture.shape.num_sequences * (fixture.shape.sequence_length - 1));
    model.accumulate_gradients(device, {fixture.tokens.data(), targets.data(), fixture.shape, nullptr, place},
                               {.grad_scale = static_cast<float>(1.0 / num_targets)}, gradients, accumulation);
    return mean_loss(model.losses(device), targets);
  }
  std::vector<float> gradient(size_t i) const {
    std::vector<float> values(static_cast<size_t>(gradients[i].numel()));
    device.copy_to_host(values.data(), gradients[i].as<float>(), gradients[i].bytes());
    return values;
  }
  // Of all gradients the largest error, relative to `factor` times what the fixture has below `prefix`.
  double worst_error(const Fixture& fixture, const std::string& prefix, double factor = 1) const {
    double worst = 0;
    const auto& parameters = model.parameters().all;
    for (size_t i = 0; i < parameters.size(); ++i) {
      if (!parameters[i].trainable) continue;
      std::vector<float> expected = fixture.tensors.at(prefix + parameters[i].name);
      for (float& value : expected) value = static_cast<float>(factor * value);
      worst = std::max(worst, relative_error(gradient(i), expected));
    }
    return worst;
  }

  Device& device;
  MemoryPlan plan;
  Model model;
  std::unique_ptr<Arena> arena;
  std::vector<TensorView> gradients;
};

}  // namespace parka::test
