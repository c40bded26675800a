#pragma once
#include <cstdint>
#include "kernels/op/op.h"

#include "core/bit_hash.h"
#include "core/tensor.h"

namespace parka {

// hash += the hash of x's bytes (core/bit_hash.h), modulo 2^64. Several calls hash several tensors, or a tensor's
// parts on several devices. The caller initializes hash, usually to 0. x and hash must not overlap.
struct BitHash {
  TensorView x;             // any shape and format, in; fast where it is aligned to 16 bytes
  TensorView hash;          // [8] uint8, in/out: a little-endian 64-bit number, aligned to 8 bytes
  uint64_t first_byte = 0;  // where x begins in the whole that it is a part of; a multiple of 8
};
PARKA_OP(bit_hash, BitHash);

}  // namespace parka
