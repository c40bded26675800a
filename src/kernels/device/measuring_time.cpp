#include "kernels/device/measuring_time.h"

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "core/philox.h"
#include "kernels/device/device.h"

namespace parka {

std::vector<double> divide_measuring(const std::vector<Measured>& all, double seconds) {
  std::vector<double> given(all.size()), weights(all.size());
  std::vector<bool> is_full(all.size());
  for (size_t i = 0; i < all.size(); ++i) weights[i] = std::pow(all[i].step_seconds, 2.0 / 3);
  // Time that some do not want is divided among the others, of which some may be full then.
  for (bool changed = true; changed;) {
    changed = false;
    double left = seconds, weight = 0;
    for (size_t i = 0; i < all.size(); ++i) {
      left -= is_full[i] ? all[i].wanted_seconds : 0;
      weight += is_full[i] ? 0 : weights[i];
    }
    for (size_t i = 0; i < all.size(); ++i) {
      if (is_full[i]) continue;
      given[i] = left * weights[i] / weight;
      if (given[i] < all[i].wanted_seconds) continue;
      given[i] = all[i].wanted_seconds;
      is_full[i] = changed = true;
    }
  }
  return given;
}

double measure_copy_bandwidth(Device& device) {
  const int64_t bytes = device.kind() == DeviceKind::kCuda ? int64_t{1} << 30 : int64_t{1} << 27;
  constexpr int kWarmups = 3, kCopies = 20;
  std::vector<uint32_t> piece(size_t{1} << 18);
  for (size_t i = 0; i < piece.size(); ++i) piece[i] = philox4x32(1, 2, i)[0];
  const auto piece_bytes = static_cast<int64_t>(piece.size() * sizeof(piece[0]));

  auto* source = static_cast<std::byte*>(device.allocate(bytes));
  void* target = device.allocate(bytes);
  for (int64_t at = 0; at < bytes; at += piece_bytes) device.copy_to_device(source + at, piece.data(), piece_bytes);
  for (int i = 0; i < kWarmups; ++i) device.copy(target, source, bytes);
  const std::unique_ptr<Mark> begin = device.mark();
  for (int i = 0; i < kCopies; ++i) device.copy(target, source, bytes);
  const double seconds = device.mark()->seconds_since(*begin);
  device.release(source);
  device.release(target);
  return 2.0 * static_cast<double>(bytes) * kCopies / seconds;
}

}  // namespace parka
