#pragma once
#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "core/philox.h"
#include "engine/files/safetensors.h"
#include "kernels/device/arena.h"
#include "kernels/ops/elementwise/cross_entropy.h"
#include "model/model.h"
#include "model/precision_recipe.h"
#include "tests/support/tensors.h"

// A small model with gradients, ready to run, for the model tests.
namespace parka::test {

// Fills a weight, rounded to its format.
inline void upload_weight(Device& device, const TensorView& w, const std::vector<float>& values) {
  PARKA_REQUIRE(static_cast<int64_t>(values.size()) == w.numel());
  if (w.dtype == DType::kF32) {
    device.copy_to_device(w.as<float>(), values.data(), w.bytes());
  } else {
    std::vector<BFloat16> rounded(values.size());
    std::transform(values.begin(), values.end(), rounded.begin(), encode_bf16);
    device.copy_to_device(w.as<BFloat16>(), rounded.data(), w.bytes());
  }
}

struct SmallModel {
  SmallModel(const ModelConfig& config, const PrecisionConfig& precision, const BatchShape& shape,
             int64_t logits_chunk = 1 << 20, Device& on = *devices().front())
      : device(&on), model(config, precision, false, shape, logits_chunk, Model::Use::kTraining, {}, plan) {
    for (const ParameterInfo& p : model.parameters().all) {
      gradient_ids.push_back(plan.add("gradients", p.name, DType::kF32, {p.rows, p.cols}));
    }
    plan.finish();
    arena = std::make_unique<Arena>(*device, plan);
    model.bind(*device, *arena);
    for (TensorId id : gradient_ids) gradients.push_back((*arena)[id]);
  }

  void set_weight(size_t i, const std::vector<float>& values) {
    upload_weight(*device, model.weights().own()[i], values);
  }
  void initialize(const ModelConfig& config, uint64_t seed) {
    for (size_t i = 0; i < gradients.size(); ++i)
      set_weight(i, initial_weight(config, model.parameters(), i, seed));
    model.weights_changed(*device);
  }
  std::vector<float> gradient(size_t i) const {
    std::vector<float> values(static_cast<size_t>(gradients.at(i).numel()));
    device->copy_to_host(values.data(), gradients[i].as<float>(), gradients[i].bytes());
    return values;
  }
  // All gradients one after another.
  std::vector<float> all_gradients() const {
    std::vector<float> all;
    for (size_t i = 0; i < gradients.size(); ++i) {
      const std::vector<float> one = gradient(i);
      all.insert(all.end(), one.begin(), one.end());
    }
    return all;
  }

  Device* device;
  MemoryPlan plan;
  Model model;
  std::vector<TensorId> gradient_ids;
  std::unique_ptr<Arena> arena;
  std::vector<TensorView> gradients;
};

// Of the micro-batch that begins at this position among those that are added up.
inline Model::Accumulation accumulation_of(int64_t begin) {
  return begin == 0 ? Model::Accumulation::kBegin : Model::Accumulation::kContinue;
}

inline std::vector<int32_t> random_tokens(int64_t count, int64_t vocab_size, uint64_t seed) {
  std::vector<int32_t> tokens(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    tokens[i] =
        static_cast<int32_t>(philox4x32(seed, 3, static_cast<uint64_t>(i))[0] % static_cast<uint64_t>(vocab_size));
  }
  return tokens;
}

// ||a - b|| / ||b||
inline double relative_error(const std::vector<float>& a, const std::vector<float>& b) {
  PARKA_REQUIRE(a.size() == b.size());
  double difference = 0, norm = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference += (double{a[i]} - b[i]) * (double{a[i]} - b[i]);
    norm += double{b[i]} * b[i];
  }
  return std::sqrt(difference) / std::sqrt(norm);
}

// Of a along b: <a, b> / <b, b>.
inline double projection(const std::vector<float>& a, const std::vector<float>& b) {
  double dot = 0, norm = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    dot += double{a[i]} * b[i];
    norm += double{b[i]} * b[i];
  }
  return dot / norm;
}

inline double mean_loss(const std::vector<float>& losses, const std::vector<int32_t>& targets) {
  double sum = 0;
  int64_t count = 0;
  for (size_t t = 0; t < losses.size(); ++t) {
    sum += losses[t];
    count += targets[t] != kIgnoreTarget;
  }
  return sum / static_cast<double>(count);
}

}  // namespace parka::test
