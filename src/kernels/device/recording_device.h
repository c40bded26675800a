#pragma once
#include <cstdint>
#include <functional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "core/config_fields.h"
#include "kernels/device/device.h"
#include "kernels/device/op_timer.h"

namespace parka {

struct Gemm;

// A device's op_recorder() may also be one, to be told of GEMMs with their tensors, before their ops.
class ProductRecorder {
 public:
  virtual ~ProductRecorder() = default;
  virtual void record_product(const Gemm& a) = 0;
};

// An op, with its checked arguments' cost, as a device was asked for it.
struct RecordedOp {
  StepSection section = StepSection::kNone;
  std::string op;
  OpCost cost = {};
  int64_t workspace_bytes = 0;  // that it takes on a GPU
};

// Memory that was to become zeros.
struct RecordedFill {
  int64_t bytes = 0;
};

// A request to a HostStream.
struct RecordedTransfer {
  enum class Kind : uint8_t { kFollowDevice, kLoad, kWaitLoaded, kSave, kWaitSaved };
  Kind kind = Kind::kFollowDevice;
  size_t slot = 0;    // kLoad and kWaitLoaded
  int64_t bytes = 0;  // kLoad and kSave: of all copies together

  bool operator==(const RecordedTransfer&) const = default;
};

// A device that records instead of computing. Ops check their arguments and are told to a function, with their
// costs and workspaces. Memory is addresses without memory: a model plans in any RAM. Reading from the device gives
// zeros; marks and staging buffers do nothing.
class RecordingDevice final : public Device, public OpRecorder, public ProductRecorder {
 public:
  // Stands for a device of this kind, which has ops of these names as one kernel. The functions are told of work in
  // its order; empty ones are not called.
  struct Listener {
    std::function<void(RecordedOp)> op;
    std::function<void(const Gemm&)> product;  // of gemm(), before `op`
    std::function<void(RecordedFill)> fill;
    std::function<void(RecordedTransfer)> transfer;
  };
  explicit RecordingDevice(DeviceKind kind, Listener listener = {}, std::set<std::string> fused_ops = {});

  DeviceKind kind() const override { return kind_; }
  std::string name() const override { return "recording device"; }
  std::string description() const override { return name(); }
  bool fuses(std::string_view op, int64_t) const override { return fused_ops_.contains(std::string(op)); }

  void* allocate(int64_t bytes) override;
  void release(void*) override {}
  void* allocate_host(int64_t bytes) override { return allocate(bytes); }
  void release_host(void*) override {}

  // From here on an op that takes more throws Error(kInternal) with its name.
  void set_workspace(void* memory, int64_t bytes) override;
  // The most that an op so far takes.
  int64_t workspace_bytes() const { return most_workspace_; }

  void copy_to_device(void*, const void*, int64_t) override {}
  void copy_to_host(void* host, const void* source, int64_t bytes) override;
  std::unique_ptr<HostRead> copy_to_host_later(const void* source, int64_t bytes) override;
  void copy(void*, const void*, int64_t) override {}
  void fill_zero(void* target, int64_t bytes) override;
  std::unique_ptr<HostStream> make_host_stream(size_t num_slots) override;
  std::unique_ptr<StagingBuffer> make_staging_buffer(int64_t bytes) override;
  void replay(std::unique_ptr<Recording>&, const std::function<void()>& work) override { work(); }
  std::unique_ptr<Mark> mark() override;
  void synchronize() override {}
  MemoryUse memory_use() const override { return {}; }
  void start_op_timer() override;
  std::vector<OpTime> stop_op_timer() override;

 private:
  void record(std::string_view op, OpCost cost, int64_t workspace_bytes) override;
  void record_product(const Gemm& a) override;

  DeviceKind kind_;
  Listener listener_;
  std::set<std::string> fused_ops_;
  int64_t next_address_ = int64_t{1} << 55;  // beyond all that a process has
  int64_t most_workspace_ = 0;
  int64_t given_workspace_ = -1;  // not given
};

// Not in op_timer.h, which CUDA sources include: nvcc cannot compile fmt.

template <>
struct EnumNames<StepSection> {
  static constexpr EnumName<StepSection> kAll[] = {
      {StepSection::kNone, ""},
      {StepSection::kEmbedding, "embedding"},
      {StepSection::kBlockForward, "block forward"},
      {StepSection::kHead, "head"},
      {StepSection::kBlockBackward, "block backward"},
      {StepSection::kOptimizer, "optimizer"},
      {StepSection::kTelemetry, "telemetry"},
  };
};

}  // namespace parka
