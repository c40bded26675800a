#include "engine/files/float_elements.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>

#include "core/error.h"
#include "core/parallel.h"

namespace parka {
namespace {

constexpr int64_t kPieceElements = 1 << 16;

template <typename Element, typename Decode>
void decode_each(ByteSpan bytes, std::span<float> values, Decode decode) {
  parallel_for(static_cast<int64_t>(values.size()), kPieceElements, [&](int64_t begin, int64_t end) {
    for (auto i = static_cast<size_t>(begin); i < static_cast<size_t>(end); ++i) {
      Element element;
      std::memcpy(&element, bytes.data() + i * sizeof(Element), sizeof(Element));
      values[i] = decode(element);
    }
  });
}

template <typename Encode>
void encode_each(std::span<const float> values, std::span<std::byte> bytes, Encode encode) {
  parallel_for(static_cast<int64_t>(values.size()), kPieceElements, [&](int64_t begin, int64_t end) {
    for (auto i = static_cast<size_t>(begin); i < static_cast<size_t>(end); ++i) {
      const auto element = encode(values[i]);
      std::memcpy(bytes.data() + i * sizeof(element), &element, sizeof(element));
    }
  });
}

// True if all elements, without their sign, are below `limit` as integers: so are the finite ones of every float
// format below the bits of its first infinity or NaN.
template <typename Bits>
bool all_below(ByteSpan bytes, Bits limit) {
  constexpr Bits kMagnitude = std::numeric_limits<Bits>::max() >> 1;
  Bits largest = 0;  // no branch for each element: compilers vectorise this
  for (size_t i = 0; i < bytes.size() / sizeof(Bits); ++i) {
    Bits bits;
    std::memcpy(&bits, bytes.data() + i * sizeof(Bits), sizeof(Bits));
    largest = std::max<Bits>(largest, bits & kMagnitude);
  }
  return largest < limit;
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

bool piece_is_finite(DType dtype, ByteSpan bytes) {
  switch (dtype) {
    case DType::kF32: return all_below<uint32_t>(bytes, 0x7f800000u);
    case DType::kBF16: return all_below<uint16_t>(bytes, 0x7f80u);
    case DType::kF16: return all_below<uint16_t>(bytes, 0x7c00u);
    case DType::kE4M3: return all_below<uint8_t>(bytes, 0x7fu);
    case DType::kE5M2: return all_below<uint8_t>(bytes, 0x7cu);
    case DType::kI32:
    case DType::kU16:
    case DType::kU8:
    case DType::kI64: return true;
  }
  throw_internal("unknown dtype {}", static_cast<int>(dtype));
}

bool all_finite(std::span<const float> values) { return all_finite(DType::kF32, std::as_bytes(values)); }

bool all_finite(DType dtype, ByteSpan bytes) {
  constexpr int64_t kPieceBytes = 256 << 10;
  std::atomic<bool> finite = true;
  parallel_for(static_cast<int64_t>(bytes.size()), kPieceBytes, [&](int64_t begin, int64_t end) {
    const ByteSpan piece = bytes.subspan(static_cast<size_t>(begin), static_cast<size_t>(end - begin));
    if (finite && !piece_is_finite(dtype, piece)) finite = false;
  });
  return finite;
}

}  // namespace parka
