#pragma once
#include <memory>
#include <string>
#include <vector>

#include "kernels/device/device.h"

namespace parka::test {

// A CPU of which a test replaces a part.
class ForwardingDevice : public Device {
 public:
  DeviceKind kind() const override { return cpu_->kind(); }
  std::string name() const override { return cpu_->name(); }
  std::string description() const override { return cpu_->description(); }
  void* allocate(int64_t bytes) override { return cpu_->allocate(bytes); }
  void release(void* memory) override { cpu_->release(memory); }
  void* allocate_host(int64_t bytes) override { return cpu_->allocate_host(bytes); }
  void release_host(void* memory) override { cpu_->release_host(memory); }
  void set_workspace(void* memory, int64_t bytes) override { cpu_->set_workspace(memory, bytes); }
  void copy_to_device(void* target, const void* host, int64_t bytes) override {
    cpu_->copy_to_device(target, host, bytes);
  }
  void copy_to_host(void* host, const void* source, int64_t bytes) override {
    cpu_->copy_to_host(host, source, bytes);
  }
  std::unique_ptr<HostRead> copy_to_host_later(const void* source, int64_t bytes) override {
    return cpu_->copy_to_host_later(source, bytes);
  }
  void copy(void* target, const void* source, int64_t bytes) override { cpu_->copy(target, source, bytes); }
  void fill_zero(void* target, int64_t bytes) override { cpu_->fill_zero(target, bytes); }
  std::unique_ptr<HostStream> make_host_stream(size_t num_slots) override {
    return cpu_->make_host_stream(num_slots);
  }
  std::unique_ptr<StagingBuffer> make_staging_buffer(int64_t bytes) override {
    return cpu_->make_staging_buffer(bytes);
  }
  void replay(std::unique_ptr<Recording>& recording, const std::function<void()>& work) override {
    cpu_->replay(recording, work);
  }
  std::unique_ptr<Mark> mark() override { return cpu_->mark(); }
  void synchronize() override { cpu_->synchronize(); }
  MemoryUse memory_use() const override { return cpu_->memory_use(); }
  void start_op_timer() override { cpu_->start_op_timer(); }
  std::vector<OpTime> stop_op_timer() override { return cpu_->stop_op_timer(); }

 private:
  std::unique_ptr<Device> cpu_ = make_cpu_device();
};

}  // namespace parka::test
