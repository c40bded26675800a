#pragma once
#include <array>
#include <cstdint>
#include <string_view>

#include "core/dtype.h"
#include "core/error.h"

// The vocabulary of config structs (model/model_config.h, optim/optimizer_config.h, engine/config/config.h).
//
// A config struct lists its fields once, in `fields`, which calls a visitor as
//   visit("key", member, "help", limit, effects)
// where the limit says which values the field admits, and the effects what another value changes. Parsing, the
// check for unknown keys, the resolved print-out, the schema and the documentation are all made from that list
// (engine/config/config_table.h). So every field is known to all of them.
namespace parka {

// The largest integer that every JSON reader keeps exactly, 2^53.
inline constexpr int64_t kMaxExactInteger = int64_t{1} << 53;
// Dimensions and token ids fit in 31 bits, so that a product of two fits in an int64.
inline constexpr int64_t kMaxDimension = (int64_t{1} << 31) - 1;

// An integer field admits min..max.
struct IntegerRange {
  int64_t min = 0;
  int64_t max = kMaxExactInteger;
};

// A real field admits min..max, or min <= x < max. The defaults are generous limits inside the range of fp32.
struct RealRange {
  double min = 0.0;
  double max = 1e30;
  bool max_excluded = false;
};

// A text field admits the empty text too.
struct MayBeEmpty {};

// The effects of another value of a field. Comparisons of configs go by them, so a field without does not compile.
enum class Effects : uint8_t {};
inline constexpr Effects kNoEffect{0};
inline constexpr Effects kHashed{1};             // the numbers that a run computes: part of config_hash()
inline constexpr Effects kFixedOnResume{2};      // what a checkpoint holds, or what its position in the data means
inline constexpr Effects kConvertedOnResume{4};  // the format of states, which --convert-states changes
inline constexpr Effects kWeights{8};            // which weights a model has, or what they mean
inline constexpr Effects kStepTime{16};          // how long one GPU takes for a micro-batch and an update
inline constexpr Effects kRunTime{32};           // how long several GPUs take for a step, but not one

constexpr Effects operator|(Effects a, Effects b) {
  return Effects{static_cast<uint8_t>(static_cast<uint8_t>(a) | static_cast<uint8_t>(b))};
}
// True if `effects` has all of `asked`.
constexpr bool has(Effects effects, Effects asked) { return (effects | asked) == effects; }

inline constexpr Effects kModelField = kHashed | kFixedOnResume | kWeights | kStepTime;  // most fields of models

// A field admits only these values.
template <typename T, size_t N>
struct OneOf {
  std::array<T, N> values;
};
template <typename T, typename... Rest>
constexpr OneOf<T, 1 + sizeof...(Rest)> one_of(T first, Rest... rest) {
  return {{first, T{rest}...}};
}

// The names of an enum's values in a config. It is specialised beside each enum that a config holds, as
//   template <> struct EnumNames<Color> { static constexpr EnumName<Color> kAll[] = {{Color::kRed, "red"}, ...}; };
template <typename E>
struct EnumName {
  E value;
  std::string_view name;
};
template <typename E>
struct EnumNames;

template <typename E>
concept NamedEnum = requires {
  EnumNames<E>::kAll;
};

// The name of a value. Throws Error(kInternal) for a value that is not in the enum.
template <NamedEnum E>
std::string_view name_of(E value) {
  for (const EnumName<E>& entry : EnumNames<E>::kAll) {
    if (entry.value == value) return entry.name;
  }
  throw_internal("{} is not a value of its enum", static_cast<int>(value));
}

}  // namespace parka
