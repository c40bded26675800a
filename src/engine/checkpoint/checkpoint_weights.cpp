#include "engine/checkpoint/checkpoint_weights.h"

#include <algorithm>
#include <cstring>

#include <fmt/ranges.h>

#include "core/error.h"
#include "core/split_float.h"
#include "engine/files/float_elements.h"

namespace parka {
namespace {

// Adds to bf16 weights, decoded, the bits of their masters that they lack.
template <typename Remainder>
void join_each(std::span<float> values, const std::vector<std::byte>& remainders,
               float (*join)(BFloat16, Remainder)) {
  for (size_t i = 0; i < values.size(); ++i) {
    Remainder remainder = 0;
    std::memcpy(&remainder, remainders.data() + i * sizeof(remainder), sizeof(remainder));
    values[i] = join(encode_bf16(values[i]), remainder);
  }
}

bool is_remainder(DType dtype) { return dtype == DType::kU16 || dtype == DType::kU8; }

void join_remainders(std::span<float> values, DType dtype, const std::vector<std::byte>& remainders) {
  if (dtype == DType::kU8) {
    join_each<uint8_t>(values, remainders, join_float24);
  } else {
    join_each<uint16_t>(values, remainders, join_float);
  }
}

}  // namespace

CheckpointWeights::CheckpointWeights(const LoadedCheckpoint& checkpoint,
                                     const std::vector<ParameterInfo>& parameters)
    : checkpoint_(checkpoint) {
  for (const ParameterInfo& p : parameters) {
    const SafetensorsEntry* weight = checkpoint.find(p.name);
    if (weight == nullptr) throw_bad_input("{}: lacks the weight {}", checkpoint.path(), p.name);
    if (!is_plain_float(weight->dtype) || weight->shape != std::vector<int64_t>{p.rows, p.cols}) {
      throw_bad_input("{}: {} is {} [{}], the model wants floats [{}, {}]", checkpoint.path(), p.name,
                      name_of(weight->dtype), fmt::join(weight->shape, ", "), p.rows, p.cols);
    }
    const SafetensorsEntry* master = checkpoint.find(p.name + ".master");
    if (master == nullptr) continue;
    const bool is_split = is_remainder(master->dtype) && weight->dtype == DType::kBF16;
    if ((!is_split && master->dtype != DType::kF32) || master->shape != std::vector<int64_t>{p.numel()}) {
      throw_bad_input("{}: {} is {} [{}], which no master form of {} [{}] is", checkpoint.path(), master->name,
                      name_of(master->dtype), fmt::join(master->shape, ", "), name_of(weight->dtype), p.numel());
    }
  }
}

DType CheckpointWeights::dtype(const ParameterInfo& parameter) const {
  return checkpoint_.find(parameter.name)->dtype;
}

void CheckpointWeights::read_tensor(const SafetensorsEntry& tensor, ElementRange range,
                                    std::span<std::byte> bytes) const {
  const int64_t size = size_of(tensor.dtype);
  checkpoint_.read_ranges({{tensor.name, {range.begin, range.end}}}, [&](const SafetensorsEntry&,
                                                                         int64_t first_element, ByteSpan piece) {
    std::memcpy(bytes.data() + (first_element - range.begin) * size, piece.data(), piece.size());
  });
}

void CheckpointWeights::read(const ParameterInfo& parameter, ElementRange range, WeightForm form,
                             const Callback& callback) const {
  const SafetensorsEntry* weight = checkpoint_.find(parameter.name);
  const SafetensorsEntry* master =
      form == WeightForm::kMaster ? checkpoint_.find(parameter.name + ".master") : nullptr;
  const bool has_values = master != nullptr && master->dtype == DType::kF32;
  const SafetensorsEntry& source = has_values ? *master : *weight;
  std::vector<std::byte> bytes, remainders;
  std::vector<float> values;
  for (int64_t begin = range.begin; begin < range.end; begin += kMaxElements) {
    const ElementRange part = {begin, std::min(begin + kMaxElements, range.end)};
    const auto count = static_cast<size_t>(part.size());
    bytes.resize(count * static_cast<size_t>(size_of(source.dtype)));
    values.resize(count);
    read_tensor(source, part, bytes);
    decode_floats(source.dtype, bytes, values);
    if (master != nullptr && !has_values) {
      remainders.resize(count * static_cast<size_t>(size_of(master->dtype)));
      read_tensor(*master, part, remainders);
      join_remainders(values, master->dtype, remainders);
    }
    callback(begin, values);
  }
}

std::vector<float> CheckpointWeights::read(const ParameterInfo& parameter, ElementRange range,
                                           WeightForm form) const {
  std::vector<float> all(static_cast<size_t>(range.size()));
  read(parameter, range, form, [&](int64_t first_element, std::span<const float> values) {
    std::copy(values.begin(), values.end(), all.begin() + (first_element - range.begin));
  });
  return all;
}

}  // namespace parka
