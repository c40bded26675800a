#include "kernels/ops/swiglu/swiglu.h"

#include "tests/kernels/exact_products.h"
#include "tests/kernels/float8_devices.h"

// swiglu_projection beside gemm and swiglu_forward on the same device, with operands whose products are exact: all
// bits have to be equal.
using namespace parka;
using namespace parka::test;

namespace {

const Format kCodes{DType::kE4M3, Scaling::kTensor};

struct ProjectionCase {
  int64_t rows, width, depth;  // T, F, K
  int64_t group = 32;
  bool saves_silu = false, transposed = false, fast = true;
  GateActivation activation = GateActivation::kSilu;
};

std::string describe(const ProjectionCase& c) {
  return std::to_string(c.rows) + " x 2 * " + std::to_string(c.width) + " x " + std::to_string(c.depth) +
         ", groups of " + std::to_string(c.group) + (c.saves_silu ? ", silu saved" : "") +
         (c.transposed ? ", transposed" : "") + (c.fast ? "" : ", accurate") +
         (c.activation == GateActivation::kGeluTanh ? ", GELU" : "");
}

// What the op leaves on a device.
struct Projected {
  Projected(Device& device, const ProjectionCase& c, bool as_one)
      : x(kCodes.make(device, c.rows, c.depth)),
        weight(kCodes.make(device, 2 * c.width, c.depth)),
        plain(device, DType::kBF16, {c.rows, 2 * c.width}),
        up_gate(Format{DType::kE4M3, Scaling::kGroup, c.group, DType::kBF16}.make(device, c.rows, 2 * c.width)),
        silu(Format{DType::kE4M3, Scaling::kGroup, c.group, DType::kBF16}.make(device, c.rows, c.width)),
        product(device, kCodes, c.rows, c.width, c.transposed ? Copies::kBoth : Copies::kRow) {
    fill_exactly(device, x, 301);
    fill_exactly(device, weight, 302);
    const SwigluProjection op = {.projection = {.a = x, .b = weight, .out = plain, .fast_accumulation = c.fast},
                                 .swiglu = {.up_gate = up_gate,
                                            .silu = c.saves_silu ? silu.view() : ScaledView(),
                                            .product = product.row(),
                                            .product_t = product.transposed(),
                                            .up_gate_plain = plain,
                                            .activation = c.activation}};
    if (as_one) {
      swiglu_projection(device, op);
    } else {
      run_as_two(device, op);
    }
  }

  TestMatrix x, weight;
  TestTensor plain;
  TestMatrix up_gate, silu;
  Output product;
};

void check_projection(Device& device, const ProjectionCase& c) {
  CAPTURE(describe(c));
  const Projected got(device, c, true), want(device, c, false), here(cpu_device(), c, false);
  CHECK(first_difference("up_gate", got.up_gate, want.up_gate) == "");
  CHECK(first_difference("up_gate", got.up_gate, here.up_gate) == "");
  if (c.saves_silu) CHECK(first_difference("silu", got.silu, want.silu) == "");
  CHECK(first_difference("product", got.product, want.product) == "");
}

}  // namespace

TEST_CASE("swiglu_projection leaves what gemm and swiglu_forward leave", "[kernels][swiglu]") {
  const ProjectionCase c =
      GENERATE(ProjectionCase{1, 32, 16}, ProjectionCase{37, 96, 64}, ProjectionCase{128, 128, 128},
               ProjectionCase{256, 128, 256}, ProjectionCase{300, 160, 400}, ProjectionCase{513, 1376, 144},
               ProjectionCase{129, 256, 768, 128}, ProjectionCase{70, 48, 512, 16},
               ProjectionCase{257, 320, 128, 64}, ProjectionCase{130, 288, 192, 32, true},
               ProjectionCase{64, 256, 256, 128, true}, ProjectionCase{200, 96, 80, 32, false, true},
               ProjectionCase{90, 64, 96, 16, true, true}, ProjectionCase{140, 160, 112, 32, false, false, false},
               ProjectionCase{140, 160, 112, 32, false, false, true, GateActivation::kGeluTanh},
               ProjectionCase{150, 128, 224, 32, true, true, true, GateActivation::kGeluTanh});
  for (Device* device : devices()) check_projection(*device, c);
}

TEST_CASE("swiglu_projection of many tiles leaves the same each time", "[kernels][swiglu][devices]") {
  const int64_t depth = GENERATE(80, 208, 272, 1040);  // few steps to a tile, too
  CAPTURE(depth);
  const ProjectionCase c{4000, 4128, depth};
  for (Device* device : other_devices()) {
    const Projected got(*device, c, true), again(*device, c, true), want(*device, c, false);
    CHECK(first_difference("up_gate", got.up_gate, want.up_gate) == "");
    CHECK(first_difference("product", got.product, want.product) == "");
    CHECK(first_difference("up_gate again", again.up_gate, got.up_gate) == "");
    CHECK(first_difference("product again", again.product, got.product) == "");
  }
}

TEST_CASE("swiglu_projection keeps bad values visible", "[kernels][swiglu]") {
  for (Device* device : devices()) {
    const ProjectionCase c{40, 64, 32};
    Projected p(*device, c, true);
    const TestTensor infinite(*device, DType::kF32, {1, 1}, {INFINITY});
    device->copy(p.x.scale->view().data, infinite.view().data, 4);
    swiglu_projection(*device,
                      {.projection = {.a = p.x, .b = p.weight, .out = p.plain, .fast_accumulation = true},
                       .swiglu = {.up_gate = p.up_gate, .product = p.product.row(), .up_gate_plain = p.plain}});
    const std::vector<float> numbers = p.up_gate.host();
    int64_t bad = 0;
    for (const float x : numbers) bad += std::isnan(x);
    CHECK(bad > 0);
  }
}
