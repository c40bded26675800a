#include "kernels/ops/vision.h"

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
