// Tensors in host memory that a device takes like its own.
#include <algorithm>
#include <string>
#include <vector>

#include "core/philox.h"
#include "kernels/device/arena.h"
#include "kernels/ops/elementwise/bit_hash.h"
#include "tests/support/catch.h"
#include "tests/support/tensors.h"

using namespace parka;
using namespace parka::test;

namespace {

// A tensor on the device, and two in host memory.
struct HostMemoryPlan {
  HostMemoryPlan() { plan.finish(); }

  MemoryPlan plan;
  TensorId on_device = plan.add("a", "on the device", DType::kU8, {4001});
  TensorId on_host = plan.add("a", "in host memory", DType::kU8, {4001}, kAllPhases, MemoryPlace::kHost);
  TensorId behind = plan.add("a", "behind it", DType::kU8, {300}, kAllPhases, MemoryPlace::kHost);
};

std::vector<std::byte> bytes_of(Device& device, const TensorView& x) {
  std::vector<std::byte> bytes(static_cast<size_t>(x.bytes()));
  device.copy_to_host(bytes.data(), x.data, x.bytes());
  return bytes;
}

uint64_t hash_on(Device& device, const TensorView& x) {
  const TestTensor hash(device, DType::kU8, {kHashWordBytes});
  device.fill_zero(hash.view().data, kHashWordBytes);
  bit_hash(device, {x, hash, 0});
  uint64_t value = 0;
  device.copy_to_host(&value, hash.view().data, kHashWordBytes);
  return value;
}

}  // namespace

TEST_CASE("an arena has zeros at the place of each tensor, in host memory too", "[kernels][host_memory]") {
  const HostMemoryPlan tensors;
  for (Device* device : devices()) {
    const Arena arena(*device, tensors.plan);
    for (const TensorId id : {tensors.on_device, tensors.on_host, tensors.behind}) {
      const std::vector<std::byte> bytes = bytes_of(*device, arena[id]);
      CHECK(std::count(bytes.begin(), bytes.end(), std::byte{0}) == std::ssize(bytes));
    }
    CHECK(static_cast<std::byte*>(arena[tensors.behind].data) ==
          static_cast<std::byte*>(arena[tensors.on_host].data) + 4096);
  }
}

TEST_CASE("host memory that is not there is refused with its size", "[kernels][host_memory][devices]") {
  if (gpu() == nullptr) return;
  constexpr int64_t kMoreThanThereAreAddresses = int64_t{1} << 50;
  try {
    gpu()->allocate_host(kMoreThanThereAreAddresses);
    FAIL("a pebibyte of host memory");
  } catch (const Error& error) {
    CHECK(error.code() == ExitCode::kBadInput);
    CHECK(std::string(error.what()).find("1048576.00 GiB") != std::string::npos);
  }
}

TEST_CASE("copies and ops take a tensor in host memory like one on the device", "[kernels][host_memory]") {
  const HostMemoryPlan tensors;
  std::vector<std::byte> values(4001);
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<std::byte>(philox4x32(1, 1, i)[0]);
  const auto bytes = std::ssize(values);
  for (Device* device : devices()) {
    const Arena arena(*device, tensors.plan);
    const TensorView on_device = arena[tensors.on_device], on_host = arena[tensors.on_host];
    device->copy_to_device(on_host.data, values.data(), bytes);
    CHECK(bytes_of(*device, on_host) == values);
    device->copy(on_device.data, on_host.data, bytes);
    CHECK(bytes_of(*device, on_device) == values);
    CHECK(hash_on(*device, on_host) == hash_on(*device, on_device));
    device->fill_zero(on_device.data, bytes);
    device->copy(on_host.data, on_device.data, 1);
    const auto read = device->copy_to_host_later(on_host.data, bytes);
    const auto* const now = static_cast<const std::byte*>(read->wait());
    CHECK(now[0] == std::byte{0});
    CHECK(std::equal(now + 1, now + bytes, values.begin() + 1));
    const std::vector<std::byte> neighbour = bytes_of(*device, arena[tensors.behind]);
    CHECK(std::count(neighbour.begin(), neighbour.end(), std::byte{0}) == 300);
  }
}
