#include "kernels/device/bit_flip.h"

#include <utility>

#include "core/error.h"
#include "kernels/device/device.h"

namespace parka {

void flip_bit(Device& device, const TensorView& x, int64_t bit) {
  if (bit < 0 || bit / 8 >= x.bytes()) throw_internal("flip_bit: {} has no bit {}", describe(x), bit);
  auto* const byte = static_cast<std::byte*>(x.data) + bit / 8;
  std::byte value{};
  device.copy_to_host(&value, byte, 1);
  value ^= std::byte{1} << (bit % 8);
  device.copy_to_device(byte, &value, 1);
}

BitFlip::BitFlip(std::string op, int64_t n, int64_t bit) : op_(std::move(op)), to_come_(n), bit_(bit) {
  PARKA_REQUIRE(n >= 1 && bit >= 0);
}

void BitFlip::after(Device& device, std::string_view op, const TensorView& output) {
  if (is_done() || op != op_ || --to_come_ > 0) return;
  flip_bit(device, output, bit_ % (8 * output.bytes()));
}

}  // namespace parka
