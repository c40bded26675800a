#include "core/dtype.h"

#include "core/error.h"

namespace parka {

int64_t size_of(DType dtype) {
  switch (dtype) {
    case DType::kF32:
    case DType::kI32: return 4;
    case DType::kBF16:
    case DType::kF16:
    case DType::kU16: return 2;
    case DType::kE4M3:
    case DType::kE5M2:
    case DType::kU8:
    case DType::kI8: return 1;
    case DType::kI64: return 8;
  }
  throw_internal("unknown dtype {}", static_cast<int>(dtype));
}

std::string_view name_of(DType dtype) {
  switch (dtype) {
    case DType::kF32: return "fp32";
    case DType::kBF16: return "bf16";
    case DType::kE4M3: return "e4m3";
    case DType::kE5M2: return "e5m2";
    case DType::kI32: return "int32";
    case DType::kU16: return "uint16";
    case DType::kU8: return "uint8";
    case DType::kI8: return "int8";
    case DType::kF16: return "fp16";
    case DType::kI64: return "int64";
  }
  throw_internal("unknown dtype {}", static_cast<int>(dtype));
}

const Float8Traits& float8_traits(DType dtype) {
  if (dtype == DType::kE4M3) return kE4M3Traits;
  if (dtype == DType::kE5M2) return kE5M2Traits;
  throw_internal("{} is not an 8-bit float", name_of(dtype));
}

}  // namespace parka
