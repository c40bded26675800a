#include "kernels/ops/attention/rope.h"

#include "kernels/cuda/attention/rope_pairs.cuh"
#include "kernels/cuda/gemm/sm90_float8_tiles.cuh"
#include "kernels/cuda/quantize/group_codes.cuh"

// Shapes: T rows (tokens), S positions, D elements of a head, W = (H + 2 Hkv) D columns.
namespace parka::cuda {
namespace {

// The codes of a tile: 128 columns of the lower half of W beside those that lie W / 2 behind them, whole heads
// both. A thread has kWidth adjacent pairs of a head of each.
struct RotatedCodes {
  static constexpr int kWidth = 8;
  using Codes = Pack<uint32_t, kWidth / 4>;

  BFloat16* qkv_TW;
  const float* cos_sin_SD;
  Float8E4M3* codes_TW;
  BFloat16* scales;
  Positions positions;
  int rows, width, rotated_width;  // T, W, columns of queries and keys
  int half;                        // D / 2

  explicit RotatedCodes(const RopeForward& a)
      : qkv_TW(a.qkv.as<BFloat16>()),
        cos_sin_SD(a.cos_sin.as<float>()),
        codes_TW(a.saved.data.as<Float8E4M3>()),
        scales(a.saved.scale.as<BFloat16>()),
        positions(a.cos_sin.dim[0]),
        rows(static_cast<int>(a.qkv.dim[0])),
        width(static_cast<int>(a.qkv.dim[1])),
        rotated_width(static_cast<int>((a.num_heads + a.num_kv_heads) * a.cos_sin.dim[1])),
        half(static_cast<int>(a.cos_sin.dim[1] / 2)) {}

  struct Angles {
    Stored<float, kWidth> cos, sin;
  };
#if PARKA_SM90_CODE
  __device__ Angles angles(int row, int pair) const {
    const unsigned position = static_cast<unsigned>(positions.of(min(row, rows - 1)));
    const float* const cos_D = cos_sin_SD + (position * 2 * half + pair);
    return {load_stored<kWidth>(cos_D), load_stored<kWidth>(cos_D + half)};
  }
#endif

  // A thread makes these of its pairs.
  struct Made {
    Codes low_codes, high_codes;
    float low[kWidth], high[kWidth];  // what they decode to
    float own_scale;                  // GroupScales::own
  };
  // Which pairs of a tile are rotated. kSome: those that begin before rotated_width.
  enum class Rotates { kAll, kSome, kNone };

  // The codes of pairs whose low halves begin at column `col`. Called by whole warps, whose lanes 8i to 8i + 7 have
  // 128 columns of one row; kLanes of them have a group. Without branches, two heads' instructions mix.
  template <int kLanes, Rotates kRotates>
  __device__ Made make(const Stored<BFloat16, kWidth>& low, const Stored<BFloat16, kWidth>& high,
                       const Angles& angle, int col) const {
    const bool rotates = kRotates == Rotates::kAll || (kRotates == Rotates::kSome && col < rotated_width);
    Made made;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const float new_low = rotated_low(low[i], high[i], angle.cos[i], angle.sin[i]);
      const float new_high = rotated_high(low[i], high[i], angle.cos[i], angle.sin[i]);
      made.low[i] = rotates ? new_low : low[i];
      made.high[i] = rotates ? new_high : high[i];
    }
    const GroupScales scale = scales_for_groups<Float8E4M3, BFloat16>(max_magnitude_of(0.0f, made.low),
                                                                      max_magnitude_of(0.0f, made.high), kLanes);
    made.low_codes = encode_and_decode<Float8E4M3>(scale.first, made.low);
    made.high_codes = encode_and_decode<Float8E4M3>(scale.second, made.high);
    made.own_scale = scale.own.scale;
    return made;
  }

  // At the offset of the first low half.
  template <int kLanes>
  __device__ void write(const Made& made, int64_t offset) const {
    *reinterpret_cast<Codes*>(codes_TW + offset) = made.low_codes;
    *reinterpret_cast<Codes*>(codes_TW + offset + half) = made.high_codes;
    store(qkv_TW + offset, made.low);
    store(qkv_TW + offset + half, made.high);
    if (static_cast<int>(threadIdx.x) % kLanes >= 2) return;  // the first two threads of a group write a scale each
    constexpr int kGroup = kLanes * kWidth;
    scales[(offset + (GroupScales::owns_first() ? 0 : half)) / kGroup] = from_float<BFloat16>(made.own_scale);
  }
};

#if PARKA_SM90_CODE

// A finisher makes half a tile. kRotates is for columns of W's upper half: the lower half's are all rotated.
template <int kLanes, RotatedCodes::Rotates kRotates>
__device__ __forceinline__ void rotate_half(const RotatedCodes& rotated, sm90_float8::TileOrder::Place place,
                                            int half_tile, uint32_t memory) {
  using namespace sm90_float8;
  constexpr int kWidth = RotatedCodes::kWidth, kRowThreads = kHalfCols / (2 * kWidth);
  constexpr int kRowsAtATime = kFinishers / kRowThreads;
  const int thread = finisher_index(), part = thread % kRowThreads * kWidth;  // of 64 pairs
  const int half = rotated.half, pair = part % half, col = part / half * 2 * half + pair;
  const int to_upper = rotated.width / 2;
  const auto row_of = [&](int row) { return place.row + OutTile::tile_row(half_tile, row); };
  auto next_angles = rotated.angles(row_of(thread / kRowThreads), pair);
#pragma unroll 1
  for (int row = thread / kRowThreads; row < kHalfRows; row += kRowsAtATime) {
    const auto angles = next_angles;
    next_angles = rotated.angles(row_of(row + kRowsAtATime), pair);  // they come from memory
    const auto read = [&](int at) { return read_half<kWidth>(memory, row, at); };
    const auto low = read(col), high = read(col + half);
    const auto upper_low = read(kHalfCols + col), upper_high = read(kHalfCols + col + half);
    const auto made = rotated.make<kLanes, RotatedCodes::Rotates::kAll>(low, high, angles, place.col + col);
    const auto made_upper =
        rotated.make<kLanes, kRotates>(upper_low, upper_high, angles, place.col + to_upper + col);
    if (row_of(row) >= rotated.rows) continue;
    const int64_t offset = int64_t{row_of(row)} * rotated.width + place.col + col;
    rotated.write<kLanes>(made, offset);
    rotated.write<kLanes>(made_upper, offset + to_upper);
  }
}

#endif

template <int kLanes>
__global__ void __launch_bounds__(sm90_float8::kThreads, 1) __cluster_dims__(sm90_float8::kClusterBlocks, 1, 1)
    project_rotate_kernel(const __grid_constant__ sm90_float8::Product product, const RotatedCodes rotated) {
#if PARKA_SM90_CODE
  extern __shared__ __align__(1024) unsigned char shared[];
  sm90_float8::run_product(product, shared,
                           [&](sm90_float8::TileOrder::Place place, int half_tile, uint32_t memory) {
                             using Rotates = RotatedCodes::Rotates;
                             if (place.col + product.half_cols < rotated.rotated_width) {
                               rotate_half<kLanes, Rotates::kSome>(rotated, place, half_tile, memory);
                             } else {
                               rotate_half<kLanes, Rotates::kNone>(rotated, place, half_tile, memory);
                             }
                           });
#endif
}

}  // namespace

bool has_one_kernel(Device& device, const RopeProjection& a) {
  const int64_t half = a.rope.cos_sin.dim[1] / 2, group = a.rope.saved.group;
  const bool has_whole_heads = half % RotatedCodes::kWidth == 0 && sm90_float8::kHalfCols % (2 * half) == 0 &&
                               a.rope.qkv.dim[1] % sm90_float8::kTileCols == 0;
  const bool has_whole_groups = (group == 16 || group == 32 || group == 64) && half % group == 0;
  return sm90_float8::runs_on(as_cuda(device)) && suits_one_kernel(a) && has_whole_heads && has_whole_groups &&
         a.rope.saved.scale.dtype == DType::kBF16 && a.rope.cos_sin.numel() <= INT32_MAX &&
         is_aligned(a.rope.qkv.data, 16) && is_aligned(a.rope.cos_sin.data, 16) &&
         is_aligned(a.rope.saved.data.data, 16);
}

void rope_projection(Device& device, const RopeProjection& a) {
  if (!cuda::has_one_kernel(device, a)) {
    cuda::gemm(device, a.projection);
    cuda::rope_forward(device, a.rope);
    return;
  }
  constexpr int kWidth = RotatedCodes::kWidth;
  const auto kernel = a.rope.saved.group == 2 * kWidth   ? project_rotate_kernel<2>
                      : a.rope.saved.group == 4 * kWidth ? project_rotate_kernel<4>
                                                         : project_rotate_kernel<8>;
  sm90_float8::launch_product(as_cuda(device), "rope_projection", kernel, sm90_float8::Product(a.projection),
                              RotatedCodes(a.rope));
}

}  // namespace parka::cuda
