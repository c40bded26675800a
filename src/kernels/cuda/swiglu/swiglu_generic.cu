#include "kernels/cuda/quantize/quantize_tiles.cuh"
#include "kernels/cuda/swiglu/swiglu_loader.cuh"

// SwiGLU of any formats and shapes, element by element: slow, and the same bits as
// swiglu.cu's but for the gradient of a row's factor, which is summed in another order.
namespace parka::cuda {
namespace {

enum class Wanted { kSilu, kProduct, kGradient, kMagnitude };

// act(gate) as it is to be saved, the product, or the larger magnitude of both gradients, [T, F]; or both, [T, 2F].
template <Wanted kWanted, int kRowStep = 1>
struct AnySwigluSource {
  AnySource up_gate, silu, d_product;
  GateActivation activation;
  int width;

  struct Fetched {  // the place alone: element() loads
    int row, col;
  };

  bool fits_wide() const { return width % kSourceWidth == 0; }
  __device__ Fetched fetch(int row, int col) const { return {row, col}; }
  __device__ void decode(const Fetched& at, int quarter, float (&x)[4]) const {
    for (int i = 0; i < 4; ++i) x[i] = element(at.row, at.col + 4 * quarter + i);
  }
  // A call: inlined for each of 16 columns, it would make kernels large.
  __device__ __noinline__ float element(int row, int col) const {
    row *= kRowStep;
    const bool is_gate = col >= width;
    if (is_gate) col -= width;
    const bool saved = kWanted != Wanted::kSilu && silu.data != nullptr;
    const bool coded = kWanted != Wanted::kSilu && up_gate.dtype != DType::kF32 && up_gate.dtype != DType::kBF16;
    const float gate[] = {up_gate.element(row, col + width)};
    Numbers<1> x;
    x.up[0] = up_gate.element(row, col);
    if (saved) x.activated[0] = silu.element(row, col);
    activate(activation, coded, saved, gate, x.activated, x.slope);
    if constexpr (kWanted == Wanted::kSilu) return x.activated[0];
    if constexpr (kWanted == Wanted::kProduct) return x.product(0);
    x.d_product[0] = d_product.element(row, col);
    if constexpr (kWanted == Wanted::kMagnitude) return x.magnitude(0);
    return is_gate ? x.d_gate(0) : x.d_up(0);
  }
};

// The same of rows that have a factor.
template <Wanted kWanted, int kRowStep>
struct FactoredElements {
  AnySwigluSource<kWanted, kRowStep> source;
  const float* row_factor;

  __device__ float element(int row, int col) const {
    return scaled_by(row_factor[row * kRowStep], source.element(row, col));
  }
};

template <Wanted kWanted, int kRowStep = 1, typename Args>
AnySwigluSource<kWanted, kRowStep> any_source(const Args& a) {
  ScaledView d_product = {};
  if constexpr (std::is_same_v<Args, SwigluBackward>) d_product = a.d_product;
  return {AnySource(a.up_gate), AnySource(a.silu), AnySource(d_product), a.activation,
          static_cast<int>(a.up_gate.num_cols() / 2)};
}

// find_amax_of_elements() and write_rare() of what is wanted, times the factors of rows.
template <Wanted kWanted, int kRowStep = 1, typename Args>
void find_any_amax(CudaDevice& device, const Args& a, float* amax) {
  const int64_t rows = ceil_div(a.up_gate.num_rows(), kRowStep), width = a.up_gate.num_cols() / 2;
  const auto source = any_source<kWanted, kRowStep>(a);
  if (a.row_factor.empty()) return find_amax_of_elements(device, source, rows, width, amax);
  const FactoredElements<kWanted, kRowStep> factored{source, a.row_factor.template as<float>()};
  find_amax_of_elements(device, factored, rows, width, amax);
}

template <Wanted kWanted, typename Args>
void write_any(CudaDevice& device, const Args& a, int64_t cols, const ScaledView& out, const ScaledView& out_t,
               const float* amax) {
  const int64_t rows = a.up_gate.num_rows();
  const auto source = any_source<kWanted>(a);
  if (a.row_factor.empty()) return write_rare(device, source, rows, cols, out, out_t, amax);
  const FactoredElements<kWanted, 1> factored{source, a.row_factor.template as<float>()};
  tiles::write_pieces(device, factored, rows, cols, out, /*transposed=*/false, amax);
  tiles::write_pieces(device, factored, rows, cols, out_t, /*transposed=*/true, amax);
}

// *amax = what SwigluBackward::samples_amax takes.
__global__ void take_sampled_amax_kernel(const float* sampled, float* amax) {
  *amax = fmaxf(*amax, __fmul_rn(kAmaxRoom, *sampled));
}

// A warp has a row.
__global__ void __launch_bounds__(tiles::kThreads)
    any_row_gradient_kernel(const AnySwigluSource<Wanted::kProduct> product, int rows, float* out) {
  constexpr int kRows = tiles::kThreads / kWarpSize;
  const int row = static_cast<int>(blockIdx.x) * kRows + static_cast<int>(threadIdx.x) / kWarpSize;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  if (row >= rows) return;
  float sum = 0.0f;
  for (int col = lane; col < product.width; col += kWarpSize) {
    sum = fmaf(product.d_product.element(row, col), product.element(row, col), sum);
  }
  sum = warp_sum(sum);
  if (lane == 0) out[row] = sum;
}

}  // namespace

void write_any_silu(CudaDevice& device, const SwigluForward& a) {
  tiles::write_pieces(device, any_source<Wanted::kSilu>(a), a.up_gate.num_rows(), a.silu.num_cols(), a.silu,
                      /*transposed=*/false, /*amax=*/nullptr);
}

template <typename Args>
void write_any_product(CudaDevice& device, const Args& a, float* amax, bool finds_amax) {
  if (finds_amax) find_any_amax<Wanted::kProduct>(device, a, amax);
  write_any<Wanted::kProduct>(device, a, a.up_gate.num_cols() / 2, a.product, a.product_t, amax);
}
template void write_any_product(CudaDevice& device, const SwigluForward& a, float* amax, bool finds_amax);
template void write_any_product(CudaDevice& device, const SwigluBackward& a, float* amax, bool finds_amax);

void write_any_gradient(CudaDevice& device, const SwigluBackward& a, float* amax) {
  if (amax != nullptr) find_any_amax<Wanted::kMagnitude>(device, a, amax);
  if (a.samples_amax) {
    find_any_amax<Wanted::kMagnitude, kAmaxSampling>(device, a, amax + 1);
    launch(device, "swiglu_backward", take_sampled_amax_kernel, {1, 1}, amax + 1, amax);
  }
  write_any<Wanted::kGradient>(device, a, a.up_gate.num_cols(), a.d_up_gate, a.d_up_gate_t, amax);
}

void any_row_gradient(CudaDevice& device, const SwigluBackward& a, float* d_row_factor_T) {
  const int64_t rows = a.up_gate.num_rows();
  launch(device, "swiglu_row_gradient", any_row_gradient_kernel,
         {ceil_div(rows, tiles::kThreads / kWarpSize), tiles::kThreads}, any_source<Wanted::kProduct>(a),
         static_cast<int>(rows), d_row_factor_T);
}

}  // namespace parka::cuda
