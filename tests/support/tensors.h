#pragma once
#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "core/ignored_target.h"
#include "core/philox.h"
#include "core/tensor.h"
#include "kernels/device/device.h"

// Tensors for op tests: poisoned before use, with guard bands that show writes outside.
namespace parka::test {

// The first GPU, or none; with a workspace for any op of a test.
inline Device* gpu() {
  static const std::unique_ptr<Device> device = []() -> std::unique_ptr<Device> {
    if (num_cuda_devices() == 0) return nullptr;
    constexpr int64_t kWorkspaceBytes = int64_t{256} << 20;
    std::unique_ptr<Device> made = make_cuda_device();
    made->set_workspace(made->allocate(kWorkspaceBytes), kWorkspaceBytes);
    return made;
  }();
  return device.get();
}

inline Device& cpu_device() {
  static const std::unique_ptr<Device> device = make_cpu_device();
  return *device;
}

// The devices that op tests run on: the CPU, and a GPU where there is one.
inline std::vector<Device*> devices() {
  if (gpu() == nullptr) return {&cpu_device()};
  return {&cpu_device(), gpu()};
}

// Whether FP8 of this scaling can be asked of a device. A GPU has what models use: groups of 16 to 128 columns and
// blocks of 128 rows and columns.
inline bool has_scaling(const Device& device, Scaling scaling, int64_t group) {
  if (device.kind() == DeviceKind::kCpu) return true;
  if (scaling == Scaling::kGroup) return group == 16 || group == 32 || group == 64 || group == 128;
  return scaling != Scaling::kBlock || group == 128;
}

// Standard normals times `scale`, the same for the same seed.
inline std::vector<float> random_normal(int64_t count, uint64_t seed, float scale = 1.0f) {
  std::vector<float> values(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    values[i] = scale * static_cast<float>(philox_normal2(seed, 7, static_cast<uint64_t>(i))[0]);
  }
  return values;
}

// The same rounded to bf16, so that a bf16 tensor holds them exactly.
inline std::vector<float> random_bf16(int64_t count, uint64_t seed, float scale = 1.0f) {
  std::vector<float> values = random_normal(count, seed, scale);
  for (float& v : values) v = decode_bf16(encode_bf16(v));
  return values;
}

inline bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

class TestTensor {
 public:
  // Without values the tensor is filled with 0xff bytes: NaN in every float format.
  TestTensor(Device& device, DType dtype, std::initializer_list<int64_t> shape,
             const std::vector<float>& values = {})
      : device_(&device), view_(nullptr, dtype, shape) {
    const int64_t bytes = view_.bytes();
    memory_ = static_cast<std::byte*>(device.allocate(bytes + 2 * kGuard));
    std::vector<std::byte> host(static_cast<size_t>(bytes + 2 * kGuard), kPoison);
    for (size_t i = 0; i < values.size(); ++i) store(host.data() + kGuard, static_cast<int64_t>(i), values[i]);
    if (!values.empty()) PARKA_REQUIRE(static_cast<int64_t>(values.size()) == view_.numel());
    device.copy_to_device(memory_, host.data(), bytes + 2 * kGuard);
    view_.data = memory_ + kGuard;
  }
  ~TestTensor() { device_->release(memory_); }
  TestTensor(const TestTensor&) = delete;
  TestTensor& operator=(const TestTensor&) = delete;

  operator TensorView() const { return view_; }
  operator ScaledView() const { return view_; }
  const TensorView& view() const { return view_; }

  // The elements as floats (codes decoded without a scale).
  std::vector<float> host() const {
    const std::vector<std::byte> raw = bytes();
    std::vector<float> values(static_cast<size_t>(view_.numel()));
    for (int64_t i = 0; i < view_.numel(); ++i) values[i] = load(raw.data(), i);
    return values;
  }
  // The memory itself, for bit comparisons.
  std::vector<std::byte> bytes() const {
    std::vector<std::byte> raw(static_cast<size_t>(view_.bytes()));
    device_->synchronize();
    device_->copy_to_host(raw.data(), view_.data, view_.bytes());
    return raw;
  }
  bool guard_intact() const {
    std::vector<std::byte> all(static_cast<size_t>(view_.bytes() + 2 * kGuard));
    device_->synchronize();
    device_->copy_to_host(all.data(), memory_, static_cast<int64_t>(all.size()));
    for (int64_t i = 0; i < kGuard; ++i) {
      if (all[i] != kPoison || all[all.size() - 1 - i] != kPoison) return false;
    }
    return true;
  }

 private:
  static constexpr int64_t kGuard = 256;
  static constexpr std::byte kPoison{0xff};

  void store(std::byte* base, int64_t i, float v) const {
    auto put = [&](auto x) { std::memcpy(base + i * static_cast<int64_t>(sizeof(x)), &x, sizeof(x)); };
    switch (view_.dtype) {
      case DType::kF32: put(v); break;
      case DType::kBF16: put(encode_bf16(v)); break;
      case DType::kF16: put(encode_fp16(v)); break;
      case DType::kE4M3: put(encode_e4m3(v)); break;
      case DType::kE5M2: put(encode_e5m2(v)); break;
      case DType::kI32: put(static_cast<int32_t>(v)); break;
      case DType::kU16: put(static_cast<uint16_t>(v)); break;
      case DType::kU8: put(static_cast<uint8_t>(v)); break;
      case DType::kI8: put(static_cast<int8_t>(v)); break;
      case DType::kI64: put(static_cast<int64_t>(v)); break;
    }
  }
  float load(const std::byte* base, int64_t i) const {
    auto get = [&](auto x) {
      std::memcpy(&x, base + i * static_cast<int64_t>(sizeof(x)), sizeof(x));
      return x;
    };
    switch (view_.dtype) {
      case DType::kF32: return get(float{});
      case DType::kBF16: return decode_bf16(get(BFloat16{}));
      case DType::kF16: return decode_fp16(get(Float16{}));
      case DType::kE4M3: return decode_e4m3(get(Float8E4M3{}));
      case DType::kE5M2: return decode_e5m2(get(Float8E5M2{}));
      case DType::kI32: return static_cast<float>(get(int32_t{}));
      case DType::kU16: return static_cast<float>(get(uint16_t{}));
      case DType::kU8: return static_cast<float>(get(uint8_t{}));
      case DType::kI8: return static_cast<float>(get(int8_t{}));
      case DType::kI64: return static_cast<float>(get(int64_t{}));
    }
    return 0;
  }

  Device* device_;
  TensorView view_;
  std::byte* memory_;
};

// A matrix with the scale tensor that its scaling needs, both poisoned.
class TestMatrix {
 public:
  TestMatrix(Device& device, DType dtype, int64_t rows, int64_t cols, Scaling scaling = Scaling::kNone,
             int64_t group = 0, DType scale_dtype = DType::kF32)
      : data(device, dtype, {rows, cols}), scaling_(scaling), group_(group) {
    if (scaling == Scaling::kNone) return;
    const auto shape = scale_shape(scaling, group, rows, cols);
    scale =
        scaling == Scaling::kTensor
            ? std::make_unique<TestTensor>(device, DType::kF32, std::initializer_list<int64_t>{1})
            : std::make_unique<TestTensor>(device, scale_dtype, std::initializer_list<int64_t>{shape[0], shape[1]});
  }
  operator ScaledView() const { return view(); }
  ScaledView view() const {
    return scale ? ScaledView(data.view(), scale->view(), scaling_, group_) : ScaledView(data.view());
  }
  // The values, scales applied.
  std::vector<float> host() const {
    std::vector<float> values = data.host();
    if (!scale) return values;
    const std::vector<float> scales = scale->host();
    const int64_t rows = data.view().dim[0], cols = data.view().dim[1];
    const auto shape = scale_shape(scaling_, group_, rows, cols);
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < cols; ++c) {
        const int64_t sr = scaling_ == Scaling::kTensor ? 0 : scaling_ == Scaling::kGroup ? r : r / group_;
        const int64_t sc = scaling_ == Scaling::kTensor ? 0 : c / group_;
        values[r * cols + c] *= scales[sr * shape[1] + sc];
      }
    }
    return values;
  }
  bool guard_intact() const { return data.guard_intact() && (!scale || scale->guard_intact()); }

  TestTensor data;
  std::unique_ptr<TestTensor> scale;

 private:
  Scaling scaling_;
  int64_t group_;
};

// Targets of rows of tokens, [sequences, S]: the next token, and kIgnoreTarget at the end of a sequence.
inline std::vector<int32_t> next_token_targets(const std::vector<int32_t>& tokens, int64_t sequence_length) {
  std::vector<int32_t> targets(tokens.size(), kIgnoreTarget);
  for (size_t t = 0; t + 1 < tokens.size(); ++t) {
    if (static_cast<int64_t>(t + 1) % sequence_length != 0) targets[t] = tokens[t + 1];
  }
  return targets;
}

}  // namespace parka::test
