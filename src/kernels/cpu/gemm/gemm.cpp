#include "kernels/ops/gemm/gemm.h"

#include <algorithm>
#include <optional>
#include <vector>

#include "core/parallel.h"
#include "kernels/cpu/codec.h"
#include "kernels/cpu/eigen.h"

namespace parka::cpu {
namespace {

// An operand as fp32: the tensor's own memory where it holds fp32 already, a decoded copy otherwise.
class Operand {
 public:
  // Without the last `padding` columns, which for the last row may lie after
  // the tensor's memory.
  Operand(const ScaledView& x, int64_t padding) : stride_(x.num_cols()) {
    if (x.data.dtype == DType::kF32) {
      data_ = x.data.as<float>();
    } else if (x.scaling == Scaling::kTensor) {
      // Like tensor cores: multiply the codes, which are exact, and scale the sum.
      decoded_ = decode_codes(x.data);
      scale_ = x.scale.as<float>()[0];
    } else if (x.scaling == Scaling::kNone && padding > 0) {
      decoded_.emplace(x.num_rows(), x.num_cols());
      decode_elements(x.data, 0, x.data.numel() - padding, decoded_->data());
    } else {
      decoded_ = decode(x);
    }
    if (decoded_) data_ = decoded_->data();
  }
  const float* at(int64_t row, int64_t col) const { return data_ + row * stride_ + col; }
  int64_t stride() const { return stride_; }
  float scale() const { return scale_; }

 private:
  std::optional<Matrix> decoded_;
  const float* data_ = nullptr;
  int64_t stride_;
  float scale_ = 1;
};

// Eigen aligns its memory, so that which elements it computes with vector instructions is always the same.
using TileMatrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using OperandMap = Eigen::Map<const TileMatrix, Eigen::Unaligned, Eigen::OuterStride<>>;

// Part of the output: [row, row + rows) x [col, col + cols).
struct Tile {
  int64_t row, rows, col, cols;
};

// The sums over k of a tile, before scaling.
TileMatrix multiply(const Gemm& g, const Operand& a, const Operand& b, int64_t depth, const Tile& tile) {
  const auto map = [](const Operand& x, int64_t row, int64_t col, int64_t rows, int64_t cols) {
    return OperandMap(x.at(row, col), rows, cols, Eigen::OuterStride<>(x.stride()));
  };
  TileMatrix sums(tile.rows, tile.cols);
  if (!g.a_transposed && !g.b_transposed) {
    sums.noalias() = map(a, tile.row, 0, tile.rows, depth) * map(b, tile.col, 0, tile.cols, depth).transpose();
  } else if (!g.a_transposed) {
    sums.noalias() = map(a, tile.row, 0, tile.rows, depth) * map(b, 0, tile.col, depth, tile.cols);
  } else if (g.b_transposed) {
    sums.noalias() = map(a, 0, tile.row, depth, tile.rows).transpose() * map(b, 0, tile.col, depth, tile.cols);
  } else {
    sums.noalias() =
        map(a, 0, tile.row, depth, tile.rows).transpose() * map(b, tile.col, 0, tile.cols, depth).transpose();
  }
  return sums;
}

void store(TileMatrix sums, float scale, bool accumulate, const TensorView& out, const Tile& tile) {
  sums *= scale;
  std::vector<float> previous(static_cast<size_t>(accumulate ? tile.cols : 0));
  for (int64_t r = 0; r < tile.rows; ++r) {
    float* row = sums.data() + r * tile.cols;
    const int64_t offset = (tile.row + r) * out.dim[1] + tile.col;
    if (accumulate) {
      decode_elements(out, offset, tile.cols, previous.data());
      for (int64_t c = 0; c < tile.cols; ++c) row[c] += previous[c];
    }
    encode_elements(row, offset, tile.cols, out);
  }
}

struct TileShape {
  int64_t rows, cols;
};

// Depends on the shape of the output alone, so that results do not depend on the number of threads. Large tiles
// pack their operands least often; small ones leave work for every core where the output is small.
TileShape choose_tile(int64_t rows, int64_t cols) {
  constexpr TileShape kLarge{256, 256}, kSmall{128, 64};
  constexpr int64_t kEnoughTiles = 8;
  return ceil_div(rows, kLarge.rows) * ceil_div(cols, kLarge.cols) >= kEnoughTiles ? kLarge : kSmall;
}

}  // namespace

void gemm(Device&, const Gemm& g) {
  const GemmShape s = gemm_shape(g);
  const Operand a(g.a, g.a_padding), b(g.b, g.b_padding);
  const TileShape shape = choose_tile(s.rows, s.cols);
  const int64_t tiles_per_row = ceil_div(s.cols, shape.cols);
  parallel_for(ceil_div(s.rows, shape.rows) * tiles_per_row, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = i / tiles_per_row * shape.rows, col = i % tiles_per_row * shape.cols;
      const Tile tile{row, std::min(shape.rows, s.rows - row), col, std::min(shape.cols, s.cols - col)};
      store(multiply(g, a, b, s.depth, tile), a.scale() * b.scale() * g.factor, g.accumulate, g.out, tile);
    }
  });
}

}  // namespace parka::cpu
