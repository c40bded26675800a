#include "core/tensor.h"

#include <array>

#include "tests/support/catch.h"

using namespace parka;

namespace {

bool is_internal_error(auto&& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.code() == ExitCode::kInternal;
  }
  return false;
}

}  // namespace

TEST_CASE("dtypes: sizes, names and C++ types", "[tensor]") {
  CHECK(size_of(DType::kF32) == sizeof(float));
  CHECK(size_of(DType::kBF16) == sizeof(BFloat16));
  CHECK(size_of(DType::kE4M3) == sizeof(Float8E4M3));
  CHECK(size_of(DType::kE5M2) == sizeof(Float8E5M2));
  CHECK(size_of(DType::kI32) == sizeof(int32_t));
  CHECK(size_of(DType::kU16) == sizeof(uint16_t));
  CHECK(size_of(DType::kU8) == sizeof(uint8_t));
  CHECK(name_of(dtype_of<float>) == "fp32");
  CHECK(name_of(dtype_of<BFloat16>) == "bf16");
  CHECK(name_of(dtype_of<Float8E4M3>) == "e4m3");
  CHECK(name_of(dtype_of<Float8E5M2>) == "e5m2");
  CHECK(name_of(dtype_of<int32_t>) == "int32");
  CHECK(name_of(dtype_of<uint16_t>) == "uint16");
  CHECK(name_of(dtype_of<uint8_t>) == "uint8");
  CHECK((is_float8(DType::kE4M3) && is_float8(DType::kE5M2) && !is_float8(DType::kBF16) && !is_float8(DType::kU8)));
  CHECK(float8_traits(DType::kE4M3).max == 448.0f);
  CHECK(float8_traits(DType::kE5M2).max == 57344.0f);
  CHECK(is_internal_error([] { float8_traits(DType::kBF16); }));
}

TEST_CASE("TensorView: shape, size and typed access", "[tensor]") {
  std::array<BFloat16, 24> memory{};
  const TensorView view(memory.data(), DType::kBF16, {2, 3, 4});
  CHECK(view.rank == 3);
  CHECK(view.numel() == 24);
  CHECK(view.bytes() == 48);
  CHECK(!view.empty());
  CHECK(view.as<BFloat16>() == memory.data());
  CHECK(is_internal_error([&] { view.as<uint16_t>(); }));
  CHECK(describe(view) == "bf16 [2, 3, 4]");

  const TensorView none;
  CHECK((none.empty() && none.numel() == 0 && none.bytes() == 0));
  CHECK(describe(none) == "no tensor");
  CHECK(TensorView(memory.data(), DType::kBF16, {0, 5}).numel() == 0);
  CHECK(is_internal_error([&] { TensorView(memory.data(), DType::kBF16, {}); }));
  CHECK(is_internal_error([&] { TensorView(memory.data(), DType::kBF16, {1, 1, 1, 1, 1}); }));
  CHECK(is_internal_error([&] { TensorView(memory.data(), DType::kBF16, {4, -1}); }));
}

TEST_CASE("TensorView: rows and reshaped views share the memory", "[tensor]") {
  std::array<float, 24> memory{};
  const TensorView view(memory.data(), DType::kF32, {4, 3, 2});
  const TensorView middle = view.rows(1, 2);
  CHECK(middle.as<float>() == memory.data() + 6);
  CHECK(describe(middle) == "fp32 [2, 3, 2]");
  CHECK(view.rows(4, 0).numel() == 0);
  CHECK(is_internal_error([&] { view.rows(3, 2); }));
  CHECK(is_internal_error([&] { view.rows(-1, 1); }));
  CHECK(is_internal_error([&] { view.rows(1, -1); }));
  CHECK(is_internal_error([] { TensorView().rows(0, 0); }));

  const TensorView flat = view.reshaped({24});
  CHECK((flat.data == memory.data() && describe(flat) == "fp32 [24]"));
  CHECK(is_internal_error([&] { view.reshaped({5, 5}); }));

  const TensorView no_rows(memory.data(), DType::kF32, {0, 3});
  CHECK(no_rows.rows(0, 0).numel() == 0);
}

TEST_CASE("ScaledView: scale shapes and descriptions", "[tensor]") {
  using Shape = std::array<int64_t, 2>;
  CHECK(scale_shape(Scaling::kNone, 0, 4, 128) == Shape{0, 0});
  CHECK(scale_shape(Scaling::kTensor, 0, 4, 128) == Shape{1, 1});
  CHECK(scale_shape(Scaling::kGroup, 16, 4, 128) == Shape{4, 8});
  CHECK(scale_shape(Scaling::kGroup, 16, 4, 129) == Shape{4, 9});
  CHECK(scale_shape(Scaling::kBlock, 128, 129, 256) == Shape{2, 2});
  CHECK(is_internal_error([] { scale_shape(Scaling::kGroup, 0, 4, 128); }));
  CHECK(is_internal_error([] { scale_shape(Scaling::kBlock, 0, 4, 128); }));

  std::array<Float8E4M3, 512> codes{};
  std::array<BFloat16, 32> scales{};
  const TensorView data(codes.data(), DType::kE4M3, {4, 128}), scale(scales.data(), DType::kBF16, {4, 8});
  CHECK(describe(ScaledView(data, scale, Scaling::kGroup, 16)) == "e4m3 [4, 128], bf16 scale per 1x16");
  CHECK(describe(ScaledView(data, scale, Scaling::kBlock, 128)) == "e4m3 [4, 128], one scale per 128x128");
  CHECK(describe(ScaledView(data, scale, Scaling::kTensor)) == "e4m3 [4, 128], one scale");

  const ScaledView plain = data;
  CHECK((plain.num_rows() == 4 && plain.num_cols() == 128 && plain.scaling == Scaling::kNone));
  CHECK(describe(plain) == "e4m3 [4, 128]");
  CHECK(ScaledView().empty());
}

TEST_CASE("ceil_div rounds up", "[tensor]") {
  CHECK(ceil_div(0, 16) == 0);
  CHECK(ceil_div(1, 16) == 1);
  CHECK(ceil_div(16, 16) == 1);
  CHECK(ceil_div(17, 16) == 2);
}
