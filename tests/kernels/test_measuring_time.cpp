#include "kernels/device/measuring_time.h"

#include <cmath>
#include <limits>
#include <vector>

#include "tests/support/catch.h"

using namespace parka;

namespace {

constexpr double kNoEnd = std::numeric_limits<double>::infinity();

// What all choices err together, up to a factor.
double error_of(const std::vector<Measured>& all, const std::vector<double>& given) {
  double error = 0;
  for (size_t i = 0; i < all.size(); ++i) error += all[i].step_seconds / std::sqrt(given[i]);
  return error;
}

bool near(double a, double b) { return std::abs(a - b) <= 1e-12 * std::abs(b); }

}  // namespace

TEST_CASE("measuring is divided so that choices err least together", "[tuning]") {
  const std::vector<Measured> all = {{8, kNoEnd}, {1, kNoEnd}, {0.125, kNoEnd}, {1, kNoEnd}};
  const std::vector<double> given = divide_measuring(all, 12.5);
  // 4, 1, 1/4 and 1 of 6 1/4.
  CHECK(near(given[0], 8));
  CHECK(near(given[1], 2));
  CHECK(near(given[2], 0.5));
  CHECK(near(given[3], 2));
  const double least = error_of(all, given);
  for (size_t from = 0; from < all.size(); ++from) {
    for (size_t to = 0; to < all.size(); ++to) {
      if (from == to) continue;
      std::vector<double> other = given;
      other[from] -= 0.01;
      other[to] += 0.01;
      CHECK(error_of(all, other) > least);
    }
  }
}

TEST_CASE("what one does not want the others get", "[tuning]") {
  // Of 12.5 the first would get 8 and wants 3, the last gets the 2 that it wants; the 7.5 left are divided 4 to 1.
  const std::vector<double> given = divide_measuring({{8, 3}, {1, 100}, {0.125, 100}, {1, 2}}, 12.5);
  CHECK(given[0] == 3);
  CHECK(near(given[1], 6));
  CHECK(near(given[2], 1.5));
  CHECK(given[3] == 2);
  // Enough for all.
  CHECK(divide_measuring({{8, 3}, {1, 1}}, 4) == std::vector<double>{3, 1});
  CHECK(divide_measuring({{8, 3}, {1, 1}}, 100) == std::vector<double>{3, 1});
  // Nothing to divide, or nobody to divide it among.
  CHECK(divide_measuring({{8, 3}, {1, 1}}, 0) == std::vector<double>{0, 0});
  CHECK(divide_measuring({}, 5).empty());
}
