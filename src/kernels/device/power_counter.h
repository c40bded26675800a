#pragma once
#include <chrono>
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
  // The moment, in seconds of a clock that only goes on: samples are taken by it. Tests have their own.
  virtual double seconds() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  }
};

struct PowerSource {
  std::unique_ptr<PowerCounter> counter;  // null: there is none...
  std::string missing;                    // ... for this reason
};
// The counters of a device.
PowerSource find_power_counter(const Device& device);

}  // namespace parka
