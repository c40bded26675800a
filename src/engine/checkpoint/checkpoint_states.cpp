#include "engine/checkpoint/checkpoint_states.h"

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <map>
#include <memory>
#include <span>
#include <string_view>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "core/tensor.h"
#include "engine/checkpoint/checkpoint_weights.h"
#include "engine/files/safetensors.h"

namespace parka {
namespace {

constexpr std::string_view kMaster = ".master", kAmax = ".amax", kExponent = ".exponent";

void require_finite(const LoadedCheckpoint& checkpoint, const std::string& name, std::span<const float> values) {
  if (all_finite(values)) return;
  throw_bad_input("{}: {} holds NaN or infinite values; resume from an earlier checkpoint (move this one away)",
                  checkpoint.path(), name);
}

// Elements [0, N) of a moment in host memory.
struct HostMoment {
  std::vector<std::byte> values, amax, exponent;
  MomentView view;

  HostMoment(DType dtype, bool has_amax, bool has_exponent, int64_t count) {
    const int64_t groups = ceil_div(count, kMomentGroup);
    const auto make = [](std::vector<std::byte>& bytes, DType of, int64_t n) {
      bytes.resize(static_cast<size_t>(n * size_of(of)));
      return TensorView{bytes.data(), of, {n}};
    };
    view.values = make(values, dtype, count);
    if (has_amax) view.amax = make(amax, DType::kF32, groups);
    if (has_exponent) view.exponent = make(exponent, DType::kU8, groups);
  }
};

// A moment of a checkpoint, whose tensors are checked.
class SavedMoment {
 public:
  SavedMoment(const LoadedCheckpoint& checkpoint, const std::string& name, int64_t numel)
      : checkpoint_(checkpoint),
        values_(find(name)),
        amax_(checkpoint.find(name + std::string(kAmax))),
        exponent_(checkpoint.find(name + std::string(kExponent))) {
    const int64_t groups = ceil_div(numel, kMomentGroup);
    const auto is = [](const SafetensorsEntry& entry, int64_t count) {
      return entry.shape == std::vector<int64_t>{count};
    };
    const bool coded = values_.dtype == DType::kE4M3;
    if (!is(values_, numel) || (!coded && values_.dtype != DType::kF32 && values_.dtype != DType::kBF16)) {
      refuse(values_);
    }
    if (coded) find(name + std::string(kAmax));
    if (amax_ != nullptr && (!coded || !is(*amax_, groups) || amax_->dtype != DType::kF32)) refuse(*amax_);
    if (exponent_ != nullptr && (!coded || !is(*exponent_, groups) || exponent_->dtype != DType::kU8)) {
      refuse(*exponent_);
    }
  }

  // Elements of a range that begins with a group, as fp32.
  std::vector<float> read(Device& cpu, ElementRange range) const {
    HostMoment stored(values_.dtype, amax_ != nullptr, exponent_ != nullptr, range.size());
    const int64_t first_group = range.begin / kMomentGroup;
    const ElementRange groups = {first_group, first_group + ceil_div(range.size(), kMomentGroup)};
    checkpoint_.read_elements(values_, range, stored.values);
    if (amax_ != nullptr) checkpoint_.read_elements(*amax_, groups, stored.amax);
    if (exponent_ != nullptr) checkpoint_.read_elements(*exponent_, groups, stored.exponent);
    std::vector<float> values(static_cast<size_t>(range.size()));
    moment_decode(cpu, {.moment = stored.view, .values = {values.data(), DType::kF32, {range.size()}}});
    require_finite(checkpoint_, values_.name, values);
    return values;
  }

 private:
  const SafetensorsEntry& find(const std::string& name) const {
    const SafetensorsEntry* const found = checkpoint_.find(name);
    if (found == nullptr) throw_bad_input("{}: lacks the tensor {}", checkpoint_.path(), name);
    return *found;
  }
  [[noreturn]] void refuse(const SafetensorsEntry& entry) const {
    throw_bad_input("{}: {} is {} [{}], which is no moment of this model", checkpoint_.path(), entry.name,
                    name_of(entry.dtype), fmt::join(entry.shape, ", "));
  }

  const LoadedCheckpoint& checkpoint_;
  const SafetensorsEntry& values_;
  const SafetensorsEntry *amax_, *exponent_;  // null: the format has none
};

// Rounds values to the format of `moment` and puts them at its elements `first` and following.
void store(Device& cpu, Device& device, std::vector<float> values, bool is_second, const MomentView& moment,
           int64_t first) {
  const auto count = static_cast<int64_t>(values.size());
  const HostMoment stored(moment.values.dtype, !moment.amax.empty(), !moment.exponent.empty(), count);
  moment_encode(cpu,
                {.values = {values.data(), DType::kF32, {count}}, .moment = stored.view, .is_second = is_second});
  const auto upload = [&](const std::vector<std::byte>& bytes, const TensorView& target, int64_t element) {
    if (bytes.empty()) return;
    device.copy_to_device(static_cast<std::byte*>(target.data) + element * size_of(target.dtype), bytes.data(),
                          static_cast<int64_t>(bytes.size()));
  };
  upload(stored.values, moment.values, first);
  upload(stored.amax, moment.amax, first / kMomentGroup);
  upload(stored.exponent, moment.exponent, first / kMomentGroup);
}

std::string name_of(const ParameterInfo& parameter, const StateKind& kind) {
  return fmt::format("{}.{}", parameter.name, kind.name);
}

void convert_state(const LoadedCheckpoint& checkpoint, Device& cpu, Device& device, const ParameterInfo& parameter,
                   const StateKind& kind, const MomentView& moment) {
  constexpr int64_t kPiece = CheckpointWeights::kMaxElements;
  static_assert(kPiece % kMomentGroup == 0);
  const ElementRange own = parameter.own_elements();
  const SavedMoment saved(checkpoint, name_of(parameter, kind), parameter.whole_numel());
  // A rank behind the end of a small tensor has nothing of it, and the end may lie within a group.
  PARKA_REQUIRE(own.size() == 0 || own.begin % kMomentGroup == 0);
  for (int64_t begin = own.begin; begin < own.end; begin += kPiece) {
    const ElementRange piece = {begin, std::min(begin + kPiece, own.end)};
    store(cpu, device, saved.read(cpu, piece), kind.is_second, moment, begin - own.begin);
  }
}

}  // namespace

StateConversion::StateConversion(const LoadedCheckpoint& checkpoint, const Optimizer& optimizer, bool may_round)
    : checkpoint_(checkpoint) {
  std::map<std::string, DType> formats;
  for (const NamedTensor& tensor : optimizer.state()) formats.emplace(tensor.name, tensor.view.dtype);
  const auto differs = [&](const std::string& name) {
    const SafetensorsEntry* const saved = checkpoint.find(name);
    const auto own = formats.find(name);
    if (saved == nullptr || own == formats.end()) return saved != nullptr || own != formats.end();
    return saved->dtype != own->second;
  };
  for (size_t i = 0; i < optimizer.parameters().size(); ++i) {
    const ParameterInfo& p = optimizer.parameters()[i];
    if (!p.trainable) continue;
    const std::string master = p.name + std::string(kMaster);
    const SafetensorsEntry* const saved = checkpoint.find(master);
    const bool is_apart = saved != nullptr && saved->dtype == DType::kF32;
    if (differs(master) && (may_round || is_apart)) covered_.insert({p.name, master});
    if (!may_round) continue;
    const UpdateRule own_rule = rule_of(optimizer.config(), p);
    const auto has_states_of = [&](UpdateRule rule) {
      return std::ranges::any_of(state_kinds(optimizer.config(), rule), [&](const StateKind& kind) {
        return checkpoint.find(name_of(p, kind)) != nullptr;
      });
    };
    const bool is_of_other_rule = !has_states_of(own_rule) && std::ranges::any_of(kUpdateRules, has_states_of);
    for (const UpdateRule rule : kUpdateRules) {
      for (const StateKind& kind : state_kinds(optimizer.config(), rule)) {
        const std::string name = name_of(p, kind);
        const std::string parts[] = {name, name + std::string(kAmax), name + std::string(kExponent)};
        if (!std::ranges::any_of(parts, differs)) continue;
        covered_.insert(std::begin(parts), std::end(parts));
        if (is_of_other_rule && rule == own_rule) zeroed_[std::string(kind.name)].insert(name);
      }
    }
  }
}

std::vector<std::string> StateConversion::zeroed() const {
  std::vector<std::string> lines;
  for (const auto& [state, names] : zeroed_)
    lines.push_back(fmt::format("{} of {} parameters begins at zero", state, names.size()));
  return lines;
}

void StateConversion::run(Device& device, Optimizer& optimizer) const {
  if (covered_.empty()) return;
  const std::unique_ptr<Device> cpu = make_cpu_device();
  const std::vector<ParameterInfo>& parameters = optimizer.parameters();
  std::vector<ParameterInfo> trained = parameters;
  std::erase_if(trained, [](const ParameterInfo& p) { return !p.trainable; });
  const CheckpointWeights weights(checkpoint_, trained);
  for (size_t i = 0; i < parameters.size(); ++i) {
    const ParameterInfo& p = parameters[i];
    const ElementRange own = p.own_elements();
    if (covers(p.name)) {
      weights.read(p, own, WeightForm::kMaster, [&](int64_t first, std::span<const float> values) {
        require_finite(checkpoint_, p.name, values);
        optimizer.set_weight(device, i, values, first - own.begin);
      });
    }
    for (size_t k = 0; k < optimizer.kinds(i).size(); ++k) {
      const StateKind& kind = optimizer.kinds(i)[k];
      const std::string name = name_of(p, kind);
      const auto zeroed = zeroed_.find(kind.name);
      const bool begins_at_zero = zeroed != zeroed_.end() && zeroed->second.contains(name);
      if (covers(name) && !begins_at_zero) convert_state(checkpoint_, *cpu, device, p, kind, optimizer.state(i, k));
    }
  }
}

}  // namespace parka
