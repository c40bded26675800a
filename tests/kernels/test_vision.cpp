#include "kernels/ops/elementwise/vision.h"

#include <cmath>
#include <tuple>
#include <vector>

#include "core/philox.h"
#include "tests/kernels/op_bounds.h"
#include "tests/support/catch.h"

using namespace parka;
using namespace parka::test;

namespace {

constexpr DType kPlain[] = {DType::kF32, DType::kBF16};

float rounded(DType dtype, float x) { return dtype == DType::kBF16 ? decode_bf16(encode_bf16(x)) : x; }

uint32_t draw(uint64_t seed, uint64_t i, uint32_t range) { return philox4x32(seed, 1, i)[0] % range; }

struct PatchCase {
  int64_t B, H, W, P, padding;
};

std::vector<PatchCase> patch_cases() {
  std::vector<PatchCase> all = {{1, 1, 1, 1, 0},   {2, 14, 14, 7, 13}, {1, 28, 28, 14, 4},
                                {3, 29, 16, 5, 0}, {1, 34, 20, 16, 8}, {2, 9, 40, 3, 5}};
  for (uint64_t i = 0; i < 10; ++i) {
    const int64_t P = 1 + draw(71, 4 * i, 9);
    all.push_back(
        {1 + draw(71, 4 * i + 1, 3), P + draw(71, 4 * i + 2, 30), P + draw(71, 4 * i + 3, 30), P, draw(72, i, 20)});
  }
  return all;
}

std::vector<float> random_bytes(int64_t count, uint64_t seed) {
  std::vector<float> bytes;
  for (int64_t i = 0; i < count; ++i)
    bytes.push_back(static_cast<float>(draw(seed, static_cast<uint64_t>(i), 256)));
  return bytes;
}

// The patches of an image, by the definition: of each pixel its row and column of the output.
std::vector<float> patches_of(const PatchCase& c, const std::vector<float>& values, DType dtype) {
  const int64_t across = c.W / c.P, of_image = c.H / c.P * across, cols = 3 * c.P * c.P + c.padding;
  std::vector<float> patches(static_cast<size_t>(c.B * of_image * cols));
  for (int64_t at = 0; at < c.B * 3 * c.H * c.W; ++at) {
    const int64_t x = at % c.W, y = at / c.W % c.H, channel = at / c.W / c.H % 3, b = at / c.W / c.H / 3;
    if (x >= across * c.P || y >= c.H / c.P * c.P) continue;
    const int64_t row = b * of_image + y / c.P * across + x / c.P;
    patches[row * cols + channel * c.P * c.P + y % c.P * c.P + x % c.P] = rounded(dtype, values[at]);
  }
  return patches;
}

}  // namespace

TEST_CASE("gather_patches makes each patch a row, normalized and padded with zeros", "[kernels][vision]") {
  const std::array<float, 3> mean = {0.48145466f, 0.4578275f, 0.40821073f},
                             deviation = {0.26862954f, 0.5f, 0.27577711f};
  for (Device* device : devices()) {
    for (const DType dtype : kPlain) {
      for (const PatchCase& c : patch_cases()) {
        const std::vector<float> bytes = random_bytes(c.B * 3 * c.H * c.W, 73);
        std::vector<float> values;
        for (size_t i = 0; i < bytes.size(); ++i) {
          const size_t channel = i / static_cast<size_t>(c.H * c.W) % 3;
          values.push_back((bytes[i] / 255.0f - mean[channel]) / deviation[channel]);
        }
        const int64_t rows = c.B * (c.H / c.P) * (c.W / c.P), cols = 3 * c.P * c.P + c.padding;
        const TestTensor of_bytes(*device, DType::kU8, {c.B, 3, c.H, c.W}, bytes);
        const TestTensor of_values(*device, DType::kF32, {c.B, 3, c.H, c.W}, values);
        const TestTensor got(*device, dtype, {rows, cols}), same(*device, dtype, {rows, cols});
        gather_patches(
            *device, {.pixels = of_bytes, .patches = got, .patch_size = c.P, .mean = mean, .deviation = deviation});
        gather_patches(*device, {.pixels = of_values, .patches = same, .patch_size = c.P});
        CAPTURE(device->name(), name_of(dtype), c.B, c.H, c.W, c.P, c.padding);
        CHECK((got.host() == patches_of(c, values, dtype)));
        CHECK((same.bytes() == got.bytes()));
        CHECK((of_bytes.guard_intact() && got.guard_intact() && same.guard_intact()));
      }
    }
  }
}

TEST_CASE("gather_patches takes no images, and refuses wrong arguments", "[kernels][vision]") {
  for (Device* device : devices()) {
    const TestTensor none(*device, DType::kU8, {0, 3, 8, 8}), no_rows(*device, DType::kF32, {0, 48});
    gather_patches(*device, {.pixels = none, .patches = no_rows, .patch_size = 4});
    CHECK(no_rows.guard_intact());
  }
  Device& device = cpu_device();
  const TestTensor pixels(device, DType::kU8, {1, 3, 8, 8}), grey(device, DType::kU8, {1, 1, 8, 8}),
      words(device, DType::kI32, {1, 3, 8, 8}), patches(device, DType::kF32, {4, 48}),
      narrow(device, DType::kF32, {4, 47}), few(device, DType::kF32, {3, 48});
  const auto gather = [&](const TensorView& from, const TensorView& to, int64_t P) {
    return internal_error([&] { gather_patches(device, {.pixels = from, .patches = to, .patch_size = P}); });
  };
  CHECK(contains(gather(grey, patches, 4), "gather_patches: pixels is uint8 [1, 1, 8, 8]"));
  CHECK(contains(gather(words, patches, 4), "gather_patches: pixels is int32"));
  CHECK(contains(gather(pixels, narrow, 4), "gather_patches: patches is fp32 [4, 47], wanted 48 columns"));
  CHECK(contains(gather(pixels, few, 4), "gather_patches: patches is fp32 [3, 48]"));
  CHECK(contains(gather(pixels, patches, 0), "gather_patches: patch_size is 0"));
}

namespace {

struct PositionCase {
  int64_t B, P, C;
  bool has_class_token;

  int64_t N() const { return P + (has_class_token ? 1 : 0); }
};

std::vector<PositionCase> position_cases() {
  std::vector<PositionCase> all = {
      {1, 1, 1, false}, {1, 1, 8, true}, {3, 4, 16, true}, {9, 25, 24, false}, {20, 3, 33, true}};
  for (uint64_t i = 0; i < 8; ++i) {
    all.push_back(
        {1 + draw(74, 3 * i, 5), 1 + draw(74, 3 * i + 1, 40), 8 * (1 + draw(74, 3 * i + 2, 20)), i % 2 == 0});
  }
  return all;
}

}  // namespace

TEST_CASE("positions_forward adds a position to each token, and puts the class token in front",
          "[kernels][vision]") {
  for (Device* device : devices()) {
    for (const DType dtype : kPlain) {
      for (const PositionCase& c : position_cases()) {
        const int64_t N = c.N(), first = N - c.P;
        const std::vector<float> x = random_values(dtype, c.B * c.P * c.C, 75),
                                 position = random_values(dtype, N * c.C, 76),
                                 token = random_values(dtype, c.C, 77);
        const TestTensor in(*device, dtype, {c.B * c.P, c.C}, x), positions(*device, dtype, {N, c.C}, position),
            class_token(*device, dtype, {c.C}, token), out(*device, dtype, {c.B * N, c.C});
        PositionsForward op{.x = in, .positions = positions, .out = out};
        if (c.has_class_token) op.class_token = class_token;
        positions_forward(*device, op);
        const std::vector<float> got = out.host();
        int64_t wrong = 0;
        for (int64_t i = 0; i < c.B * N * c.C; ++i) {
          const int64_t column = i % c.C, n = i / c.C % N, b = i / c.C / N;
          const float before = n < first ? token[column] : x[(b * c.P + n - first) * c.C + column];
          wrong += got[i] != rounded(dtype, before + position[n * c.C + column]);
        }
        CAPTURE(device->name(), name_of(dtype), c.B, c.P, c.C, c.has_class_token);
        CHECK(wrong == 0);
        CHECK((in.host() == x && in.guard_intact() && out.guard_intact()));
        if (c.has_class_token) continue;
        op.out = in;
        positions_forward(*device, op);
        CHECK((in.bytes() == out.bytes()));
      }
    }
  }
}

TEST_CASE("positions_backward adds the sums over images in order, once", "[kernels][vision]") {
  for (Device* device : devices()) {
    for (const auto& [dtype, sum_dtype] :
         {std::pair{DType::kF32, DType::kF32}, {DType::kBF16, DType::kF32}, {DType::kBF16, DType::kBF16}}) {
      for (const PositionCase& c : position_cases()) {
        const int64_t N = c.N(), first = N - c.P;
        const std::vector<float> gradient = random_values(dtype, c.B * N * c.C, 78),
                                 before = random_values(sum_dtype, N * c.C, 79),
                                 token = random_values(sum_dtype, c.C, 80);
        const TestTensor d_out(*device, dtype, {c.B * N, c.C}, gradient), d_x(*device, dtype, {c.B * c.P, c.C});
        const TestTensor d_positions(*device, sum_dtype, {N, c.C}, before),
            d_class_token(*device, sum_dtype, {c.C}, token);
        positions_backward(*device, {.d_out = d_out,
                                     .d_x = d_x,
                                     .d_positions = d_positions,
                                     .d_class_token = c.has_class_token ? d_class_token.view() : TensorView(),
                                     .num_images = c.B});
        std::vector<float> sum(static_cast<size_t>(N * c.C)), rows;
        for (int64_t i = 0; i < c.B * N * c.C; ++i) {
          sum[i % (N * c.C)] += gradient[i];
          if (i / c.C % N >= first) rows.push_back(gradient[i]);
        }
        const std::vector<float> got = d_positions.host(), got_token = d_class_token.host();
        int64_t wrong = 0;
        for (int64_t i = 0; i < N * c.C; ++i) wrong += got[i] != rounded(sum_dtype, before[i] + sum[i]);
        for (int64_t i = 0; i < c.C; ++i) {
          wrong += got_token[i] != (c.has_class_token ? rounded(sum_dtype, token[i] + sum[i]) : token[i]);
        }
        CAPTURE(device->name(), name_of(dtype), name_of(sum_dtype), c.B, c.P, c.C, c.has_class_token);
        CHECK(wrong == 0);
        CHECK((d_x.host() == rows));
        CHECK((d_out.guard_intact() && d_x.guard_intact() && d_positions.guard_intact()));

        // What is not wanted is left out.
        const TestTensor alone(*device, sum_dtype, {N, c.C}, before);
        positions_backward(*device, {.d_out = d_out, .d_positions = alone, .num_images = c.B});
        CHECK((alone.bytes() == d_positions.bytes()));
      }
    }
  }
}

TEST_CASE("positions_backward is the transpose of positions_forward", "[kernels][vision]") {
  // Whole numbers, so that both sides are exact.
  const auto whole = [](int64_t count, uint64_t seed) {
    std::vector<float> values = random_normal(count, seed, 4.0f);
    for (float& v : values) v = std::round(v);
    return values;
  };
  constexpr int64_t B = 3, P = 4, C = 5, N = P + 1;
  const std::vector<float> x = whole(B * P * C, 1), position = whole(N * C, 2), token = whole(C, 3),
                           d_y = whole(B * N * C, 4);
  const std::vector<float> zeros(static_cast<size_t>(N * C)), no_token(static_cast<size_t>(C));
  const auto dot = [](const std::vector<float>& a, const std::vector<float>& b) {
    double sum = 0;
    for (size_t i = 0; i < a.size(); ++i) sum += double{a[i]} * b[i];
    return sum;
  };
  for (Device* device : devices()) {
    const TestTensor in(*device, DType::kF32, {B * P, C}, x), positions(*device, DType::kF32, {N, C}, position),
        class_token(*device, DType::kF32, {C}, token), out(*device, DType::kF32, {B * N, C});
    const TestTensor d_out(*device, DType::kF32, {B * N, C}, d_y), d_x(*device, DType::kF32, {B * P, C}),
        d_positions(*device, DType::kF32, {N, C}, zeros), d_class_token(*device, DType::kF32, {C}, no_token);
    positions_forward(*device, {.x = in, .positions = positions, .class_token = class_token, .out = out});
    positions_backward(
        *device,
        {.d_out = d_out, .d_x = d_x, .d_positions = d_positions, .d_class_token = d_class_token, .num_images = B});
    const double backward =
        dot(d_x.host(), x) + dot(d_positions.host(), position) + dot(d_class_token.host(), token);
    CHECK(dot(out.host(), d_y) == backward);
    CHECK(backward != 0);
  }
}

TEST_CASE("positions ops take no images, and refuse wrong arguments", "[kernels][vision]") {
  for (Device* device : devices()) {
    const TestTensor none(*device, DType::kF32, {0, 8}),
        positions(*device, DType::kF32, {4, 8}, std::vector<float>(32, 1.0f));
    positions_forward(*device, {.x = none, .positions = positions, .out = none});
    positions_backward(*device, {.d_out = none, .d_positions = positions, .num_images = 0});
    CHECK((positions.host() == std::vector<float>(32, 1.0f)));
  }
  Device& device = cpu_device();
  const TestTensor x(device, DType::kF32, {6, 8}), positions(device, DType::kF32, {4, 8}),
      token(device, DType::kF32, {8}), half_token(device, DType::kBF16, {8}), out(device, DType::kF32, {8, 8}),
      one(device, DType::kF32, {1, 8});
  const auto forward = [&](const TensorView& from, const TensorView& of, const TensorView& class_token,
                           const TensorView& to) {
    return internal_error(
        [&] { positions_forward(device, {.x = from, .positions = of, .class_token = class_token, .out = to}); });
  };
  CHECK(forward(x, positions, token, out).empty());
  CHECK(contains(forward(x, positions, half_token, out), "positions_forward: class_token is bf16"));
  CHECK(contains(forward(x, positions, {}, out), "positions_forward: x is fp32 [6, 8], wanted shape [4, 8]"));
  CHECK(contains(forward(x, positions, token, x), "positions_forward: out is fp32 [6, 8], wanted shape [8, 8]"));
  CHECK(contains(forward(x, one, token, out), "positions_forward: positions is fp32 [1, 8], which leaves no"));
  const auto backward = [&](const TensorView& d_x, const TensorView& d_positions, const TensorView& d_token,
                            int64_t images) {
    return internal_error([&] {
      positions_backward(
          device,
          {.d_out = out, .d_x = d_x, .d_positions = d_positions, .d_class_token = d_token, .num_images = images});
    });
  };
  CHECK(contains(backward(x, {}, {}, 3), "positions_backward: d_out is fp32 [8, 8], wanted shape [6, 8]"));
  CHECK(contains(backward(one, {}, {}, 2), "positions_backward: d_x is fp32 [1, 8], wanted shape [6, 8]"));
  CHECK(contains(backward({}, x, {}, 2), "positions_backward: d_positions is fp32 [6, 8]"));
  CHECK(contains(backward({}, positions, half_token, 2),
                 "positions_backward: d_class_token is bf16 [8], wanted the dtype"));
}

TEST_CASE("space_to_channel_forward merges squares of tokens in the order of either release", "[kernels][vision]") {
  std::vector<float> numbers;
  for (int i = 1; i <= 25; ++i) numbers.push_back(static_cast<float>(i));
  const std::vector<float> by_rows = {1,  2,  6,  7, 3,  4, 8,  9,  5, 0, 10, 0,  11, 12, 16, 17, 13, 14,
                                      18, 19, 15, 0, 20, 0, 21, 22, 0, 0, 23, 24, 0,  0,  25, 0,  0,  0};
  const std::vector<float> by_columns = {1,  2,  6,  7,  11, 12, 16, 17, 21, 22, 0,  0, 3,  4, 8,  9, 13, 14,
                                         18, 19, 23, 24, 0,  0,  5,  0,  10, 0,  15, 0, 20, 0, 25, 0, 0,  0};
  for (Device* device : devices()) {
    const TestTensor x(*device, DType::kF32, {25, 1}, numbers), out(*device, DType::kF32, {9, 4}),
        back(*device, DType::kF32, {25, 1});
    for (const bool column_major : {false, true}) {
      const TokenMerge merge{.rows = 5, .columns = 5, .factor = 2, .column_major = column_major};
      space_to_channel_forward(*device, {.x = x, .out = out, .merge = merge});
      CAPTURE(device->name(), column_major);
      CHECK((out.host() == (column_major ? by_columns : by_rows)));
      space_to_channel_backward(*device, {.d_out = out, .d_x = back, .merge = merge});
      CHECK((back.host() == numbers));
    }
  }
}

TEST_CASE("space_to_channel moves whole tokens, and backward takes the gradient of each", "[kernels][vision]") {
  for (uint64_t n = 0; n < 24; ++n) {
    const TokenMerge merge{.rows = 1 + draw(81, 6 * n, 9),
                           .columns = 1 + draw(81, 6 * n + 1, 9),
                           .factor = 1 + draw(81, 6 * n + 2, 4),
                           .column_major = n % 2 == 0};
    const int64_t B = 1 + draw(81, 6 * n + 3, 3),
                  C = n % 3 == 0 ? 8 * (1 + draw(81, 6 * n + 4, 40)) : 1 + draw(81, 6 * n + 4, 40);
    const DType dtype = kPlain[draw(81, 6 * n + 5, 2)];
    const int64_t tokens = merge.rows * merge.columns, k = merge.factor, across = k * k * C;
    // Of each element of the output its place in the input; -1 outside of the grid.
    std::vector<int64_t> source(static_cast<size_t>(B * merge.merged() * across), -1);
    for (int64_t at = 0; at < B * tokens * C; ++at) {
      const int64_t c = at % C, x = at / C % merge.columns, y = at / C / merge.columns % merge.rows,
                    b = at / C / tokens;
      const int64_t i = y / k, j = x / k;
      const int64_t token = merge.column_major ? j * merge.merged_rows() + i : i * merge.merged_columns() + j;
      source[(b * merge.merged() + token) * across + (y % k * k + x % k) * C + c] = at;
    }
    const std::vector<float> values = random_values(dtype, B * tokens * C, 82),
                             gradient = random_values(dtype, B * merge.merged() * across, 83);
    std::vector<float> want, want_gradient(values.size());
    for (size_t i = 0; i < source.size(); ++i) {
      want.push_back(source[i] < 0 ? 0.0f : values[source[i]]);
      if (source[i] >= 0) want_gradient[source[i]] = gradient[i];
    }
    for (Device* device : devices()) {
      const TestTensor x(*device, dtype, {B * tokens, C}, values),
          out(*device, dtype, {B * merge.merged(), across});
      const TestTensor d_out(*device, dtype, {B * merge.merged(), across}, gradient),
          d_x(*device, dtype, {B * tokens, C});
      space_to_channel_forward(*device, {.x = x, .out = out, .merge = merge});
      space_to_channel_backward(*device, {.d_out = d_out, .d_x = d_x, .merge = merge});
      CAPTURE(device->name(), name_of(dtype), B, C, merge.rows, merge.columns, k, merge.column_major);
      CHECK((out.host() == want));
      CHECK((d_x.host() == want_gradient));
      CHECK((x.guard_intact() && out.guard_intact() && d_out.guard_intact() && d_x.guard_intact()));
    }
  }
}

TEST_CASE("space_to_channel takes no images, and refuses wrong arguments", "[kernels][vision]") {
  const TokenMerge merge{.rows = 3, .columns = 3, .factor = 2};
  for (Device* device : devices()) {
    const TestTensor none(*device, DType::kF32, {0, 2}), nothing(*device, DType::kF32, {0, 8});
    space_to_channel_forward(*device, {.x = none, .out = nothing, .merge = merge});
    space_to_channel_backward(*device, {.d_out = nothing, .d_x = none, .merge = merge});
    CHECK((none.guard_intact() && nothing.guard_intact()));
  }
  Device& device = cpu_device();
  const TestTensor x(device, DType::kF32, {9, 2}), odd(device, DType::kF32, {10, 2}),
      out(device, DType::kF32, {4, 8}), half(device, DType::kBF16, {4, 8}), narrow(device, DType::kF32, {4, 2});
  const auto forward = [&](const TensorView& from, const TensorView& to, const TokenMerge& m) {
    return internal_error([&] { space_to_channel_forward(device, {.x = from, .out = to, .merge = m}); });
  };
  CHECK(contains(forward(odd, out, merge), "space_to_channel_forward: x is fp32 [10, 2], wanted shape [9, 2]"));
  CHECK(contains(forward(x, narrow, merge), "space_to_channel_forward: out is fp32 [4, 2], wanted shape [4, 8]"));
  CHECK(contains(forward(x, half, merge), "space_to_channel_forward: out is bf16"));
  CHECK(contains(forward(x, out, {.rows = 3, .columns = 3, .factor = 0}), "and a factor of 0, wanted 1 or more"));
  const std::string backward =
      internal_error([&] { space_to_channel_backward(device, {.d_out = narrow, .d_x = x, .merge = merge}); });
  CHECK(contains(backward, "space_to_channel_backward: d_out is fp32 [4, 2], wanted shape [4, 8]"));
}
