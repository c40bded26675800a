#pragma once
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/parameter.h"
#include "core/placement.h"
#include "engine/checkpoint/checkpoint.h"
#include "engine/config/config.h"
#include "model/parameter_table.h"

namespace parka {

// Which values of a weight to read: those that the model computes with, or those that the optimizer updates.
enum class WeightForm : uint8_t { kCompute, kMaster };

// The adapters that the checkpoints of a config have, with their scale and the base that they were trained beside.
struct CheckpointAdapters {
  struct Adapter {
    std::string layer;      // name of the weight that they belong to
    int64_t first_row;      // of it
    ParameterInfo in, out;  // stacked, if the weight is of experts
  };
  std::vector<Adapter> all = {};
  double scale = 1;
  BaseFormat base = BaseFormat::kCompute;  // of the linear weights of blocks...
  PrecisionConfig precision = {};          // ... as this precision has them
};
CheckpointAdapters lora_adapters(const Config& config);

// The weights of a checkpoint as fp32 values, from any format and master form, with what adapters add.
class CheckpointWeights {
 public:
  // Throws Error(kBadInput) unless the checkpoint has all of these, in their shapes and as floats.
  CheckpointWeights(const LoadedCheckpoint& checkpoint, const std::vector<ParameterInfo>& parameters,
                    CheckpointAdapters adapters = {});

  // Passes elements [range.begin, range.end) of a parameter in order to `callback`, kMaxElements at a time. Without
  // masters in the checkpoint, its weights stand for them.
  static constexpr int64_t kMaxElements = 2 << 20;
  using Callback = std::function<void(int64_t first_element, std::span<const float> values)>;
  void read(const ParameterInfo& parameter, ElementRange range, WeightForm form, const Callback& callback) const;
  // All of them at once.
  std::vector<float> read(const ParameterInfo& parameter, ElementRange range, WeightForm form) const;

  // Passes the compute weights of a parameter to `callback` in a plain float format: as they are stored where they
  // have that and nothing is added to them, otherwise rounded to nearest even.
  using ByteCallback = std::function<void(int64_t first_element, ByteSpan bytes)>;
  void read_as(DType dtype, const ParameterInfo& parameter, const ByteCallback& callback) const;

  // The format of a parameter's compute weights.
  DType dtype(const ParameterInfo& parameter) const;

 private:
  void check(const ParameterInfo& parameter) const;
  void read_base(const ParameterInfo& parameter, ElementRange range, WeightForm form,
                 const Callback& callback) const;
  bool is_coded(const ParameterInfo& parameter) const {
    const bool may_be = parameter.role == ParameterRole::kLinear || parameter.role == ParameterRole::kExperts;
    if (adapters_.base == BaseFormat::kCompute || !may_be) return false;
    const bool is_int8 = adapters_.precision.forward_format == DType::kI8 && has_own_forward(parameter);
    return adapters_.base != BaseFormat::kFp8 ||
           !(is_int8 || is_forward_unquantized(adapters_.precision.unquantized, parameter));
  }
  // The values of a quantized weight, of one expert where it has several; those of the last one are kept.
  const std::vector<float>& read_coded(const ParameterInfo& parameter, int64_t expert) const;
  void read_stored(const ParameterInfo& parameter, ElementRange range, WeightForm form,
                   const Callback& callback) const;
  void add_adapters(const ParameterInfo& parameter, int64_t first_element, WeightForm form,
                    std::vector<float>& values) const;

  const LoadedCheckpoint& checkpoint_;
  CheckpointAdapters adapters_;
  mutable std::pair<std::string, int64_t> coded_;  // what coded_values_ are of
  mutable std::vector<float> coded_values_;
};

}  // namespace parka
