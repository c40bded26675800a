#pragma once
#include <memory>
#include <optional>
#include <string>

namespace parka {
class Device;

// What a GPU's own counters say; nothing where one cannot be read. For any thread, one at a time.
class PowerCounter {
 public:
  virtual ~PowerCounter() = default;
  virtual std::optional<double> joules() = 0;  // that the card has taken since its driver was loaded, all of it
  virtual std::optional<double> clock() = 0;   // of its multiprocessors, hertz
  virtual std::optional<double> limit() = 0;   // of what it may take, watts
};

struct PowerSource {
  std::unique_ptr<PowerCounter> counter;  // null: there is none...
  std::string missing;                    // ... for this reason
};
// The counters of a device.
PowerSource find_power_counter(const Device& device);

}  // namespace parka
