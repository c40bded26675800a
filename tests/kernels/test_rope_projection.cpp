#include "kernels/ops/attention/rope.h"

#include "tests/kernels/exact_products.h"
#include "tests/kernels/float8_devices.h"
#include "tests/kernels/rope_case.h"

// rope_projection beside gemm and rope_forward on the same device, with operands whose products are exact: all bits
// have to be equal.
using namespace parka;
using namespace parka::test;

namespace {

const Format kCodes{DType::kE4M3, Scaling::kTensor};

// What the op leaves on a device.
struct Rotated {
  Rotated(Device& device, const RopeCase& c, bool as_one)
      : x(kCodes.make(device, c.rows, c.depth)),
        weight(kCodes.make(device, c.width(), c.depth)),
        qkv(device, DType::kBF16, {c.rows, c.width()}),
        cos_sin(device, DType::kF32, {c.positions, c.head_dim}, rope_table(c.positions, c.head_dim, 10000)),
        saved(Format{DType::kE4M3, Scaling::kGroup, c.group, DType::kBF16}.make(device, c.rows, c.width())) {
    fill_exactly(device, x, 311);
    fill_exactly(device, weight, 312);
    if (as_one) {
      rope_projection(device, op(c));
    } else {
      run_as_two(device, op(c));
    }
  }
  RopeProjection op(const RopeCase& c) const {
    return {
        .projection = {.a = x, .b = weight, .out = qkv, .fast_accumulation = c.fast},
        .rope = {.qkv = qkv, .cos_sin = cos_sin, .num_heads = c.heads, .num_kv_heads = c.kv_heads, .saved = saved}};
  }

  TestMatrix x, weight;
  TestTensor qkv, cos_sin;
  TestMatrix saved;
};

}  // namespace

TEST_CASE("rope_projection leaves what gemm and rope_forward leave", "[kernels][rope]") {
  const RopeCase c = GENERATE(
      RopeCase{1, 1, 16, 1, 1, 16, 16, true, false}, RopeCase{128, 64, 128, 2, 1, 128},
      RopeCase{256, 256, 256, 4, 2, 128}, RopeCase{300, 100, 400, 6, 1, 128, 64}, RopeCase{257, 300, 144, 8, 4, 64},
      RopeCase{200, 50, 384, 2, 1, 64, 16}, RopeCase{130, 130, 768, 12, 2, 32, 16},
      RopeCase{513, 171, 80, 4, 4, 128, 16}, RopeCase{90, 90, 96, 3, 1, 128, 32, true, false},
      RopeCase{70, 35, 112, 2, 1, 256, 32, true, false}, RopeCase{64, 64, 64, 4, 2, 128, 128, true, false},
      RopeCase{140, 70, 112, 4, 2, 64, 32, false, false});
  CAPTURE(describe(c));
  for (Device* device : devices()) {
    const Rotated got(*device, c, true), want(*device, c, false), here(cpu_device(), c, false);
    CHECK(first_difference("saved", got.saved, want.saved) == "");
    CHECK(first_difference("saved", got.saved, here.saved) == "");
#ifdef PARKA_CUDA
    if (is_hopper(*device)) CHECK(cuda::has_one_kernel(*device, got.op(c)) == c.one_kernel);
#endif
    CHECK(first_difference("qkv", got.qkv, want.qkv) == "");
  }
}

TEST_CASE("rope_projection of many tiles leaves the same each time", "[kernels][rope][devices]") {
  const int64_t depth = GENERATE(80, 208, 272, 1040);  // few steps to a tile, too
  CAPTURE(depth);
  const RopeCase c{4000, 1000, depth, 32, 16, 128};
  for (Device* device : other_devices()) {
    const Rotated got(*device, c, true), again(*device, c, true), want(*device, c, false);
    CHECK(first_difference("saved", got.saved, want.saved) == "");
    CHECK(first_difference("qkv", got.qkv, want.qkv) == "");
    CHECK(first_difference("saved again", again.saved, got.saved) == "");
    CHECK(first_difference("qkv again", again.qkv, got.qkv) == "");
  }
}

TEST_CASE("rope_projection keeps bad values visible", "[kernels][rope]") {
  for (Device* device : devices()) {
    const RopeCase c{40, 20, 32, 2, 1, 64};
    Rotated p(*device, c, true);
    const TestTensor infinite(*device, DType::kF32, {1, 1}, {INFINITY});
    device->copy(p.x.scale->view().data, infinite.view().data, 4);
    rope_projection(*device, p.op(c));
    int64_t bad = 0;
    for (const float x : p.saved.host()) bad += std::isnan(x);
    CHECK(bad > 0);
  }
}
