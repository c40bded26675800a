#include "kernels/device/copy_bandwidth.h"

#include <cstdint>
#include <vector>

#include "core/philox.h"
#include "kernels/device/device.h"

namespace parka {

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
