#pragma once
#include <string>
#include <utility>

#include "tests/support/forwarding_device.h"

namespace parka::test {

// A CPU that is sold under another name.
class NamedDevice : public ForwardingDevice {
 public:
  explicit NamedDevice(std::string name) : name_(std::move(name)) {}
  std::string name() const override { return name_; }

 private:
  std::string name_;
};

}  // namespace parka::test
