#include "kernels/ops/elementwise/bit_hash.h"

#include "kernels/op/define.h"

namespace parka {

void bit_hash(Device& device, const BitHash& a) {
  const TensorView flat = a.x.reshaped({a.x.numel()});
  check_tensor("bit_hash", "x", flat, {flat.dim[0]}, {flat.dtype});
  check_tensor("bit_hash", "hash", a.hash, {kHashWordBytes}, {DType::kU8});
  if (reinterpret_cast<uintptr_t>(a.hash.data) % kHashWordBytes != 0) {
    throw_internal("bit_hash: hash is not aligned to {} bytes", kHashWordBytes);
  }
  if (a.first_byte % kHashWordBytes != 0) {
    throw_internal("bit_hash: first_byte is {}, wanted a multiple of {}", a.first_byte, kHashWordBytes);
  }
  if (flat.dim[0] == 0) return;
  PARKA_DISPATCH(bit_hash, device, a);
}

OpCost cost_of(const BitHash& a) { return moved(bytes_of(a.x), a.x); }

}  // namespace parka
