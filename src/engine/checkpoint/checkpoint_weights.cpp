#include "engine/checkpoint/checkpoint_weights.h"

#include <algorithm>
#include <cstring>

#include <fmt/ranges.h>

#include "core/error.h"
#include "core/parallel.h"
#include "core/split_float.h"
#include "engine/files/safetensors.h"
#include "model/coded_weights.h"

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

CheckpointAdapters lora_adapters(const Config& config) {
  const ParameterTable table = make_parameter_table(config.model, false, {.lora = config.finetune.lora_rules()});
  CheckpointAdapters adapters;
  adapters.scale = config.finetune.lora_rules().scale;
  adapters.base = config.finetune.base;
  adapters.precision = config.precision;
  for (const LoraAdapter& adapter : table.adapters) {
    adapters.all.push_back({adapter.layer, adapter.first_row, table.all[static_cast<size_t>(adapter.in)],
                            table.all[static_cast<size_t>(adapter.out)]});
  }
  return adapters;
}

CheckpointWeights::CheckpointWeights(const LoadedCheckpoint& checkpoint,
                                     const std::vector<ParameterInfo>& parameters, CheckpointAdapters adapters)
    : checkpoint_(checkpoint), adapters_(std::move(adapters)) {
  for (const ParameterInfo& p : parameters) check(p);
  for (const CheckpointAdapters::Adapter& adapter : adapters_.all) {
    check(adapter.in);
    check(adapter.out);
  }
}

void CheckpointWeights::check(const ParameterInfo& p) const {
  const SafetensorsEntry* weight = checkpoint_.find(p.name);
  if (weight == nullptr) throw_bad_input("{}: lacks the weight {}", checkpoint_.path(), p.name);
  if (!is_plain_float(weight->dtype) || weight->shape != std::vector<int64_t>{p.whole_rows(), p.cols}) {
    throw_bad_input("{}: {} is {} [{}], the model wants floats [{}, {}]", checkpoint_.path(), p.name,
                    name_of(weight->dtype), fmt::join(weight->shape, ", "), p.whole_rows(), p.cols);
  }
  const SafetensorsEntry* master = checkpoint_.find(p.name + ".master");
  if (master == nullptr) return;
  const bool is_split = is_remainder(master->dtype) && weight->dtype == DType::kBF16;
  if ((!is_split && master->dtype != DType::kF32) || master->shape != std::vector<int64_t>{p.whole_numel()}) {
    throw_bad_input("{}: {} is {} [{}], which no master form of {} [{}] is", checkpoint_.path(), master->name,
                    name_of(master->dtype), fmt::join(master->shape, ", "), name_of(weight->dtype),
                    p.whole_numel());
  }
}

DType CheckpointWeights::dtype(const ParameterInfo& parameter) const {
  return checkpoint_.find(parameter.name)->dtype;
}

void CheckpointWeights::read(const ParameterInfo& parameter, ElementRange range, WeightForm form,
                             const Callback& callback) const {
  const bool is_adapted = std::ranges::any_of(
      adapters_.all, [&](const CheckpointAdapters::Adapter& adapter) { return adapter.layer == parameter.name; });
  if (!is_adapted) {
    read_base(parameter, range, form, callback);
    return;
  }
  read_base(parameter, range, form, [&](int64_t first_element, std::span<const float> base) {
    std::vector<float> values(base.begin(), base.end());
    add_adapters(parameter, first_element, form, values);
    callback(first_element, values);
  });
}

// W + scale * B A, summed in double; of each expert its own.
void CheckpointWeights::add_adapters(const ParameterInfo& parameter, int64_t first_element, WeightForm form,
                                     std::vector<float>& values) const {
  const int64_t cols = parameter.cols, end = first_element + static_cast<int64_t>(values.size());
  for (const CheckpointAdapters::Adapter& adapter : adapters_.all) {
    if (adapter.layer != parameter.name) continue;
    const int64_t experts = adapter.in.num_stacked, rank = adapter.in.rows / experts,
                  rows = adapter.out.rows / experts;
    const int64_t stride = parameter.numel() / parameter.num_stacked;
    for (int64_t e = first_element / stride; e < experts && e * stride < end; ++e) {
      const int64_t origin = e * stride + adapter.first_row * cols, first = std::max(first_element, origin),
                    last = std::min(end, origin + rows * cols);
      if (first >= last) continue;
      const auto read_own = [&](const ParameterInfo& factor) {
        const int64_t size = factor.numel() / experts;
        return read(factor, {e * size, (e + 1) * size}, form);
      };
      const std::vector<float> a = read_own(adapter.in), b = read_own(adapter.out);
      parallel_for(last - first, 1 << 14, [&](int64_t begin, int64_t stop) {
        for (int64_t i = first + begin; i < first + stop; ++i) {
          const int64_t row = (i - origin) / cols, col = (i - origin) % cols;
          double sum = 0;
          for (int64_t r = 0; r < rank; ++r) sum += double{b[row * rank + r]} * a[r * cols + col];
          float& value = values[static_cast<size_t>(i - first_element)];
          value = static_cast<float>(value + adapters_.scale * sum);
        }
      });
    }
  }
}

const std::vector<float>& CheckpointWeights::read_coded(const ParameterInfo& parameter, int64_t expert) const {
  if (coded_ == std::pair(parameter.name, expert)) return coded_values_;
  ParameterInfo one = parameter;
  one.rows /= parameter.num_stacked;
  one.fused_rows.resize(parameter.fused_rows.size() / static_cast<size_t>(parameter.num_stacked));
  one.num_stacked = 1;
  const int64_t first = expert * one.numel();
  std::vector<float> values(static_cast<size_t>(one.numel()));
  read_stored(parameter, {first, first + one.numel()}, WeightForm::kCompute,
              [&](int64_t first_element, std::span<const float> part) {
                std::copy(part.begin(), part.end(), values.begin() + (first_element - first));
              });
  coded_values_ = coded_values(one, adapters_.base, adapters_.precision, values);
  coded_ = {parameter.name, expert};
  return coded_values_;
}

void CheckpointWeights::read_base(const ParameterInfo& parameter, ElementRange range, WeightForm form,
                                  const Callback& callback) const {
  if (!is_coded(parameter)) {
    read_stored(parameter, range, form, callback);
    return;
  }
  const int64_t size = parameter.numel() / parameter.num_stacked;
  for (int64_t begin = range.begin, end = 0; begin < range.end; begin = end) {
    const int64_t expert = begin / size;
    end = std::min({begin + kMaxElements, range.end, (expert + 1) * size});
    const std::span<const float> values = read_coded(parameter, expert);
    callback(begin, values.subspan(static_cast<size_t>(begin - expert * size), static_cast<size_t>(end - begin)));
  }
}

void CheckpointWeights::read_stored(const ParameterInfo& parameter, ElementRange range, WeightForm form,
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
    checkpoint_.read_elements(source, part, bytes);
    decode_floats(source.dtype, bytes, values);
    if (master != nullptr && !has_values) {
      remainders.resize(count * static_cast<size_t>(size_of(master->dtype)));
      checkpoint_.read_elements(*master, part, remainders);
      join_remainders(values, master->dtype, remainders);
    }
    callback(begin, values);
  }
}

void CheckpointWeights::read_as(DType dtype, const ParameterInfo& parameter, const ByteCallback& callback) const {
  const ElementRange all = {0, parameter.numel()};
  if (adapters_.all.empty() && !is_coded(parameter) && this->dtype(parameter) == dtype) {
    checkpoint_.read_ranges({{parameter.name, all}}, [&](const SafetensorsEntry&, int64_t first, ByteSpan bytes) {
      callback(first, bytes);
    });
    return;
  }
  std::vector<std::byte> bytes;
  read(parameter, all, WeightForm::kCompute, [&](int64_t first_element, std::span<const float> values) {
    bytes.resize(values.size() * static_cast<size_t>(size_of(dtype)));
    encode_floats(values, dtype, bytes);
    callback(first_element, bytes);
  });
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
