#pragma once

namespace parka {
class Device;

// Bytes read and written per second by copies within the device that are far larger than any cache, of random data:
// the ceiling of what is bound by memory.
double measure_copy_bandwidth(Device& device);

}  // namespace parka
