#include "kernels/ops/swiglu/swiglu.h"

#include <initializer_list>

#include "kernels/cuda/swiglu/swiglu_elements.cuh"
#include "kernels/cuda/swiglu/swiglu_fp8.h"
#include "kernels/cuda/vector.cuh"
#include "kernels/device/cuda/check.h"
#include "kernels/device/cuda/cuda_device.h"

// Shapes: T rows (tokens), F columns of the product; up_gate has 2F, up before gate. A block works on a piece of
// one row, each thread on packs of kWidth adjacent columns: 16 bytes of up_gate, or a single element where columns
// or addresses do not allow that.
namespace parka::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kForwardPacks = 2;  // per thread

template <typename X>
constexpr int kWideWidth = 16 / sizeof(X);

// Where a block's piece of `pieces` per row begins.
struct Piece {
  int64_t row;
  int pack;  // of this thread, the first

  __device__ Piece(int pieces, int packs_per_piece)
      : row(blockIdx.x / static_cast<unsigned>(pieces)),
        pack(static_cast<int>(blockIdx.x % static_cast<unsigned>(pieces)) * packs_per_piece + threadIdx.x) {}
};

template <typename X, typename Y, int kWidth, typename Activation>
__global__ void __launch_bounds__(kThreads)
    swiglu_forward_kernel(const X* up_gate_T2F, Y* product_TF, Activation activation, int width, int pieces) {
  const Piece piece(pieces, kThreads * kForwardPacks);
  const X* const up_F = up_gate_T2F + piece.row * 2 * width;
  const X* const gate_F = up_F + width;
  Stored<X, kWidth> up[kForwardPacks], gate[kForwardPacks];
#pragma unroll
  for (int n = 0; n < kForwardPacks; ++n) {
    const int64_t column = int64_t{piece.pack + n * kThreads} * kWidth;
    up[n] = load_stored<kWidth>(up_F + column, column < width);
    gate[n] = load_stored<kWidth>(gate_F + column, column < width);
  }
#pragma unroll
  for (int n = 0; n < kForwardPacks; ++n) {
    const int64_t column = int64_t{piece.pack + n * kThreads} * kWidth;
    if (column >= width) return;
    float gates[kWidth], activated[kWidth], slope[kWidth], product[kWidth];
#pragma unroll
    for (int i = 0; i < kWidth; ++i) gates[i] = gate[n][i];
    activate(activation, /*coded=*/false, /*saved=*/false, gates, activated, slope);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) product[i] = product_of(up[n][i], activated[i]);
    store(product_TF + piece.row * width + column, product);
  }
}

template <typename X, typename D, typename Y, typename Activation>
struct BackwardTensors {
  const X* up_gate_T2F;
  const D* d_product_TF;
  Y* d_up_gate_T2F;
  Y* product_TF;  // null: not wanted
  Activation activation;
};

template <int kWidth, typename X, typename D, typename Y, typename Activation>
__global__ void __launch_bounds__(kThreads)
    swiglu_backward_kernel(const BackwardTensors<X, D, Y, Activation> a, int width, int pieces) {
  const Piece piece(pieces, kThreads);
  const int64_t column = int64_t{piece.pack} * kWidth;
  if (column >= width) return;
  const int64_t up_at = piece.row * 2 * width + column, gate_at = up_at + width;
  const int64_t product_at = piece.row * width + column;
  const auto up = load_stored<kWidth>(a.up_gate_T2F + up_at);
  const auto gate = load_stored<kWidth>(a.up_gate_T2F + gate_at);
  const auto d_product = load_stored<kWidth>(a.d_product_TF + product_at);
  float gates[kWidth], activated[kWidth], slope[kWidth], d_up[kWidth], d_gate[kWidth], product[kWidth];
#pragma unroll
  for (int i = 0; i < kWidth; ++i) gates[i] = gate[i];
  activate(a.activation, /*coded=*/false, /*saved=*/false, gates, activated, slope);
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    d_up[i] = up_gradient(d_product[i], activated[i]);
    d_gate[i] = gate_gradient(d_product[i], up[i], slope[i]);
    product[i] = product_of(up[i], activated[i]);
  }
  store(a.d_up_gate_T2F + up_at, d_up);
  store(a.d_up_gate_T2F + gate_at, d_gate);
  if (a.product_TF != nullptr) store(a.product_TF + product_at, product);
}

bool fits_wide(int64_t cols, int width, std::initializer_list<const void*> tensors) {
  bool aligned = cols % width == 0;
  for (const void* tensor : tensors) aligned = aligned && is_aligned(tensor, 16);
  return aligned;
}

unsigned num_blocks(int64_t rows, int64_t pieces) {
  PARKA_REQUIRE(rows * pieces <= INT32_MAX);
  return static_cast<unsigned>(rows * pieces);
}

void make_product(CudaDevice& device, const TensorView& up_gate, const TensorView& product,
                  GateActivation activation) {
  const int64_t rows = product.dim[0], cols = product.dim[1];
  PARKA_REQUIRE(cols <= INT32_MAX);
  with_plain_type(up_gate.dtype, [&](auto x) {
    with_plain_type(product.dtype, [&](auto y) {
      using X = decltype(x);
      using Y = decltype(y);
      const bool wide = fits_wide(cols, kWideWidth<X>, {up_gate.data, product.data});
      const int64_t pieces = ceil_div(cols, int64_t{kThreads} * kForwardPacks * (wide ? kWideWidth<X> : 1));
      with_activation(activation, [&](auto act) {
        using A = decltype(act);
        const auto kernel =
            wide ? swiglu_forward_kernel<X, Y, kWideWidth<X>, A> : swiglu_forward_kernel<X, Y, 1, A>;
        kernel<<<num_blocks(rows, pieces), kThreads, 0, device.stream()>>>(
            up_gate.as<X>(), product.as<Y>(), act, static_cast<int>(cols), static_cast<int>(pieces));
      });
    });
  });
}

// `product` has the dtype of d_up_gate, or is not given.
void make_gradient(CudaDevice& device, const SwigluBackward& a, const TensorView& product) {
  const TensorView &up_gate = a.up_gate.data, &d_up_gate = a.d_up_gate.data;
  const int64_t rows = a.d_product.dim[0], cols = a.d_product.dim[1];
  PARKA_REQUIRE(cols <= INT32_MAX);
  with_plain_type(up_gate.dtype, [&](auto x) {
    with_plain_type(a.d_product.dtype, [&](auto d) {
      with_plain_type(d_up_gate.dtype, [&](auto y) {
        using X = decltype(x);
        using D = decltype(d);
        using Y = decltype(y);
        const bool wide =
            fits_wide(cols, kWideWidth<X>, {up_gate.data, a.d_product.data, d_up_gate.data, product.data});
        const int64_t pieces = ceil_div(cols, int64_t{kThreads} * (wide ? kWideWidth<X> : 1));
        with_activation(a.activation, [&](auto act) {
          using A = decltype(act);
          const BackwardTensors<X, D, Y, A> tensors{up_gate.as<X>(), a.d_product.as<D>(), d_up_gate.as<Y>(),
                                                    product.empty() ? nullptr : product.as<Y>(), act};
          const auto kernel =
              wide ? swiglu_backward_kernel<kWideWidth<X>, X, D, Y, A> : swiglu_backward_kernel<1, X, D, Y, A>;
          kernel<<<num_blocks(rows, pieces), kThreads, 0, device.stream()>>>(tensors, static_cast<int>(cols),
                                                                             static_cast<int>(pieces));
        });
      });
    });
  });
}

bool is_plain(const ScaledView& t) { return t.scaling == Scaling::kNone; }

}  // namespace

void swiglu_forward(Device& device, const SwigluForward& a) {
  const bool plain = is_plain(a.up_gate) && is_plain(a.product);
  if (!plain || !a.silu.empty() || !a.product_t.empty()) {
    swiglu_forward_fp8(device, a);
    return;
  }
  make_product(as_cuda(device), a.up_gate.data, a.product.data, a.activation);
  check_launch("swiglu_forward");
}

void swiglu_backward(Device& device, const SwigluBackward& a) {
  const bool plain = is_plain(a.up_gate) && is_plain(a.d_up_gate) && is_plain(a.product);
  if (!plain || !a.silu.empty() || !a.d_up_gate_t.empty() || !a.product_t.empty()) {
    swiglu_backward_fp8(device, a);
    return;
  }
  // One kernel makes both where it can: they share what they read.
  const TensorView &d_up_gate = a.d_up_gate.data, &product = a.product.data;
  const bool together = !d_up_gate.empty() && d_up_gate.dtype == product.dtype;
  if (!d_up_gate.empty()) make_gradient(as_cuda(device), a, together ? product : TensorView());
  if (!product.empty() && !together) make_product(as_cuda(device), a.up_gate.data, product, a.activation);
  check_launch("swiglu_backward");
}

}  // namespace parka::cuda
