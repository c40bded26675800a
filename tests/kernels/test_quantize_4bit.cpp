#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "core/philox.h"
#include "kernels/ops/quantize/quantize_4bit.h"
#include "tests/kernels/op_bounds.h"
#include "tests/support/catch.h"

using namespace parka;
using namespace parka::test;

namespace {

constexpr Format4Bit kFormats[] = {Format4Bit::kNf4, Format4Bit::kFp4};
constexpr uint8_t kMinusZero = 8;  // of FP4

// As zlib computes it.
uint32_t crc32(const std::vector<std::byte>& bytes) {
  uint32_t crc = ~0u;
  for (const std::byte byte : bytes) {
    crc ^= static_cast<uint32_t>(byte);
    for (int i = 0; i < 8; ++i) crc = (crc >> 1) ^ (crc & 1 ? 0xedb88320u : 0u);
  }
  return ~crc;
}

// A tensor in 4 bits.
struct Codes {
  Codes(Device& device, int64_t N, Format4Bit format_, int64_t block_size_)
      : format(format_),
        block_size(block_size_),
        codes(device, DType::kU8, {ceil_div(N, 2)}),
        absmax(device, DType::kF32, {ceil_div(N, block_size_)}) {}
  Codes(Device& device, const TestTensor& x, Format4Bit format_, int64_t block_size_ = 64)
      : Codes(device, x.view().numel(), format_, block_size_) {
    quantize_4bit(device, {.x = x, .codes = codes, .absmax = absmax, .format = format, .block_size = block_size});
  }
  void decode(Device& device, const TestTensor& out) const {
    dequantize_4bit(device,
                    {.codes = codes, .absmax = absmax, .out = out, .format = format, .block_size = block_size});
  }
  bool guard_intact() const { return codes.guard_intact() && absmax.guard_intact(); }

  Format4Bit format;
  int64_t block_size;
  TestTensor codes, absmax;
};

// The scales of a tensor in 8 bits.
struct NestedScales {
  NestedScales(Device& device, const TestTensor& absmax)
      : map(device, DType::kF32, {256}, {dynamic_map().begin(), dynamic_map().end()}),
        codes(device, DType::kU8, {absmax.view().numel()}),
        nested_absmax(device, DType::kF32, {ceil_div(absmax.view().numel(), kNestedBlock)}),
        offset(device, DType::kF32, {1}) {
    quantize_absmax(device, {absmax, map, codes, nested_absmax, offset});
  }
  void decode(Device& device, const Codes& q, const TestTensor& out) const {
    dequantize_4bit(device, {q.codes, codes, map, nested_absmax, offset, out, q.format, q.block_size});
  }
  std::vector<std::byte> bytes() const {
    std::vector<std::byte> all = codes.bytes();
    for (const TestTensor* tensor : {&nested_absmax, &offset}) {
      const std::vector<std::byte> more = tensor->bytes();
      all.insert(all.end(), more.begin(), more.end());
    }
    return all;
  }
  bool guard_intact() const {
    return codes.guard_intact() && nested_absmax.guard_intact() && offset.guard_intact();
  }

  TestTensor map, codes, nested_absmax, offset;
};

// The numbers that the golden values of bitsandbytes are of.
std::vector<float> sines(int64_t count) {
  std::vector<float> x;
  for (int64_t i = 0; i < count; ++i) x.push_back(std::sin(static_cast<float>(i)));
  return x;
}
std::vector<float> scattered() {
  std::vector<float> x;
  for (uint32_t i = 0; i < 65536; ++i) x.push_back(static_cast<float>((i * 2654435761u) >> 8) * 0x1p-24f - 0.5f);
  return x;
}

std::string hex(const std::vector<std::byte>& bytes) {
  std::string text;
  for (const std::byte byte : bytes) {
    for (const int half : {4, 0}) text += "0123456789abcdef"[static_cast<int>(byte) >> half & 15];
  }
  return text;
}

// bitsandbytes gives FP4's zero the sign of x on GPUs and the other one on CPUs.
std::vector<std::byte> without_minus_zero(Format4Bit format, std::vector<std::byte> codes) {
  if (format == Format4Bit::kNf4) return codes;
  for (std::byte& byte : codes) {
    const int high = static_cast<int>(byte) >> 4, low = static_cast<int>(byte) & 15;
    byte = static_cast<std::byte>((high == kMinusZero ? 0 : high) << 4 | (low == kMinusZero ? 0 : low));
  }
  return codes;
}
uint32_t crc32_of_values(const TestTensor& t) {
  std::vector<std::byte> bytes = t.bytes();
  const auto size = static_cast<size_t>(size_of(t.view().dtype));
  for (size_t i = 0; i < bytes.size(); i += size) {
    uint32_t bits = 0;
    std::memcpy(&bits, bytes.data() + i, size);
    if (bits == (1u << (8 * size - 1))) std::memset(bytes.data() + i, 0, size);
  }
  return crc32(bytes);
}

int code_at(const std::vector<std::byte>& packed, size_t i) {
  return static_cast<int>(packed[i / 2]) >> (i % 2 == 0 ? 4 : 0) & 15;
}

// Whether `code` stands for a value that is as near to x / absmax as any, but for the rounding of midpoints, and
// has the sign of x where the format's zero has one.
bool is_nearest(Format4Bit format, int code, float x, float absmax) {
  constexpr double kRounding = 0x1p-24;
  const Values4Bit& values = values_of(format);
  const double t = x * (1.0f / absmax);
  double least = 2;
  for (const float value : values) least = std::min(least, std::abs(value - t));
  if (format == Format4Bit::kFp4 && std::signbit(values[code]) != std::signbit(x)) return false;
  return std::abs(values[code] - t) <= least + kRounding;
}

TEST_CASE("quantize_4bit and dequantize_4bit give bitsandbytes' bytes", "[kernels][quantize_4bit]") {
  const struct {
    Format4Bit format;
    int64_t block_size;
    DType dtype;
    uint32_t codes, absmax, fp32, bf16;
  } cases[] = {
      // FP4 of bf16 has ties, which bitsandbytes gives the smaller magnitude on GPUs, as here, and the smaller
      // number
      // on CPUs.
      {Format4Bit::kNf4, 32, DType::kF32, 0x6883f8fa, 0xe3f33c28, 0x356be38d, 0xf7e2ff77},
      {Format4Bit::kNf4, 32, DType::kBF16, 0xae63fb94, 0x8a7144a6, 0xc31b652c, 0x58fccf43},
      {Format4Bit::kNf4, 64, DType::kF32, 0xdec96ee8, 0xeea5c3e9, 0xb9234d3f, 0x1431bfbb},
      {Format4Bit::kNf4, 64, DType::kBF16, 0x2358eb69, 0x2fcdf409, 0x473d9846, 0x25318c58},
      {Format4Bit::kNf4, 4096, DType::kF32, 0xad6b6a9c, 0xec401c22, 0xcf2cc07a, 0x20c8ceeb},
      {Format4Bit::kNf4, 4096, DType::kBF16, 0x9437b629, 0x01375205, 0x0532ee80, 0x8090fe09},
      {Format4Bit::kFp4, 32, DType::kF32, 0x9b62689b, 0xe3f33c28, 0x3e05e6ff, 0x350180b1},
      {Format4Bit::kFp4, 32, DType::kBF16, 0xe6414f32, 0x8a7144a6, 0xa0ed3cef, 0x48d7ff27},
      {Format4Bit::kFp4, 64, DType::kF32, 0x447962bc, 0xeea5c3e9, 0x187479e6, 0xa502efe5},
      {Format4Bit::kFp4, 64, DType::kBF16, 0x05b5e47b, 0x2fcdf409, 0x2509ba9b, 0x33cce607},
      {Format4Bit::kFp4, 4096, DType::kF32, 0xaa9d24f8, 0xec401c22, 0x1c85185b, 0xc3b6a596},
      {Format4Bit::kFp4, 4096, DType::kBF16, 0xc50c8bc6, 0x01375205, 0x2f5bfdbf, 0xb21d1f91},
  };
  const std::vector<float> values = scattered();
  const auto N = static_cast<int64_t>(values.size());
  for (Device* device : devices()) {
    for (const auto& c : cases) {
      const TestTensor x(*device, c.dtype, {N}, values), fp32(*device, DType::kF32, {N}),
          bf16(*device, DType::kBF16, {N});
      const Codes q(*device, x, c.format, c.block_size);
      q.decode(*device, fp32);
      q.decode(*device, bf16);
      CAPTURE(device->name(), static_cast<int>(c.format), c.block_size, name_of(c.dtype));
      CHECK(crc32(without_minus_zero(c.format, q.codes.bytes())) == c.codes);
      CHECK(crc32(q.absmax.bytes()) == c.absmax);
      CHECK(crc32_of_values(fp32) == c.fp32);
      CHECK(crc32_of_values(bf16) == c.bf16);
      CHECK((q.guard_intact() && fp32.guard_intact() && bf16.guard_intact()));
    }
  }
}

TEST_CASE("quantize_4bit gives bitsandbytes' codes of sines, of an odd number of them too",
          "[kernels][quantize_4bit]") {
  const char* const nf4 =
      "7ef9104efc202cfe4019fe7106efa103dfd301bfe5017ef9104efc202cfd4019"
      "fe7006efa103dfd301bfe5017ef8104efb202cfd4019fe7006efa103dfc201bf";
  const char* const fp4 =
      "0336abf234dbd532fba6339bbe237abc535dba432eba1336abf234dbd532cba6"
      "329bbe237abc535dba432eba1336abf234dbd532cba6329bbe237abc535dba43";
  for (Device* device : devices()) {
    const TestTensor x(*device, DType::kF32, {128}, sines(128)), odd(*device, DType::kF32, {67}, sines(67));
    const Codes q(*device, x, Format4Bit::kNf4);
    CHECK(hex(q.codes.bytes()) == nf4);
    CHECK(q.absmax.host() == std::vector<float>{0.999990225f, 0.999520183f});
    CHECK(hex(Codes(*device, x, Format4Bit::kFp4).codes.bytes()) == fp4);
    const Codes of_odd(*device, odd, Format4Bit::kNf4), fp4_of_odd(*device, odd, Format4Bit::kFp4);
    CHECK(hex(of_odd.codes.bytes()) == std::string(nf4, 64) + "ff77");
    CHECK(hex(fp4_of_odd.codes.bytes()) == std::string(fp4, 64) + "3390");
    CHECK((of_odd.guard_intact() && fp4_of_odd.guard_intact()));
  }
}

TEST_CASE("quantize_absmax gives bitsandbytes' nested scales", "[kernels][quantize_4bit]") {
  const std::vector<float> values = scattered();
  const auto N = static_cast<int64_t>(values.size());
  CHECK(crc32({reinterpret_cast<const std::byte*>(dynamic_map().data()),
               reinterpret_cast<const std::byte*>(dynamic_map().data() + 256)}) == 0x1b137aeb);
  for (Device* device : devices()) {
    const TestTensor x(*device, DType::kF32, {N}, values), out(*device, DType::kF32, {N});
    const Codes q(*device, x, Format4Bit::kNf4);
    const NestedScales nested(*device, q.absmax);
    CAPTURE(device->name());
    // PyTorch's sum in fp32 is off by a rounding.
    const float offset = 0.4957275390625f;
    CHECK(nested.offset.host()[0] == std::nextafter(offset, 0.0f));
    CHECK(crc32(nested.codes.bytes()) == 0x5f7f9c43);
    upload<float>(*device, nested.offset, {offset});
    upload<float>(*device, nested.nested_absmax, {0.00625139475f, 0.00628983974f, 0.00630903244f, 0.00632822514f});
    nested.decode(*device, q, out);
    CHECK(crc32(out.bytes()) == 0xb1ba4bb8);
    CHECK((nested.guard_intact() && out.guard_intact()));
  }
}

TEST_CASE("scales of several tensors are those of each alone", "[kernels][quantize_4bit]") {
  constexpr int64_t kTensors = 3;
  for (Device* device : devices()) {
    for (const int64_t blocks : {1, 255, 256, 600}) {
      for (const DType dtype : {DType::kF32, DType::kBF16}) {
        CAPTURE(device->name(), blocks, name_of(dtype));
        const int64_t N = 64 * blocks, nested_blocks = ceil_div(blocks, kNestedBlock);
        const std::vector<float> values = random_values(dtype, kTensors * N, 7, 0.02f);
        const TestTensor x(*device, dtype, {kTensors * N}, values), out(*device, dtype, {kTensors * N}),
            codes(*device, DType::kU8, {kTensors * blocks}),
            nested(*device, DType::kF32, {kTensors * nested_blocks}), offset(*device, DType::kF32, {kTensors});
        const Codes q(*device, x, Format4Bit::kNf4);
        const TestTensor map(*device, DType::kF32, {256}, {dynamic_map().begin(), dynamic_map().end()});
        quantize_absmax(*device, {q.absmax, map, codes, nested, offset});
        dequantize_4bit(*device, {q.codes, codes, map, nested, offset, out});
        std::vector<std::byte> scales, alone;
        for (int64_t t = 0; t < kTensors; ++t) {
          const std::vector<float> part(values.begin() + t * N, values.begin() + (t + 1) * N);
          const TestTensor one(*device, dtype, {N}, part), decoded(*device, dtype, {N});
          const Codes own(*device, one, Format4Bit::kNf4);
          const NestedScales own_nested(*device, own.absmax);
          own_nested.decode(*device, own, decoded);
          const std::vector<std::byte> bytes = decoded.bytes(), of_scales = own_nested.codes.bytes();
          alone.insert(alone.end(), bytes.begin(), bytes.end());
          scales.insert(scales.end(), of_scales.begin(), of_scales.end());
        }
        CHECK((codes.bytes() == scales));
        CHECK((out.bytes() == alone));
        CHECK((codes.guard_intact() && nested.guard_intact() && offset.guard_intact() && out.guard_intact()));
      }
    }
  }
}

TEST_CASE("quantize_4bit chooses the nearest value in blocks of any size and length", "[kernels][quantize_4bit]") {
  for (Device* device : devices()) {
    for (const Format4Bit format : kFormats) {
      for (const DType dtype : {DType::kF32, DType::kBF16}) {
        for (const int64_t block_size : {32, 64, 128, 256, 512, 2048, 4096}) {
          for (const int64_t N : {int64_t{1}, block_size - 1, block_size, block_size + 7, int64_t{9001}}) {
            const std::vector<float> values = random_values(dtype, N, static_cast<uint64_t>(N), 0.02f);
            const TestTensor x(*device, dtype, {N}, values), out(*device, DType::kF32, {N});
            const Codes q(*device, x, format, block_size);
            q.decode(*device, out);
            const std::vector<std::byte> codes = q.codes.bytes();
            const std::vector<float> absmax = q.absmax.host(), decoded = out.host();
            int64_t wrong = 0, badly_decoded = 0;
            for (int64_t i = 0; i < N; ++i) {
              const int code = code_at(codes, i);
              const int64_t first = i / block_size * block_size;
              float largest = 0;
              for (int64_t j = first; i == first && j < std::min(first + block_size, N); ++j) {
                largest = std::max(largest, std::abs(values[j]));
              }
              wrong += !is_nearest(format, code, values[i], absmax[i / block_size]);
              wrong += i == first && largest != absmax[i / block_size];
              badly_decoded += decoded[i] != values_of(format)[code] * absmax[i / block_size];
            }
            CAPTURE(device->name(), static_cast<int>(format), name_of(dtype), block_size, N);
            CHECK(wrong == 0);
            CHECK(badly_decoded == 0);
            CHECK((q.guard_intact() && out.guard_intact()));
          }
        }
      }
    }
  }
}

TEST_CASE("quantize_4bit of what it decoded gives the same codes", "[kernels][quantize_4bit]") {
  constexpr int64_t kCount = 20001;
  for (Device* device : devices()) {
    for (const Format4Bit format : kFormats) {
      for (const DType dtype : {DType::kF32, DType::kBF16}) {
        const TestTensor x(*device, dtype, {kCount}, random_values(dtype, kCount, 9)),
            again(*device, dtype, {kCount});
        const Codes first(*device, x, format);
        first.decode(*device, again);
        const Codes second(*device, again, format);
        CHECK((second.codes.bytes() == first.codes.bytes() && second.absmax.bytes() == first.absmax.bytes()));
      }
    }
  }
}

TEST_CASE("quantize_4bit makes zeros of a block without a scale", "[kernels][quantize_4bit]") {
  constexpr float kTiny = 1e-40f;  // 1 / kTiny is infinite
  for (Device* device : devices()) {
    for (const Format4Bit format : kFormats) {
      for (const float value : {0.0f, kTiny, -kTiny}) {
        const TestTensor x(*device, DType::kF32, {64}, std::vector<float>(64, value)),
            out(*device, DType::kF32, {64});
        const Codes q(*device, x, format);
        q.decode(*device, out);
        CHECK(hex(q.codes.bytes()) == std::string(64, format == Format4Bit::kNf4 ? '7' : '0'));
        CHECK(q.absmax.host() == std::vector<float>{std::abs(value)});
        CHECK(out.host() == std::vector<float>(64, 0.0f));
      }
    }
  }
}

TEST_CASE("quantize_4bit shows a NaN or an infinity in all of its block", "[kernels][quantize_4bit]") {
  for (Device* device : devices()) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      for (const float bad : {std::nanf(""), std::numeric_limits<float>::infinity(), -INFINITY}) {
        std::vector<float> values = random_values(dtype, 3 * 64, 4);
        values[100] = bad;
        const TestTensor x(*device, dtype, {3 * 64}, values), out(*device, dtype, {3 * 64});
        const Codes q(*device, x, Format4Bit::kNf4);
        q.decode(*device, out);
        const std::vector<float> decoded = out.host();
        int64_t wrong = 0;
        for (int64_t i = 0; i < 3 * 64; ++i) wrong += std::isnan(decoded[i]) != (i / 64 == 1);
        CHECK(wrong == 0);
        const NestedScales nested(*device, q.absmax);
        CHECK(std::isnan(nested.offset.host()[0]));
        nested.decode(*device, q, out);
        for (const float value : out.host()) wrong += !std::isnan(value);
        CHECK(wrong == 0);
      }
    }
  }
}

TEST_CASE("quantize_absmax chooses the nearest value and takes equal scales", "[kernels][quantize_4bit]") {
  for (Device* device : devices()) {
    for (const int64_t B : {1, 255, 256, 257, 1024, 5000}) {
      std::vector<float> scales = random_normal(B, 6, 0.1f);
      for (float& scale : scales) scale = std::abs(scale);
      const TestTensor absmax(*device, DType::kF32, {B}, scales);
      const NestedScales nested(*device, absmax);
      const std::vector<float> codes = nested.codes.host(), largest = nested.nested_absmax.host();
      const float offset = nested.offset.host()[0];
      double sum = 0;
      for (const float scale : scales) sum += scale;
      CHECK(std::abs(sum / static_cast<double>(B) - offset) <= 0x1p-24 * offset);
      int64_t wrong = 0;
      for (int64_t i = 0; i < B; ++i) {
        if (B == 1) break;  // all of its scales are the mean
        const float t = (scales[i] - offset) * (1.0f / largest[i / kNestedBlock]);
        double least = 1;
        for (const float value : dynamic_map()) least = std::min(least, std::abs(double{value} - t));
        wrong += std::abs(double{dynamic_map()[static_cast<size_t>(codes[i])]} - t) > least + 1e-7;
      }
      CAPTURE(device->name(), B);
      CHECK(wrong == 0);
      CHECK(nested.guard_intact());
    }
    const TestTensor equal(*device, DType::kF32, {300}, std::vector<float>(300, 0.25f));
    const NestedScales nested(*device, equal);
    CHECK(nested.offset.host() == std::vector<float>{0.25f});
    CHECK(nested.nested_absmax.host() == std::vector<float>{0, 0});
    CHECK(nested.codes.host() == std::vector<float>(300, 127));
  }
}

TEST_CASE("4-bit ops give the same bits on every device", "[kernels][quantize_4bit]") {
  if (gpu() == nullptr) return;
  Device& cpu = cpu_device();
  for (const Format4Bit format : kFormats) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      for (const int64_t block_size : {32, 64, 128, 1024, 4096}) {
        for (const int64_t N : {int64_t{1}, int64_t{4097}, int64_t{100003}, int64_t{1} << 21}) {
          const std::vector<float> values = random_values(dtype, N, 11);
          const TestTensor x(cpu, dtype, {N}, values), x_gpu(*gpu(), dtype, {N}, values);
          const TestTensor out(cpu, dtype, {N}), out_gpu(*gpu(), dtype, {N});
          const Codes q(cpu, x, format, block_size), q_gpu(*gpu(), x_gpu, format, block_size);
          CAPTURE(static_cast<int>(format), name_of(dtype), block_size, N);
          CHECK((q.codes.bytes() == q_gpu.codes.bytes() && q.absmax.bytes() == q_gpu.absmax.bytes()));
          q.decode(cpu, out);
          q_gpu.decode(*gpu(), out_gpu);
          CHECK(out.bytes() == out_gpu.bytes());
          const NestedScales nested(cpu, q.absmax), nested_gpu(*gpu(), q_gpu.absmax);
          CHECK(nested.bytes() == nested_gpu.bytes());
          nested.decode(cpu, q, out);
          nested_gpu.decode(*gpu(), q_gpu, out_gpu);
          CHECK(out.bytes() == out_gpu.bytes());
        }
      }
    }
  }
}

TEST_CASE("4-bit ops take tensors that begin at any element", "[kernels][quantize_4bit]") {
  constexpr int64_t kCount = 3001;
  for (Device* device : devices()) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      const std::vector<float> values = random_values(dtype, kCount + 8, 12);
      const TestTensor x(*device, dtype, {kCount + 8}, values);
      for (const int64_t offset : {1, 3, 4}) {
        const TestTensor aligned(*device, dtype, {kCount},
                                 {values.begin() + offset, values.begin() + offset + kCount});
        const Codes want(*device, aligned, Format4Bit::kNf4);
        const TestTensor decoded(*device, dtype, {kCount}), codes(*device, DType::kU8, {ceil_div(kCount, 2) + 8}),
            out(*device, dtype, {kCount + 8});
        want.decode(*device, decoded);
        const TensorView shifted = codes.view().rows(offset, ceil_div(kCount, 2));
        quantize_4bit(*device, {.x = x.view().rows(offset, kCount), .codes = shifted, .absmax = want.absmax});
        dequantize_4bit(*device, {.codes = shifted, .absmax = want.absmax, .out = out.view().rows(offset, kCount)});
        const std::vector<float> got = out.host(), expected = decoded.host();
        CAPTURE(device->name(), name_of(dtype), offset);
        CHECK(std::equal(expected.begin(), expected.end(), got.begin() + offset));
        CHECK((std::isnan(got[offset - 1]) && std::isnan(got[offset + kCount])));
      }
    }
  }
}

TEST_CASE("4-bit ops give the same bits on any number of threads, and nothing for no elements",
          "[kernels][quantize_4bit]") {
  Device& device = cpu_device();
  const TestTensor x(device, DType::kBF16, {100001}, random_bf16(100001, 5));
  CHECK(same_on_one_thread([&] { return Codes(device, x, Format4Bit::kFp4).codes.bytes(); }));
  CHECK(same_on_one_thread([&] {
    const TestTensor out(device, DType::kBF16, {100001});
    Codes(device, x, Format4Bit::kNf4).decode(device, out);
    return out.bytes();
  }));
  for (Device* each : devices()) {
    const TestTensor none(*each, DType::kF32, {0});
    const Codes q(*each, none, Format4Bit::kNf4);
    q.decode(*each, none);
    CHECK((q.guard_intact() && none.guard_intact()));
  }
}

TEST_CASE("4-bit ops refuse wrong arguments", "[kernels][quantize_4bit]") {
  Device& device = cpu_device();
  const TestTensor x(device, DType::kF32, {100}, sines(100)), ids(device, DType::kI32, {100}),
      half(device, DType::kU8, {50}), two(device, DType::kF32, {2}), one(device, DType::kF32, {1}),
      codes(device, DType::kU8, {2}), map(device, DType::kF32, {256});
  const auto quantized = [&](const Quantize4Bit& a) { return internal_error([&] { quantize_4bit(device, a); }); };
  CHECK(contains(quantized({.x = ids, .codes = half, .absmax = two}), "quantize_4bit: x is int32"));
  CHECK(contains(quantized({.x = x, .codes = two, .absmax = two}), "quantize_4bit: codes"));
  CHECK(contains(quantized({.x = x, .codes = half, .absmax = one}), "quantize_4bit: absmax"));
  for (const int64_t size : {0, 16, 48, 8192}) {
    CHECK(contains(quantized({.x = x, .codes = half, .absmax = two, .block_size = size}), "block_size"));
  }
  const auto nested = [&](const QuantizeAbsmax& a) { return internal_error([&] { quantize_absmax(device, a); }); };
  CHECK(contains(nested({half, map, codes, one, one}), "quantize_absmax: absmax"));
  CHECK(contains(nested({two, two, codes, one, one}), "quantize_absmax: map"));
  CHECK(contains(nested({two, map, half, one, one}), "quantize_absmax: codes"));
  CHECK(contains(nested({two, map, codes, two, one}), "quantize_absmax: nested_absmax"));
  CHECK(contains(nested({two, map, codes, one, ids}), "quantize_absmax: offset"));
  const auto decoded = [&](const Dequantize4Bit& a) { return internal_error([&] { dequantize_4bit(device, a); }); };
  CHECK(contains(decoded({.codes = two, .absmax = two, .out = x}), "dequantize_4bit: codes"));
  CHECK(contains(decoded({.codes = half, .absmax = one, .out = x}), "dequantize_4bit: absmax"));
  CHECK(contains(decoded({.codes = half, .absmax = codes, .out = x}), "dequantize_4bit: map"));
  CHECK(contains(decoded({.codes = half, .absmax = two, .map = map, .out = x}), "have no use"));
  CHECK(contains(decoded({.codes = half, .absmax = two, .out = ids}), "dequantize_4bit: out"));
}

TEST_CASE("what 4-bit ops move are codes, scales and numbers", "[kernels][quantize_4bit]") {
  Device& device = cpu_device();
  const TestTensor x(device, DType::kBF16, {128}, sines(128));
  const Codes q(device, x, Format4Bit::kNf4);
  const NestedScales nested(device, q.absmax);
  CHECK(cost_of(Quantize4Bit{.x = x, .codes = q.codes, .absmax = q.absmax}).bytes == 256 + 64 + 8);
  CHECK(cost_of(Dequantize4Bit{.codes = q.codes, .absmax = q.absmax, .out = x}).bytes == 256 + 64 + 8);
  CHECK(cost_of(QuantizeAbsmax{q.absmax, nested.map, nested.codes, nested.nested_absmax, nested.offset}).bytes ==
        2 * 8 + 1024 + 2 + 4 + 4);
}

}  // namespace
