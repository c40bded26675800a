#include "kernels/device/device.h"

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/parallel.h"

namespace parka {
namespace {

class CpuRead final : public HostRead {
 public:
  CpuRead(const void* source, int64_t bytes)
      : bytes_(static_cast<const std::byte*>(source), static_cast<const std::byte*>(source) + bytes) {}
  bool ready() const override { return true; }
  const void* wait() override { return bytes_.data(); }

 private:
  std::vector<std::byte> bytes_;
};

class CpuStream final : public HostStream {
 public:
  void follow_device() override {}
  void load(size_t, const std::vector<Copy>& copies) override { run(copies); }
  void wait_loaded(size_t) override {}
  void save(const std::vector<Copy>& copies, size_t) override { run(copies); }
  void wait_saved(size_t) override {}

 private:
  static void run(const std::vector<Copy>& copies) {
    for (const Copy& copy : copies) std::memcpy(copy.target, copy.source, static_cast<size_t>(copy.bytes));
  }
};

class CpuStaging final : public StagingBuffer {
 public:
  explicit CpuStaging(int64_t bytes) : bytes_(bytes) {}

  const std::string& failure() override { return failure_; }
  void begin(const std::vector<TensorView>& tensors) override {
    memory_.resize(static_cast<size_t>(bytes_));
    copies_.clear();
    int64_t at = 0;
    for (const TensorView& tensor : tensors) {
      PARKA_REQUIRE(at + tensor.bytes() <= bytes_);
      if (tensor.bytes() > 0) std::memcpy(memory_.data() + at, tensor.data, static_cast<size_t>(tensor.bytes()));
      copies_.emplace_back(memory_.data() + at, static_cast<size_t>(tensor.bytes()));
      at += place_of(tensor.bytes());
    }
  }
  void order_after(size_t) override {}
  std::span<const std::byte> wait(size_t index) override { return copies_.at(index); }

 private:
  int64_t bytes_;
  std::string failure_;
  std::vector<std::byte> memory_;
  std::vector<std::span<const std::byte>> copies_;
};

using Clock = std::chrono::steady_clock;

class CpuMark final : public Mark {
 public:
  double seconds_since(const Mark& earlier) const override {
    return std::chrono::duration<double>(time_ - static_cast<const CpuMark&>(earlier).time_).count();
  }

 private:
  Clock::time_point time_ = Clock::now();
};

class CpuOpTimer final : public OpTimer {
 public:
  void begin(std::string_view op, OpCost cost) override {
    times.push_back({section, std::string(op), std::move(cost), 0.0});
    start_ = Clock::now();
  }
  void end() override { times.back().seconds = std::chrono::duration<double>(Clock::now() - start_).count(); }

  std::vector<OpTime> times;

 private:
  Clock::time_point start_;
};

class CpuDevice final : public Device {
 public:
  DeviceKind kind() const override { return DeviceKind::kCpu; }
  std::string name() const override { return "CPU"; }
  std::string description() const override { return fmt::format("CPU, {} threads", num_threads()); }

  void* allocate(int64_t bytes) override {
    constexpr int64_t kAlignment = 256;
    const int64_t rounded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    void* memory = std::aligned_alloc(kAlignment, static_cast<size_t>(rounded == 0 ? kAlignment : rounded));
    if (memory == nullptr)
      throw_bad_input("not enough memory: {:.2f} GiB were requested; try a smaller training.micro_batch_size",
                      bytes / 0x1p30);
    return memory;
  }
  void release(void* memory) override { std::free(memory); }

  void* allocate_host(int64_t bytes) override {
    void* memory = allocate(bytes);
    fill_zero(memory, bytes);
    return memory;
  }
  void release_host(void* memory) override { std::free(memory); }

  void set_workspace(void*, int64_t) override {}

  void copy_to_device(void* target, const void* host, int64_t bytes) override { copy(target, host, bytes); }
  void copy_to_host(void* host, const void* source, int64_t bytes) override { copy(host, source, bytes); }
  std::unique_ptr<HostRead> copy_to_host_later(const void* source, int64_t bytes) override {
    return std::make_unique<CpuRead>(source, bytes);
  }
  void copy(void* target, const void* source, int64_t bytes) override {
    if (bytes > 0) std::memcpy(target, source, static_cast<size_t>(bytes));
  }
  void fill_zero(void* target, int64_t bytes) override {
    if (bytes > 0) std::memset(target, 0, static_cast<size_t>(bytes));
  }
  std::unique_ptr<HostStream> make_host_stream(size_t) override { return std::make_unique<CpuStream>(); }
  std::unique_ptr<StagingBuffer> make_staging_buffer(int64_t bytes) override {
    return std::make_unique<CpuStaging>(bytes);
  }
  void replay(std::unique_ptr<Recording>&, const std::function<void()>& work) override { work(); }
  std::unique_ptr<Mark> mark() override { return std::make_unique<CpuMark>(); }
  void synchronize() override {}
  MemoryUse memory_use() const override { return {}; }
  void start_op_timer() override {
    timer_.times.clear();
    op_timer_ = &timer_;
  }
  std::vector<OpTime> stop_op_timer() override {
    op_timer_ = nullptr;
    return std::move(timer_.times);
  }

 private:
  CpuOpTimer timer_;
};

}  // namespace

std::unique_ptr<Device> make_cpu_device() { return std::make_unique<CpuDevice>(); }

}  // namespace parka
