#include "kernels/cpu/math/exp.h"

#include <algorithm>
#include <limits>

#include "kernels/cpu/eigen.h"

namespace parka::cpu {

void exp_elements(const float* x, int64_t count, float* out) {
  // A block of fixed size always takes Eigen's vector path, the padded tail too: its scalar path rounds otherwise.
  using Block = Eigen::Array<float, 64, 1>;
  constexpr int64_t kBlock = Block::SizeAtCompileTime;
  int64_t i = 0;
  for (; i + kBlock <= count; i += kBlock) Eigen::Map<Block>(out + i) = Eigen::Map<const Block>(x + i).exp();
  if (i < count) {
    Block tail = Block::Zero();
    std::copy(x + i, x + count, tail.data());
    tail = tail.exp().eval();
    std::copy_n(tail.data(), count - i, out + i);
  }
  // On AVX2 Eigen's exp stops at a subnormal, for -inf too, which would count and is slow to multiply.
  for (i = 0; i < count; ++i) out[i] = out[i] < std::numeric_limits<float>::min() ? 0.0f : out[i];
}

void sigmoid_elements(const float* x, int64_t count, float* out) {
  for (int64_t i = 0; i < count; ++i) out[i] = -x[i];
  exp_elements(out, count, out);
  for (int64_t i = 0; i < count; ++i) out[i] = 1.0f / (1.0f + out[i]);
}

}  // namespace parka::cpu
