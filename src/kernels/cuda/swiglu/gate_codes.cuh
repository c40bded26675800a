#pragma once
#include <bit>

#include "kernels/cuda/quantize/matrix_source.cuh"
#include "kernels/cuda/quantize/quantize_tiles.cuh"
#include "kernels/cuda/swiglu/swiglu_elements.cuh"

// The codes of up and gate, made of bf16 numbers, with the product's maximum.
//
// Shapes: T rows (tokens), F columns of the product; up_gate has 2F, up before gate.
namespace parka::cuda {

// The largest magnitude, of pairs together; NaN is skipped.
__device__ inline float max_magnitude_of(const Stored<BFloat16, kSourceWidth>& x) {
  __nv_bfloat162 highest = __float2bfloat162_rn(0.0f), lowest = highest;
#pragma unroll
  for (const uint32_t word : x.word) {
    const __nv_bfloat162 pair(std::bit_cast<__nv_bfloat162_raw>(word));
    highest = __hmax2(highest, pair);
    lowest = __hmin2(lowest, pair);
  }
  const __nv_bfloat162 largest = __hmax2(highest, __hneg2(lowest));
  return fmaxf(__low2float(largest), __high2float(largest));
}

// The codes of 16 numbers of one group, and its scale.
template <typename F8>
struct GroupCodes {
  uint32_t word[tiles::kWords];
  PieceScale scale;

  // Adjacent `lanes` threads have the group, `amax` is the maximum of this one's numbers.
  __device__ GroupCodes(float amax, int lanes) : scale(scale_for<F8, BFloat16>(tiles::group_max(amax, lanes))) {}
  // Encodes a quarter of the numbers. x becomes what the codes decode to.
  __device__ void encode(int quarter, float (&x)[4]) {
    word[quarter] = tiles::encode<F8>(x, scale.inverse);
    // Nothing but to hide from the compiler where the word comes from: it would decode the halves it was made of,
    // each moved to a register of its own first.
    asm("" : "+r"(word[quarter]));
    decode(quarter, x);
  }
  __device__ void decode(int quarter, float (&x)[4]) const { decode_4<F8>(word[quarter], scale.scale, x); }
  __device__ void write(uint8_t* codes) const { tiles::store_16(codes, word); }
};

// Whether GateCodes can make what is wanted of a.up_gate_plain.
inline bool fits_gate_codes(const SwigluForward& a) {
  const auto is_usual = [](const ScaledView& t) {
    return t.scaling == Scaling::kGroup && tiles::fits_tiles(t) && t.scale.dtype == DType::kBF16 &&
           is_aligned(t.data.data, 16);
  };
  const bool same_silu = a.silu.empty() || (is_usual(a.silu) && tiles::same_format(a.silu, a.up_gate));
  return a.up_gate_plain.dtype == DType::kBF16 && is_aligned(a.up_gate_plain.data, 16) && is_usual(a.up_gate) &&
         same_silu && a.product.num_cols() % kSourceWidth == 0;
}

template <typename Activation>
struct GateCodes {
  uint8_t* codes_T2F;
  BFloat16* scales;
  uint8_t* silu_codes_TF;  // null: act(gate) is not saved
  BFloat16* silu_scales;
  int rows, width;
  int group_shift;  // log2 of the columns in a group
  Activation activation;

  GateCodes(const SwigluForward& a, Activation activation_)
      : codes_T2F(tiles::codes_of(a.up_gate)),
        scales(a.up_gate.scale.as<BFloat16>()),
        silu_codes_TF(tiles::codes_of(a.silu)),
        silu_scales(a.silu.empty() ? nullptr : a.silu.scale.as<BFloat16>()),
        rows(static_cast<int>(a.product.num_rows())),
        width(static_cast<int>(a.product.num_cols())),
        group_shift(std::countr_zero(static_cast<uint64_t>(a.up_gate.group))),
        activation(activation_) {}

  // Writes the codes of 16 columns of a row; returns the maximum of their products. To be called by whole warps
  // whose lanes 8i to 8i + 7 have adjacent columns of one row, beginning at a multiple of 128. Nothing is written
  // where there is no row or column.
  template <typename F8, bool kSavesSilu>
  __device__ float write(const Stored<BFloat16, kSourceWidth>& up_plain,
                         const Stored<BFloat16, kSourceWidth>& gate_plain, int row, int col) const {
    const int lanes = 1 << group_shift >> std::countr_zero(unsigned{kSourceWidth});
    const int groups = width >> group_shift, group = col >> group_shift;
    const bool is_first_of_group = col == group << group_shift, exists = row < rows && col < width;
    GroupCodes<F8> up_codes(max_magnitude_of(up_plain), lanes), gate_codes(max_magnitude_of(gate_plain), lanes);
    float amax = 0.0f, silus[16], silu_amax = 0.0f;
#pragma unroll
    for (int quarter = 0; quarter < tiles::kWords; ++quarter) {
      float up[4], gate[4];
      PlainSource<BFloat16>::decode(up_plain, quarter, up);
      up_codes.encode(quarter, up);
      PlainSource<BFloat16>::decode(gate_plain, quarter, gate);
      gate_codes.encode(quarter, gate);
      float activated[4], slope[4];
      activate(activation, /*coded=*/!kSavesSilu, /*saved=*/false, gate, activated, slope);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        silus[4 * quarter + i] = activated[i];
        if constexpr (kSavesSilu) {
          silu_amax = max_magnitude(silu_amax, activated[i]);
        } else {
          amax = max_magnitude(amax, product_of(up[i], activated[i]));
        }
      }
    }
    if constexpr (kSavesSilu) {
      GroupCodes<F8> silu_codes(silu_amax, lanes);
#pragma unroll
      for (int quarter = 0; quarter < tiles::kWords; ++quarter) {
        float up[4], saved[4];
        up_codes.decode(quarter, up);
#pragma unroll
        for (int i = 0; i < 4; ++i) saved[i] = silus[4 * quarter + i];
        silu_codes.encode(quarter, saved);
#pragma unroll
        for (int i = 0; i < 4; ++i) amax = max_magnitude(amax, product_of(up[i], saved[i]));
      }
      if (exists) silu_codes.write(silu_codes_TF + offset_of(row, width, col));
      if (exists && is_first_of_group) {
        silu_scales[offset_of(row, groups, group)] = from_float<BFloat16>(silu_codes.scale.scale);
      }
    }
    if (!exists) return amax;
    uint8_t* const codes = codes_T2F + offset_of(row, 2 * width, col);
    up_codes.write(codes);
    gate_codes.write(codes + width);
    if (is_first_of_group) {
      BFloat16* const target = scales + offset_of(row, 2 * groups, group);
      target[0] = from_float<BFloat16>(up_codes.scale.scale);
      target[groups] = from_float<BFloat16>(gate_codes.scale.scale);
    }
    return amax;
  }
};

}  // namespace parka::cuda
