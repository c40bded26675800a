#pragma once
#include <cstring>
#include <memory>
#include <vector>

#include "tests/support/forwarding_device.h"

namespace parka::test {

// Copies as late as their order allows, as a slow link might make them.
class LateStream final : public HostStream {
 public:
  void follow_device() override {}
  void load(size_t slot, const std::vector<Copy>& copies) override {
    loads_.push_back({slot, copies, saves_.size()});
  }
  void wait_loaded(size_t slot) override {
    size_t end = loads_.size();
    while (end > num_loaded_ && loads_[end - 1].slot != slot) --end;
    for (; num_loaded_ < end; ++num_loaded_) {
      save_until(loads_[num_loaded_].num_saves);
      run(loads_[num_loaded_].copies);
    }
  }
  void save(const std::vector<Copy>& copies, size_t slot) override { saves_.push_back({slot, copies}); }
  void wait_saved(size_t slot) override {
    size_t end = saves_.size();
    while (end > num_saved_ && saves_[end - 1].slot != slot) --end;
    save_until(end);
  }

 private:
  struct Load {
    size_t slot;
    std::vector<Copy> copies;
    size_t num_saves;  // that were queued before it
  };
  struct Save {
    size_t slot;
    std::vector<Copy> copies;
  };
  static void run(const std::vector<Copy>& copies) {
    for (const Copy& copy : copies) std::memcpy(copy.target, copy.source, static_cast<size_t>(copy.bytes));
  }
  void save_until(size_t end) {
    for (; num_saved_ < end; ++num_saved_) run(saves_[num_saved_].copies);
  }

  std::vector<Load> loads_;
  std::vector<Save> saves_;
  size_t num_loaded_ = 0, num_saved_ = 0;
};

// A CPU whose copies to and from host memory are late.
class DeviceWithLateCopies final : public ForwardingDevice {
 public:
  std::unique_ptr<HostStream> make_host_stream(size_t) override { return std::make_unique<LateStream>(); }
};

}  // namespace parka::test
