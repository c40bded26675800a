#include "data/mixture.h"

#include <cmath>

#include "core/error.h"

namespace parka {
namespace {

constexpr int kShift = 62;
__extension__ using Uint128 = unsigned __int128;  // not ISO C++, but known to every compiler of 64-bit targets

// round(take * n); grows by 0 or 1 from one n to the next.
int64_t taken(uint64_t take, int64_t n) {
  const Uint128 product = Uint128{take} * static_cast<uint64_t>(n);
  return static_cast<int64_t>((product + (Uint128{1} << (kShift - 1))) >> kShift);
}

}  // namespace

Mixture::Mixture(const std::vector<double>& weights) : takes_(weights.size()) {
  if (weights.empty()) throw_bad_input("data.weights is empty; give a weight for each entry of data.train");
  double rest = 0;  // of this source and those behind it
  for (size_t i = weights.size(); i-- > 0;) {
    if (!(weights[i] > 0) || !std::isfinite(weights[i])) {
      throw_bad_input("data.weights: {} is not a positive number; remove the sources that you do not want",
                      weights[i]);
    }
    rest += weights[i];
    takes_[i] = static_cast<uint64_t>(std::ldexp(weights[i] / rest, kShift));
  }
}

std::vector<double> Mixture::parts() const {
  std::vector<double> all;
  // Exact: what was rounded down to an integer had the 53 digits of a double.
  for (const uint64_t take : takes_) all.push_back(std::ldexp(static_cast<double>(take), -kShift));
  return all;
}

Mixture::Draw Mixture::at(int64_t n) const {
  PARKA_REQUIRE(n >= 0);
  for (size_t i = 0;; ++i) {
    const int64_t before = taken(takes_[i], n);
    if (taken(takes_[i], n + 1) > before) return {i, before};
    n -= before;
  }
}

std::vector<int64_t> Mixture::counts(int64_t n) const {
  PARKA_REQUIRE(n >= 0);
  std::vector<int64_t> all;
  for (const uint64_t take : takes_) {
    all.push_back(taken(take, n));
    n -= all.back();
  }
  return all;
}

}  // namespace parka
