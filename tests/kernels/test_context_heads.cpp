#include "kernels/ops/attention/attention.h"

#include <vector>

#include "core/philox.h"
#include "tests/kernels/op_bounds.h"
#include "tests/support/catch.h"

using namespace parka;
using namespace parka::test;

namespace {

struct Size {
  int64_t sequences, parts, length, heads, kv_heads, head_dim;
  int64_t rows() const { return sequences * length; }
  int64_t cols() const { return (heads + 2 * kv_heads) * head_dim; }
};

// Wide copies and elements one by one, one part, query heads alone, and random ones.
std::vector<Size> sizes() {
  std::vector<Size> all = {{1, 1, 1, 1, 0, 1},    {1, 2, 3, 2, 2, 8},  {2, 2, 5, 4, 2, 64}, {3, 4, 7, 8, 4, 32},
                           {1, 2, 9, 32, 8, 128}, {2, 3, 4, 6, 0, 16}, {2, 8, 3, 16, 8, 5}};
  for (uint64_t i = 0; i < 12; ++i) {
    const auto draw = philox4x32(91, 1, i), more = philox4x32(91, 2, i);
    const int64_t parts = 1 + draw[0] % 5, kv_heads = parts * (draw[1] % 3);
    const int64_t per_group = 1 + draw[2] % 3;
    all.push_back({1 + more[0] % 3, parts, 1 + more[1] % 40,
                   kv_heads > 0 ? kv_heads * per_group : parts * per_group, kv_heads, 1 + draw[3] % 70});
  }
  return all;
}

// Where element [b, p, l, i] of the parts is in x, as the header says it, head by head.
int64_t place_in_x(const Size& s, int64_t b, int64_t p, int64_t l, int64_t i) {
  const int64_t D = s.head_dim, queries = s.heads / s.parts, keys = s.kv_heads / s.parts;
  const int64_t head = i / D;
  int64_t of_x = p * queries + head;
  if (head >= queries) of_x = s.heads + p * keys + head - queries;
  if (head >= queries + keys) of_x = s.heads + s.kv_heads + p * keys + head - queries - keys;
  return (b * s.length + l) * s.cols() + of_x * D + i % D;
}

}  // namespace

TEST_CASE("split_heads gives each part its heads, and merge_heads puts them back", "[kernels][context]") {
  for (Device* device : devices()) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      for (const Size& s : sizes()) {
        const int64_t w = s.cols() / s.parts;
        const std::vector<float> values = random_values(dtype, s.rows() * s.cols(), 1);
        std::vector<float> want(values.size());
        for (int64_t b = 0, at = 0; b < s.sequences; ++b) {
          for (int64_t p = 0; p < s.parts; ++p) {
            for (int64_t l = 0; l < s.length; ++l) {
              for (int64_t i = 0; i < w; ++i) want[at++] = values[place_in_x(s, b, p, l, i)];
            }
          }
        }
        const TestTensor x(*device, dtype, {s.rows(), s.cols()}, values),
            parts(*device, dtype, {s.sequences, s.parts, s.length, w}),
            merged(*device, dtype, {s.rows(), s.cols()});
        split_heads(*device, {.x = x, .parts = parts, .num_heads = s.heads, .num_kv_heads = s.kv_heads});
        merge_heads(*device, {.parts = parts, .x = merged, .num_heads = s.heads, .num_kv_heads = s.kv_heads});
        CAPTURE(device->name(), name_of(dtype), s.sequences, s.parts, s.length, s.heads, s.kv_heads, s.head_dim);
        CHECK((parts.host() == want));
        CHECK((merged.host() == values));
        CHECK((x.host() == values && x.guard_intact() && parts.guard_intact() && merged.guard_intact()));
      }
    }
  }
}

TEST_CASE("split_heads and merge_heads take any address, and do nothing for no rows", "[kernels][context]") {
  for (Device* device : devices()) {
    const std::vector<float> values = random_values(DType::kBF16, 1 + 6 * 32, 3);
    const TestTensor all(*device, DType::kBF16, {1 + 6 * 32}, values), parts(*device, DType::kBF16, {1, 2, 6, 16}),
        back(*device, DType::kBF16, {1 + 6 * 32}), none(*device, DType::kBF16, {0, 32}),
        no_parts(*device, DType::kBF16, {1, 2, 0, 16});
    const auto behind_first = [](const TestTensor& t) { return t.view().rows(1, 6 * 32).reshaped({6, 32}); };
    split_heads(*device, {.x = behind_first(all), .parts = parts, .num_heads = 4, .num_kv_heads = 0});
    merge_heads(*device, {.parts = parts, .x = behind_first(back), .num_heads = 4, .num_kv_heads = 0});
    const std::vector<float> got = back.host();
    CHECK((std::vector<float>(got.begin() + 1, got.end()) == std::vector<float>(values.begin() + 1, values.end())));
    CHECK(back.guard_intact());
    split_heads(*device, {.x = none, .parts = no_parts, .num_heads = 4, .num_kv_heads = 0});
    merge_heads(*device, {.parts = no_parts, .x = none, .num_heads = 4, .num_kv_heads = 0});
  }
}

TEST_CASE("split_heads and merge_heads refuse wrong arguments", "[kernels][context]") {
  Device& device = cpu_device();
  const TestTensor x(device, DType::kF32, {6, 32}), half(device, DType::kBF16, {1, 2, 6, 16}),
      parts(device, DType::kF32, {1, 2, 6, 16}), short_parts(device, DType::kF32, {1, 2, 5, 16});
  const auto split = [&](const TensorView& to, int64_t heads, int64_t kv_heads) {
    return internal_error(
        [&] { split_heads(device, {.x = x, .parts = to, .num_heads = heads, .num_kv_heads = kv_heads}); });
  };
  CHECK(contains(split(half, 4, 2), "split_heads: x is fp32"));
  CHECK(!split(short_parts, 4, 2).empty());
  CHECK(contains(split(parts, 3, 2), "do not divide into 2 parts"));
  CHECK(contains(split(parts, 6, 1), "do not divide into 2 parts"));
  CHECK(contains(split(parts, 6, 4), "do not divide into 2 parts"));  // 32 columns of 14 heads
  CHECK(contains(
      internal_error([&] { merge_heads(device, {.parts = parts, .x = x, .num_heads = 3, .num_kv_heads = 0}); }),
      "merge_heads: 32 columns"));
}
