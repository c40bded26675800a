#include "kernels/device.h"

#include <cstdlib>
#include <cstring>

#include "core/error.h"
#include "core/parallel.h"

namespace parka {
namespace {

class CpuDevice final : public Device {
 public:
  DeviceKind kind() const override { return DeviceKind::kCpu; }
  std::string description() const override { return fmt::format("CPU, {} threads", num_threads()); }

  void* allocate(int64_t bytes) override {
    constexpr int64_t kAlignment = 256;
    const int64_t rounded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    void* memory = std::aligned_alloc(kAlignment, static_cast<size_t>(rounded == 0 ? kAlignment : rounded));
    if (memory == nullptr) throw_bad_input("not enough memory: {:.2f} GiB were asked for", bytes / 0x1p30);
    return memory;
  }
  void release(void* memory) override { std::free(memory); }

  void copy_to_device(void* target, const void* host, int64_t bytes) override { copy(target, host, bytes); }
  void copy_to_host(void* host, const void* source, int64_t bytes) override { copy(host, source, bytes); }
  void copy(void* target, const void* source, int64_t bytes) override {
    if (bytes > 0) std::memcpy(target, source, static_cast<size_t>(bytes));
  }
  void fill_zero(void* target, int64_t bytes) override {
    if (bytes > 0) std::memset(target, 0, static_cast<size_t>(bytes));
  }
  void synchronize() override {}
};

}  // namespace

std::unique_ptr<Device> make_cpu_device() { return std::make_unique<CpuDevice>(); }

}  // namespace parka
