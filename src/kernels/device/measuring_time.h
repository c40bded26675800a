#pragma once
#include <vector>

namespace parka {

// Something to choose by measuring, such as the algorithm of a product.
struct Measured {
  double step_seconds = 0;    // that it takes of a step; above 0
  double wanted_seconds = 0;  // of measuring; more does not help
};

// The seconds of measuring that each gets of `seconds` together, at most those that it wants. A choice errs by some
// part of its time in a step, which falls as the square root of the time that it is measured for. So the sum of
// what all err is least where that time goes as step_seconds^(2/3).
std::vector<double> divide_measuring(const std::vector<Measured>& all, double seconds);

class Device;

// Bytes read and written per second by large copies of random data on the device: the ceiling of memory.
double measure_copy_bandwidth(Device& device);

}  // namespace parka
