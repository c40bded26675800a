#pragma once
#include <array>
#include <bit>

#include "kernels/cuda/quantize/matrix_source.cuh"
#include "kernels/cuda/quantize/quantize_tiles.cuh"
#include "kernels/cuda/swiglu/swiglu_elements.cuh"

// The codes of up and gate, made of bf16 numbers, with the product's maximum.
//
// Shapes: T rows (tokens), F columns of the product; up_gate has 2F, up before gate.
namespace parka::cuda {

// The largest magnitudes of the pairs' low halves, and of their high ones; NaN is skipped.
__device__ inline __nv_bfloat162 max_magnitudes_of(const Stored<BFloat16, kSourceWidth>& x) {
  __nv_bfloat162 highest = __float2bfloat162_rn(0.0f), lowest = highest;
#pragma unroll
  for (const uint32_t word : x.word) {
    const __nv_bfloat162 pair(std::bit_cast<__nv_bfloat162_raw>(word));
    highest = __hmax2(highest, pair);
    lowest = __hmin2(lowest, pair);
  }
  return __hmax2(highest, __hneg2(lowest));
}

// The largest magnitudes of up and of gate in groups that adjacent `lanes` threads have, at most 8. Without a
// branch, so that a thread can be at several rows at once.
__device__ inline __nv_bfloat162 group_magnitudes_of(const Stored<BFloat16, kSourceWidth>& up,
                                                     const Stored<BFloat16, kSourceWidth>& gate, int lanes) {
  const __nv_bfloat162 of_up = max_magnitudes_of(up), of_gate = max_magnitudes_of(gate);
  __nv_bfloat162 largest = __hmax2(__lows2bfloat162(of_up, of_gate), __highs2bfloat162(of_up, of_gate));
#pragma unroll
  for (int offset = 4; offset > 0; offset /= 2) {
    const __nv_bfloat162 larger = __hmax2(largest, __shfl_xor_sync(kFullWarp, largest, offset));
    largest = offset < lanes ? larger : largest;
  }
  return largest;
}

// The codes of 16 numbers of one group, and its scale.
template <typename F8>
struct GroupCodes {
  uint32_t word[tiles::kWords];
  PieceScale scale;

  // `amax` is the maximum of the group's numbers.
  __device__ explicit GroupCodes(float amax) : scale(scale_for<F8, BFloat16>(amax)) {}
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

// True if GateCodes can make what is wanted of a.up_gate_plain.
inline bool fits_gate_codes(const SwigluForward& a) {
  const auto is_usual = [](const ScaledView& t) {
    return t.scaling == Scaling::kGroup && tiles::fits_tiles(t) && t.scale.dtype == DType::kBF16 &&
           is_aligned(t.data.data, 16);
  };
  const bool same_silu = a.silu.empty() || (is_usual(a.silu) && tiles::same_format(a.silu, a.up_gate));
  return a.up_gate_plain.dtype == DType::kBF16 && is_aligned(a.up_gate_plain.data, 16) && is_usual(a.up_gate) &&
         same_silu && a.product.num_cols() % kSourceWidth == 0;
}

// For ops that a product of codes is a part of: the maximum of the product, of 0 at first, to be raised while
// up_gate and silu are written; null where the product has no scale for the whole of it. `op` is whose workspace it
// is.
float* zero_product_amax(CudaDevice& device, std::string_view op, const SwigluForward& a);
// Then writes the product.
void write_product_of_codes(CudaDevice& device, const SwigluForward& a, float* amax);

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

  // A thread makes these of 16 columns of a row.
  template <typename F8, bool kSavesSilu>
  struct Made {
    std::array<GroupCodes<F8>, kSavesSilu ? 3 : 2> codes;  // of up, gate and silu
    float amax;                                            // of the products
  };

  // Called by whole warps whose lanes 8i to 8i + 7 have adjacent columns of a row, from a multiple of 128 on.
  template <typename F8, bool kSavesSilu>
  __device__ Made<F8, kSavesSilu> make(const Stored<BFloat16, kSourceWidth>& up_plain,
                                       const Stored<BFloat16, kSourceWidth>& gate_plain) const {
    const int lanes = 1 << group_shift >> std::countr_zero(unsigned{kSourceWidth});
    const __nv_bfloat162 largest = group_magnitudes_of(up_plain, gate_plain, lanes);
    GroupCodes<F8> up_codes(__low2float(largest)), gate_codes(__high2float(largest));
    float amax = 0.0f, silus[16], silu_amax = 0.0f;
    for_each<tiles::kWords>([&](int quarter) {
      float up[4], gate[4];
      PlainSource<BFloat16>::decode(up_plain, quarter, up);
      up_codes.encode(quarter, up);
      PlainSource<BFloat16>::decode(gate_plain, quarter, gate);
      gate_codes.encode(quarter, gate);
      float activated[4], slope[4];
      activate(activation, /*coded=*/!kSavesSilu, /*saved=*/false, gate, activated, slope);
      for_each<4>([&](int i) {
        silus[4 * quarter + i] = activated[i];
        if constexpr (kSavesSilu) {
          silu_amax = max_magnitude(silu_amax, activated[i]);
        } else {
          amax = max_magnitude(amax, product_of(up[i], activated[i]));
        }
      });
    });
    if constexpr (kSavesSilu) {
      GroupCodes<F8> silu_codes(tiles::group_max(silu_amax, lanes));
      for_each<tiles::kWords>([&](int quarter) {
        float up[4], saved[4];
        up_codes.decode(quarter, up);
        for_each<4>([&](int i) { saved[i] = silus[4 * quarter + i]; });
        silu_codes.encode(quarter, saved);
        for_each<4>([&](int i) { amax = max_magnitude(amax, product_of(up[i], saved[i])); });
      });
      return {{up_codes, gate_codes, silu_codes}, amax};
    } else {
      return {{up_codes, gate_codes}, amax};
    }
  }

  // Nothing where there is no row or column.
  template <typename F8, bool kSavesSilu>
  __device__ void store(const Made<F8, kSavesSilu>& made, int row, int col) const {
    if (row >= rows || col >= width) return;
    const int groups = width >> group_shift, group = col >> group_shift;
    uint8_t* const codes = codes_T2F + offset_of(row, 2 * width, col);
    made.codes[0].write(codes);
    made.codes[1].write(codes + width);
    if constexpr (kSavesSilu) made.codes[2].write(silu_codes_TF + offset_of(row, width, col));
    if (col != group << group_shift) return;  // the first of a group writes its scale
    BFloat16* const target = scales + offset_of(row, 2 * groups, group);
    target[0] = from_float<BFloat16>(made.codes[0].scale.scale);
    target[groups] = from_float<BFloat16>(made.codes[1].scale.scale);
    if constexpr (kSavesSilu) {
      silu_scales[offset_of(row, groups, group)] = from_float<BFloat16>(made.codes[2].scale.scale);
    }
  }
};

}  // namespace parka::cuda
