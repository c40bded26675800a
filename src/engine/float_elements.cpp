#include "engine/float_elements.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/error.h"

namespace parka {
namespace {

template <typename Element, typename Decode>
void decode_each(ByteSpan bytes, std::span<float> values, Decode decode) {
  for (size_t i = 0; i < values.size(); ++i) {
    Element element;
    std::memcpy(&element, bytes.data() + i * sizeof(Element), sizeof(Element));
    values[i] = decode(element);
  }
}

template <typename Encode>
void encode_each(std::span<const float> values, std::span<std::byte> bytes, Encode encode) {
  for (size_t i = 0; i < values.size(); ++i) {
    const auto element = encode(values[i]);
    std::memcpy(bytes.data() + i * sizeof(element), &element, sizeof(element));
  }
}

}  // namespace

void decode_floats(DType dtype, ByteSpan bytes, std::span<float> values) {
  PARKA_REQUIRE(bytes.size() == values.size() * static_cast<size_t>(size_of(dtype)));
  switch (dtype) {
    case DType::kF32:
      if (!bytes.empty()) std::memcpy(values.data(), bytes.data(), bytes.size());
      return;
    case DType::kBF16: return decode_each<BFloat16>(bytes, values, decode_bf16);
    case DType::kF16: return decode_each<Float16>(bytes, values, decode_fp16);
    default: throw_internal("{} is not a plain float", name_of(dtype));
  }
}

void encode_floats(std::span<const float> values, DType dtype, std::span<std::byte> bytes) {
  PARKA_REQUIRE(bytes.size() == values.size() * static_cast<size_t>(size_of(dtype)));
  switch (dtype) {
    case DType::kF32:
      if (!bytes.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
      return;
    case DType::kBF16: return encode_each(values, bytes, encode_bf16);
    case DType::kF16: return encode_each(values, bytes, encode_fp16);
    default: throw_internal("{} is not a plain float", name_of(dtype));
  }
}

bool all_finite(std::span<const float> values) {
  return std::all_of(values.begin(), values.end(), [](float x) { return std::isfinite(x); });
}

}  // namespace parka
