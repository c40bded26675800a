#pragma once
#include <cstdint>
#include "kernels/op/op.h"

#include "core/bit_hash.h"
#include "core/tensor.h"

namespace parka {

// hash += the hash of x's bytes (core/bit_hash.h), modulo 2^64. For a hash over several tensors, or over the pieces
// of one that lie on several devices. The caller sets hash first, to 0 as a rule. They must not overlap.
struct BitHash {
  TensorView x;             // any shape and format, in; fast where it is aligned to 16 bytes
  TensorView hash;          // [8] uint8, in/out: a little-endian 64-bit number, aligned to 8 bytes
  uint64_t first_byte = 0;  // where x begins in the whole that it is a piece of; a multiple of 8
};
PARKA_OP(bit_hash, BitHash);

}  // namespace parka
