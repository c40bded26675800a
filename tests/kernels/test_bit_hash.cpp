#include <algorithm>
#include <cstring>
#include <memory>
#include <span>
#include <vector>

#include "core/philox.h"
#include "kernels/ops/elementwise/bit_hash.h"
#include "tests/kernels/op_bounds.h"
#include "tests/support/catch.h"

using namespace parka;
using namespace parka::test;

namespace {

std::vector<uint8_t> random_bytes(int64_t count, uint64_t seed) {
  std::vector<uint8_t> bytes(static_cast<size_t>(count));
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<uint8_t>(philox4x32(seed, 1, i)[0]);
  return bytes;
}

// The definition, a byte at a time.
uint64_t plain_hash(const uint8_t* x, int64_t bytes, uint64_t first_byte) {
  uint64_t hash = 0;
  for (int64_t begin = 0; begin < bytes; begin += 8) {
    uint64_t z = 0;
    for (int64_t i = begin; i < begin + 8 && i < bytes; ++i) z += uint64_t{x[i]} << (8 * (i - begin));
    const uint64_t position = (first_byte + static_cast<uint64_t>(begin)) / 8;
    z ^= position * 0x9e3779b97f4a7c15u + 0x2545f4914f6cdd1du;
    for (int round = 0; round < 2; ++round) z = (z ^ (z >> 32)) * 0xd6e8feb86659fd93u;
    hash += z ^ (z >> 32);
  }
  return hash;
}

// A hash on a device, 0 at first.
class HashOn {
 public:
  explicit HashOn(Device& device) : device_(device), hash_(device, DType::kU8, {kHashWordBytes}) { set(0); }

  void set(uint64_t value) { device_.copy_to_device(hash_.view().data, &value, sizeof(value)); }
  uint64_t value() const {
    uint64_t value = 0;
    std::memcpy(&value, hash_.bytes().data(), sizeof(value));
    return value;
  }
  uint64_t of(const TensorView& x, uint64_t first_byte = 0) {
    set(0);
    bit_hash(device_, {x, hash_, first_byte});
    return value();
  }
  const TestTensor& tensor() const { return hash_; }

 private:
  Device& device_;
  TestTensor hash_;
};

TEST_CASE("bit_hash follows its definition at any length and alignment", "[kernels][bit_hash]") {
  constexpr int64_t kLongest = 100, kOffsets = 24;
  const std::vector<uint8_t> bytes = random_bytes(kLongest + kOffsets, 1);
  for (Device* device : devices()) {
    const TestTensor memory(*device, DType::kU8, {kLongest + kOffsets});
    upload(*device, memory, bytes);
    HashOn hash(*device);
    int64_t wrong = 0;
    for (int64_t length = 0; length <= kLongest; ++length) {
      for (int64_t offset = 0; offset < kOffsets; ++offset) {
        const uint64_t first_byte = 8 * static_cast<uint64_t>(offset * 1000003 + length);
        const uint64_t got = hash.of(memory.view().rows(offset, length), first_byte);
        const uint64_t want = plain_hash(bytes.data() + offset, length, first_byte);
        wrong += got != want;
        wrong += got != bit_hash_of(std::as_bytes(std::span(bytes).subspan(offset, length)), first_byte);
      }
    }
    CAPTURE(device->name());
    CHECK(wrong == 0);
    CHECK((memory.guard_intact() && hash.tensor().guard_intact()));
  }
}

TEST_CASE("bit_hash takes tensors of every format and of many pieces", "[kernels][bit_hash]") {
  for (Device* device : devices()) {
    HashOn hash(*device);
    for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16, DType::kE4M3, DType::kE5M2, DType::kI32,
                              DType::kU16, DType::kU8}) {
      const TestTensor x(*device, dtype, {3, 7, 33333});
      const std::vector<uint8_t> bytes = random_bytes(x.view().bytes(), 2);
      upload(*device, x, bytes);
      CAPTURE(device->name(), name_of(dtype));
      CHECK(hash.of(x, 80) == plain_hash(bytes.data(), x.view().bytes(), 80));
    }
  }
}

TEST_CASE("bit_hash adds to what is there, so that pieces give the hash of the whole", "[kernels][bit_hash]") {
  const std::vector<uint8_t> bytes = random_bytes(100003, 3);
  for (Device* device : devices()) {
    const TestTensor x(*device, DType::kU8, {100003});
    upload(*device, x, bytes);
    HashOn hash(*device);
    const uint64_t whole = hash.of(x), start = 0xfedcba9876543210;
    hash.set(start);
    for (int64_t begin = 0; begin < 100003; begin += 17000) {
      bit_hash(*device, {x.view().rows(begin, std::min<int64_t>(17000, 100003 - begin)), hash.tensor(),
                         static_cast<uint64_t>(begin)});
    }
    CHECK(hash.value() == start + whole);
  }
}

TEST_CASE("bit_hash shows every flipped bit of a tensor", "[kernels][bit_hash]") {
  for (Device* device : devices()) {
    HashOn hash(*device);
    const TestTensor x(*device, DType::kBF16, {3, 9});  // 54 bytes
    std::vector<uint8_t> bytes = random_bytes(54, 4);
    upload(*device, x, bytes);
    const uint64_t before = hash.of(x);
    int64_t unseen = 0;
    for (size_t bit = 0; bit < 8 * bytes.size(); ++bit) {
      bytes[bit / 8] ^= static_cast<uint8_t>(1 << (bit % 8));
      upload(*device, x, bytes);
      unseen += hash.of(x) == before;
      bytes[bit / 8] ^= static_cast<uint8_t>(1 << (bit % 8));
    }
    CHECK(unseen == 0);
  }
}

TEST_CASE("bit_hash of nothing adds nothing", "[kernels][bit_hash]") {
  for (Device* device : devices()) {
    HashOn hash(*device);
    hash.set(5);
    const TestTensor none(*device, DType::kF32, {0, 3});
    bit_hash(*device, {none, hash.tensor()});
    bit_hash(*device, {TensorView(nullptr, DType::kF32, {0}), hash.tensor()});
    CHECK(hash.value() == 5);
  }
}

TEST_CASE("bit_hash gives the same bits on any number of threads", "[kernels][bit_hash]") {
  const TestTensor x(cpu_device(), DType::kBF16, {1000001}, random_bf16(1000001, 5));
  CHECK(same_on_one_thread([&] {
    HashOn hash(cpu_device());
    hash.of(x);
    return hash.tensor().bytes();
  }));
}

TEST_CASE("bit_hash refuses wrong arguments", "[kernels][bit_hash]") {
  const TestTensor x(cpu_device(), DType::kF32, {3}), bytes(cpu_device(), DType::kU8, {12}),
      codes(cpu_device(), DType::kE4M3, {8});
  const auto message = [&](const TensorView& of, const TensorView& hash, uint64_t first_byte = 0) {
    return internal_error([&] { bit_hash(cpu_device(), {of, hash, first_byte}); });
  };
  const TensorView hash = bytes.view().rows(0, 8);
  CHECK(contains(message(TensorView(nullptr, DType::kF32, {3}), hash), "bit_hash: x"));
  CHECK(contains(message(x, codes), "bit_hash: hash is e4m3"));
  CHECK(contains(message(x, bytes), "bit_hash: hash"));
  CHECK(contains(message(x, {}), "bit_hash: hash"));
  CHECK(contains(message(x, bytes.view().rows(4, 8)), "not aligned to 8 bytes"));
  CHECK(contains(message(x, hash, 12), "first_byte is 12"));
  CHECK(message(x, hash, 16).empty());
}

TEST_CASE("what bit_hash moves is what it reads", "[kernels][bit_hash]") {
  const TestTensor x(cpu_device(), DType::kBF16, {3, 5}), hash(cpu_device(), DType::kU8, {8});
  CHECK(cost_of(BitHash{x, hash}).bytes == 30);
}

TEST_CASE("bit_hash on a GPU gives the bits of the CPU", "[kernels][bit_hash][devices]") {
  constexpr int64_t kBytes = int64_t{48} << 20;  // more than the blocks of any GPU have under way at once
  std::vector<Device*> others = devices();
  others.erase(others.begin());
  if (others.empty()) return;
  const std::vector<float> values = random_normal(kBytes / 4, 6);
  const TestTensor on_cpu(cpu_device(), DType::kU8, {kBytes});
  upload(cpu_device(), on_cpu, values);
  HashOn want(cpu_device());
  for (Device* device : others) {
    const TestTensor x(*device, DType::kU8, {kBytes});
    upload(*device, x, values);
    HashOn got(*device);
    CHECK(got.of(x) == want.of(on_cpu));
    for (uint64_t i = 0; i < 200; ++i) {
      const auto random = philox4x32(7, 1, i);
      // Mostly aligned to 16 bytes; short as well as long.
      const int64_t align = i % 4 == 0 ? 1 : i % 4 == 1 ? 8 : 16;
      const int64_t offset = random[0] % 4096 / align * align;
      const int64_t length = static_cast<int64_t>(random[1] >> random[2] % 32) % (kBytes - 4096);
      const uint64_t first_byte = uint64_t{random[3]} * 8;
      CAPTURE(device->name(), offset, length, first_byte);
      CHECK(got.of(x.view().rows(offset, length), first_byte) ==
            want.of(on_cpu.view().rows(offset, length), first_byte));
    }
  }
}

TEST_CASE("bit_hash on a GPU is the same when it is replayed", "[kernels][bit_hash][devices]") {
  const std::vector<float> values = random_normal(1000003, 8);
  const auto hash_thrice = [&](Device& device) {
    const TestTensor x(device, DType::kF32, {1000003}, values);
    HashOn hash(device);
    std::unique_ptr<Recording> recording;
    for (int n = 0; n < 3; ++n) {
      device.replay(recording, [&] { bit_hash(device, {x, hash.tensor(), 64}); });
    }
    return hash.value();
  };
  const uint64_t want = 3 * bit_hash_of(std::as_bytes(std::span(values)), 64);
  for (Device* device : devices()) CHECK(hash_thrice(*device) == want);
}

}  // namespace
