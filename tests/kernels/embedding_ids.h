#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "core/philox.h"
#include "kernels/ops/elementwise/embedding.h"

// Token ids that tests of the embedding have in common, as the values of a TestTensor.
namespace parka::test {

struct TokenIds {
  std::string name;
  std::vector<float> ids;
  int64_t V;
};

// Tokens 0, 3, 6, ... of as many rows as `counts` says, in any order.
inline TokenIds ids_of_counts(const std::string& name, const std::vector<int64_t>& counts, uint64_t seed) {
  TokenIds t{name, {}, 3 * static_cast<int64_t>(counts.size()) + 1};
  for (size_t n = 0; n < counts.size(); ++n) t.ids.insert(t.ids.end(), counts[n], 3.0f * static_cast<float>(n));
  for (size_t i = t.ids.size(); i > 1; --i) std::swap(t.ids[i - 1], t.ids[philox4x32(seed, 2, i)[0] % i]);
  return t;
}

// Ids by Zipf's law, as those of text are: about as many rows have an id below 10 as one between 10 and 100.
inline TokenIds zipf_ids(int64_t T, int64_t V, uint64_t seed) {
  TokenIds t{"zipf", {}, V};
  t.ids.reserve(T);
  for (int64_t n = 0; n < T; ++n) {
    const double u = uniform_open(philox4x32(seed, 1, static_cast<uint64_t>(n))[0]);
    t.ids.push_back(std::floor(static_cast<float>(std::pow(static_cast<double>(V), u) - 1.0)));
  }
  return t;
}

// The same with an image slot for every third of some rows in the middle, as many as several pieces have.
inline TokenIds with_image_slots(TokenIds t) {
  for (size_t i = t.ids.size() / 4; i < t.ids.size() * 3 / 4; i += 3) t.ids[i] = static_cast<float>(kImageSlot);
  t.name += " with image slots";
  return t;
}

// Every kind of run that a kernel could treat in a way of its own: none, short ones, ones about as long as a piece
// or two, long ones next to one another.
inline std::vector<TokenIds> ids_of_all_kinds() {
  std::vector<int64_t> mixed;
  for (int64_t n = 0; n < 400; ++n) mixed.push_back(1 + philox4x32(5, 3, static_cast<uint64_t>(n))[0] % 9);
  for (int64_t n = 0; n < 12; ++n) mixed.push_back(60 + philox4x32(6, 3, static_cast<uint64_t>(n))[0] % 80);
  return {zipf_ids(3000, 2000, 1),
          ids_of_counts("one row", {1}, 2),
          ids_of_counts("one token", {1000}, 2),
          ids_of_counts("distinct", std::vector<int64_t>(500, 1), 3),
          ids_of_counts("about a piece", {1, 63, 64, 65, 127, 128, 129, 1000, 65, 65, 65, 2, 1}, 4),
          ids_of_counts("mixed", mixed, 5),
          with_image_slots(zipf_ids(3000, 2000, 9)),
          with_image_slots(ids_of_counts("distinct", std::vector<int64_t>(50, 1), 10)),
          {"image slots alone", std::vector<float>(200, static_cast<float>(kImageSlot)), 7}};
}

// What embedding_order makes of ids, as the values of a tensor [T, kTokenRowInts].
inline std::vector<float> order_of(const std::vector<float>& ids, int64_t V) {
  const std::vector<int32_t> whole(ids.begin(), ids.end());
  std::vector<float> values;
  values.reserve(ids.size() * kTokenRowInts);
  for (const TokenRow& row : embedding_order(whole.data(), static_cast<int64_t>(whole.size()), V)) {
    for (const int32_t number : {row.row, row.id, row.rank, row.count}) {
      values.push_back(static_cast<float>(number));
    }
  }
  return values;
}

}  // namespace parka::test
