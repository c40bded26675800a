#include "kernels/device/bit_flip.h"

#include <bit>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kernels/ops.h"
#include "tests/kernels/op_bounds.h"
#include "tests/support/catch.h"

using namespace parka;
using namespace parka::test;

namespace {

using Bytes = std::vector<std::byte>;

// The bits in which the two differ.
std::vector<int64_t> flipped_bits(const Bytes& before, const Bytes& after) {
  PARKA_REQUIRE(before.size() == after.size());
  std::vector<int64_t> bits;
  for (size_t i = 0; i < 8 * before.size(); ++i) {
    if (((before[i / 8] ^ after[i / 8]) >> (i % 8) & std::byte{1}) != std::byte{0}) {
      bits.push_back(static_cast<int64_t>(i));
    }
  }
  return bits;
}

// While it exists, ops of the device meet the fault.
class WithFault {
 public:
  WithFault(Device& device, OpFault& fault) : device_(device) { device_.set_op_fault(&fault); }
  ~WithFault() { device_.set_op_fault(nullptr); }
  WithFault(const WithFault&) = delete;
  WithFault& operator=(const WithFault&) = delete;

 private:
  Device& device_;
};

// Three products, one after the other, with other ops between them.
class Products {
 public:
  explicit Products(Device& device)
      : device_(device),
        a_(device, DType::kBF16, {16, 32}, random_bf16(512, 1)),
        b_(device, DType::kBF16, {8, 32}, random_bf16(256, 2)),
        total_(device, DType::kBF16, {512}, random_bf16(512, 3)) {
    for (int i = 0; i < 3; ++i) {
      outs_.push_back(std::make_unique<TestTensor>(device, DType::kF32, std::initializer_list<int64_t>{16, 8}));
    }
  }

  void run() {
    for (const auto& out : outs_) {
      gemm(device_, {.a = a_, .b = b_, .out = *out});
      add(device_, {.x = a_.view().reshaped({512}), .total = total_});
    }
  }
  // Of the products, and of what other ops read and write.
  std::vector<Bytes> bytes() const {
    std::vector<Bytes> all;
    for (const auto& out : outs_) {
      all.push_back(out->bytes());
      CHECK(out->guard_intact());
    }
    all.push_back(a_.bytes());
    all.push_back(b_.bytes());
    return all;
  }
  Bytes total() const { return total_.bytes(); }

 private:
  Device& device_;
  TestTensor a_, b_, total_;
  std::vector<std::unique_ptr<TestTensor>> outs_;
};

// The bits that a flip of bit 77 after the first op of a name changes, in the tensor that `op(device)` returns.
template <typename Op>
std::vector<int64_t> bits_that_a_fault_changes(Device& device, const std::string& name, const Op& op) {
  const Bytes before = op(device);
  BitFlip flip(name, 1, 77);
  const WithFault with_fault(device, flip);
  const Bytes after = op(device);
  CHECK(flip.is_done());
  return flipped_bits(before, after);
}

TEST_CASE("flip_bit flips one bit of a tensor and nothing else", "[kernels][bit_flip]") {
  for (Device* device : devices()) {
    const TestTensor x(*device, DType::kBF16, {3, 3}, random_bf16(9, 1));
    const Bytes before = x.bytes();
    for (int64_t bit = 0; bit < 8 * 18; ++bit) {
      flip_bit(*device, x, bit);
      CHECK(flipped_bits(before, x.bytes()) == std::vector<int64_t>{bit});
      flip_bit(*device, x, bit);
    }
    CHECK((x.bytes() == before && x.guard_intact()));
  }
}

TEST_CASE("flip_bit refuses a bit that the tensor does not have", "[kernels][bit_flip]") {
  const TestTensor x(cpu_device(), DType::kBF16, {3});
  CHECK(contains(internal_error([&] { flip_bit(cpu_device(), x, 48); }), "flip_bit: bf16 [3] has no bit 48"));
  CHECK(contains(internal_error([&] { flip_bit(cpu_device(), x, -1); }), "has no bit -1"));
}

TEST_CASE("a BitFlip changes one bit of the n-th op of its name", "[kernels][bit_flip]") {
  constexpr int64_t kBits = 16 * 8 * 32;
  const int n = GENERATE(1, 2, 3);
  const int64_t bit = GENERATE(int64_t{0}, int64_t{31}, kBits - 1, kBits + 5);
  CAPTURE(n, bit);
  for (Device* device : devices()) {
    Products clean(*device), hit(*device);
    clean.run();
    BitFlip flip("gemm", n, bit);
    {
      const WithFault with_fault(*device, flip);
      CHECK_FALSE(flip.is_done());
      hit.run();
      CHECK(flip.is_done());
    }
    const std::vector<Bytes> want = clean.bytes(), got = hit.bytes();
    for (size_t i = 0; i < want.size(); ++i) {
      const bool is_hit = static_cast<int>(i) == n - 1;
      CHECK(flipped_bits(want[i], got[i]) == (is_hit ? std::vector{bit % kBits} : std::vector<int64_t>{}));
    }
    CHECK(clean.total() == hit.total());
  }
}

TEST_CASE("a BitFlip flips no second time, and nothing of ops of other names", "[kernels][bit_flip]") {
  for (Device* device : devices()) {
    Products clean(*device), hit(*device);
    clean.run();
    BitFlip of_many("gemm", 4, 0), of_none("norm_forward", 1, 0);
    {
      const WithFault with_fault(*device, of_none);
      hit.run();
      CHECK(clean.bytes() == hit.bytes());
    }
    {
      const WithFault with_fault(*device, of_many);
      hit.run();
      CHECK(clean.bytes() == hit.bytes());
      hit.run();  // the fourth product is its first
      CHECK(of_many.is_done());
      CHECK(flipped_bits(clean.bytes()[0], hit.bytes()[0]) == std::vector<int64_t>{0});
      hit.run();
      CHECK(clean.bytes() == hit.bytes());
    }
    CHECK_FALSE(of_none.is_done());
  }
}

TEST_CASE("ops meet no fault that is not set any more", "[kernels][bit_flip]") {
  for (Device* device : devices()) {
    Products clean(*device), later(*device);
    clean.run();
    BitFlip flip("gemm", 1, 0);
    { const WithFault with_fault(*device, flip); }
    later.run();
    CHECK(clean.bytes() == later.bytes());
    CHECK_FALSE(flip.is_done());
  }
}

// A GPU runs the work as it is, then records and replays it, then replays it.
TEST_CASE("work that is replayed meets a fault, and is replayed without it afterwards", "[kernels][bit_flip]") {
  for (Device* device : devices()) {
    Products clean(*device), work(*device);
    clean.run();
    std::unique_ptr<Recording> recording;
    const auto replay = [&] { device->replay(recording, [&] { work.run(); }); };
    for (int i = 0; i < 3; ++i) replay();
    BitFlip flip("gemm", 2, 40);
    {
      const WithFault with_fault(*device, flip);
      replay();
    }
    CHECK(flip.is_done());
    CHECK(flipped_bits(clean.bytes()[1], work.bytes()[1]) == std::vector<int64_t>{40});
    replay();
    CHECK(clean.bytes() == work.bytes());
  }
}

TEST_CASE("a fault hits what an op writes, not what it reads under the same name", "[kernels][bit_flip]") {
  constexpr int64_t S = 4, H = 2, D = 8;
  for (Device* device : devices()) {
    const TestTensor qkv(*device, DType::kBF16, {S, 3 * H * D}, random_bf16(S * 3 * H * D, 1)),
        out(*device, DType::kBF16, {S, H * D}, random_bf16(S * H * D, 2)),
        d_out(*device, DType::kBF16, {S, H * D}, random_bf16(S * H * D, 3)),
        lse(*device, DType::kF32, {1, H, S}, random_normal(S * H, 4)), d_qkv(*device, DType::kBF16, {S, 3 * H * D});
    const Bytes out_before = out.bytes();
    CHECK(bits_that_a_fault_changes(*device, "attention_backward", [&](Device& on) {
            attention_backward(on, {qkv, out, d_out, lse, d_qkv, S, H, H, 0.3f});
            return d_qkv.bytes();
          }) == std::vector<int64_t>{77});
    CHECK(out.bytes() == out_before);
  }
}

TEST_CASE("a fault hits the codes of quantized outputs, the transposed ones where there are no others",
          "[kernels][bit_flip]") {
  for (Device* device : devices()) {
    const TestTensor x(*device, DType::kBF16, {16, 128}, random_bf16(16 * 128, 1));
    for (const bool transposed : {false, true}) {
      const TestMatrix q(*device, DType::kE4M3, transposed ? 128 : 16, transposed ? 16 : 128, Scaling::kTensor);
      Bytes scale;
      CHECK(bits_that_a_fault_changes(*device, "quantize", [&](Device& on) {
              quantize(on, transposed ? Quantize{.x = x.view(), .out_t = q} : Quantize{.x = x.view(), .out = q});
              CHECK((scale.empty() || scale == q.scale->bytes()));
              scale = q.scale->bytes();
              return q.data.bytes();
            }) == std::vector<int64_t>{77});
    }
  }
}

TEST_CASE("a fault hits what optimizer and hash leave", "[kernels][bit_flip]") {
  for (Device* device : devices()) {
    const std::vector<float> values = random_normal(256, 1);
    CHECK(bits_that_a_fault_changes(*device, "moment_encode", [&](Device& on) {
            const TestTensor x(on, DType::kF32, {256}, values), codes(on, DType::kE4M3, {256}),
                amax(on, DType::kF32, {2});
            moment_encode(on, {x, {codes, amax, {}}, false});
            return codes.bytes();
          }) == std::vector<int64_t>{77});
    CHECK(bits_that_a_fault_changes(*device, "bit_hash", [&](Device& on) {
            const TestTensor x(on, DType::kF32, {256}, values), hash(on, DType::kU8, {8});
            on.fill_zero(hash.view().data, 8);
            bit_hash(on, {x, hash});
            return hash.bytes();
          }) == std::vector<int64_t>{77 % 64});
  }
}

}  // namespace
