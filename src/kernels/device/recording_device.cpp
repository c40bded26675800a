#include "kernels/device/recording_device.h"

#include <algorithm>
#include <cstring>
#include <span>
#include <utility>

#include "core/error.h"

namespace parka {
namespace {

class ZeroRead final : public HostRead {
 public:
  explicit ZeroRead(int64_t bytes) : bytes_(static_cast<size_t>(bytes)) {}
  bool ready() const override { return true; }
  const void* wait() override { return bytes_.data(); }

 private:
  std::vector<std::byte> bytes_;
};

class RecordingStream final : public HostStream {
 public:
  explicit RecordingStream(const std::function<void(RecordedTransfer)>& listener) : listener_(listener) {}
  void follow_device() override { tell({.kind = Kind::kFollowDevice}); }
  void load(size_t slot, const std::vector<Copy>& copies) override { tell({Kind::kLoad, slot, total(copies)}); }
  void wait_loaded(size_t slot) override { tell({.kind = Kind::kWaitLoaded, .slot = slot}); }
  void save(const std::vector<Copy>& copies, size_t) override {
    tell({.kind = Kind::kSave, .bytes = total(copies)});
  }
  void wait_saved(size_t) override { tell({.kind = Kind::kWaitSaved}); }

 private:
  using Kind = RecordedTransfer::Kind;

  static int64_t total(const std::vector<Copy>& copies) {
    int64_t bytes = 0;
    for (const Copy& copy : copies) bytes += copy.bytes;
    return bytes;
  }
  void tell(const RecordedTransfer& transfer) const {
    if (listener_) listener_(transfer);
  }

  const std::function<void(RecordedTransfer)>& listener_;
};

class ZeroStaging final : public StagingBuffer {
 public:
  const std::string& failure() override { return failure_; }
  void begin(const std::vector<TensorView>& tensors) override {
    sizes_.clear();
    for (const TensorView& tensor : tensors) sizes_.push_back(static_cast<size_t>(tensor.bytes()));
    zeros_.resize(sizes_.empty() ? 0 : *std::ranges::max_element(sizes_));
  }
  void order_after(size_t) override {}
  std::span<const std::byte> wait(size_t index) override { return {zeros_.data(), sizes_.at(index)}; }

 private:
  std::string failure_;
  std::vector<size_t> sizes_;
  std::vector<std::byte> zeros_;
};

class NoMark final : public Mark {
 public:
  double seconds_since(const Mark&) const override { return 0; }
};

}  // namespace

RecordingDevice::RecordingDevice(DeviceKind kind, Listener listener, std::set<std::string> fused_ops)
    : kind_(kind), listener_(std::move(listener)), fused_ops_(std::move(fused_ops)) {
  op_recorder_ = this;
}

void* RecordingDevice::allocate(int64_t bytes) {
  constexpr int64_t kAlignment = 256, kLast = int64_t{1} << 62;
  if (bytes > kLast - kAlignment - next_address_) {
    throw_bad_input("{:.2f} GiB are more than there are addresses for: plan a smaller model",
                    static_cast<double>(bytes) / 0x1p30);
  }
  const int64_t address = next_address_;
  next_address_ += (bytes / kAlignment + 1) * kAlignment;
  return reinterpret_cast<void*>(address);  // NOLINT(performance-no-int-to-ptr): of nothing
}

void RecordingDevice::set_workspace(void*, int64_t bytes) { given_workspace_ = bytes; }

void RecordingDevice::copy_to_host(void* host, const void*, int64_t bytes) {
  if (bytes > 0) std::memset(host, 0, static_cast<size_t>(bytes));
}

std::unique_ptr<HostRead> RecordingDevice::copy_to_host_later(const void*, int64_t bytes) {
  return std::make_unique<ZeroRead>(bytes);
}

void RecordingDevice::fill_zero(void*, int64_t bytes) {
  if (listener_.fill) listener_.fill({bytes});
}

std::unique_ptr<HostStream> RecordingDevice::make_host_stream(size_t) {
  return std::make_unique<RecordingStream>(listener_.transfer);
}

std::unique_ptr<StagingBuffer> RecordingDevice::make_staging_buffer(int64_t) {
  return std::make_unique<ZeroStaging>();
}

std::unique_ptr<Mark> RecordingDevice::mark() { return std::make_unique<NoMark>(); }

void RecordingDevice::start_op_timer() { throw_internal("a device that records has no times of ops"); }

std::vector<OpTime> RecordingDevice::stop_op_timer() {
  throw_internal("a device that records has no times of ops");
}

void RecordingDevice::record_product(const Gemm& a) {
  if (listener_.product) listener_.product(a);
}

void RecordingDevice::record(std::string_view op, OpCost cost, int64_t workspace_bytes) {
  if (given_workspace_ >= 0 && workspace_bytes > given_workspace_) {
    throw_internal("{}: needs {} bytes of workspace, the device was given {}", op, workspace_bytes,
                   given_workspace_);
  }
  most_workspace_ = std::max(most_workspace_, workspace_bytes);
  if (listener_.op) listener_.op({section_, std::string(op), std::move(cost), workspace_bytes});
}

}  // namespace parka
