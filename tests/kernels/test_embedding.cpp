#include <algorithm>
#include <array>
#include <cmath>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "kernels/ops/elementwise/embedding.h"
#include "tests/kernels/embedding_ids.h"
#include "tests/kernels/op_bounds.h"
#include "tests/support/catch.h"

using namespace parka;
using namespace parka::test;

namespace {

struct Shape {
  int64_t T, V, C;
};

std::ostream& operator<<(std::ostream& out, const Shape& s) {
  return out << "T " << s.T << " V " << s.V << " C " << s.C;
}

const std::vector<Shape> kShapes = {{1, 1, 1},      {7, 3, 5},       {64, 2, 33},
                                    {257, 256, 17}, {100, 50304, 3}, {3000, 5, 40}};

// Token ids with a skew like that of text: half of the rows have one of a few ids.
std::vector<float> random_ids(const Shape& s, uint64_t seed) {
  std::vector<float> ids;
  for (int64_t t = 0; t < s.T; ++t) {
    const auto draw = philox4x32(seed, 1, static_cast<uint64_t>(t));
    const int64_t range = draw[0] % 2 == 0 ? s.V : std::min<int64_t>(s.V, 3);
    ids.push_back(static_cast<float>(draw[1] % static_cast<uint64_t>(range)));
  }
  return ids;
}

TEST_CASE("embedding_order sorts rows by id, then by row, and puts unknown ids and image slots last",
          "[kernels][embedding]") {
  using Rows = std::vector<std::array<int32_t, kTokenRowInts>>;
  const auto order = [](const std::vector<int32_t>& ids, int64_t V) {
    Rows rows;
    for (const TokenRow& r : embedding_order(ids.data(), static_cast<int64_t>(ids.size()), V)) {
      rows.push_back({r.row, r.id, r.rank, r.count});
    }
    return rows;
  };
  CHECK(order({}, 3).empty());
  CHECK((order({2, 0, 2, 1, 0, 0}, 4) ==
         Rows{{1, 0, 0, 3}, {4, 0, 1, 3}, {5, 0, 2, 3}, {3, 1, 0, 1}, {0, 2, 0, 2}, {2, 2, 1, 2}}));
  CHECK((order({3, 0, -1, 2, INT32_MAX, 0, INT32_MIN}, 3) == Rows{{1, 0, 0, 2},
                                                                  {5, 0, 1, 2},
                                                                  {3, 2, 0, 1},
                                                                  {0, 3, 0, 4},
                                                                  {2, -1, 1, 4},
                                                                  {4, INT32_MAX, 2, 4},
                                                                  {6, INT32_MIN, 3, 4}}));
  CHECK((order({kImageSlot, 2, 5, kImageSlot, 2}, 3) ==
         Rows{{1, 2, 0, 2}, {4, 2, 1, 2}, {2, 5, 0, 1}, {0, kImageSlot, 0, 2}, {3, kImageSlot, 1, 2}}));
}

TEST_CASE("embedding_forward copies the rows of the table", "[kernels][embedding]") {
  const Shape s = GENERATE(from_range(kShapes));
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  CAPTURE(s, name_of(dtype));
  const std::vector<float> ids = random_ids(s, 1), x = random_values(dtype, s.V * s.C, 2);
  for (Device* device : devices()) {
    TestTensor id(*device, DType::kI32, {s.T}, ids), table(*device, dtype, {s.V, s.C}, x),
        out(*device, dtype, {s.T, s.C});
    embedding_forward(*device, {.ids = id, .table = table, .out = out});
    const std::vector<float> y = out.host();
    int wrong = 0;
    for (int64_t t = 0; t < s.T; ++t) {
      for (int64_t c = 0; c < s.C; ++c) wrong += y[t * s.C + c] != x[static_cast<int64_t>(ids[t]) * s.C + c];
    }
    CHECK(wrong == 0);
    CHECK((out.guard_intact() && table.guard_intact()));
  }
}

// Against sums in the order and the precision that the contract says, bit for bit, and against sums in fp64.
void check_backward(const Shape& s, const std::vector<float>& ids, DType d_out_dtype, DType table_dtype) {
  CAPTURE(s, name_of(d_out_dtype), name_of(table_dtype));
  const std::vector<float> d_y = random_values(d_out_dtype, s.T * s.C, 4);
  const std::vector<float> before = random_values(table_dtype, s.V * s.C, 5);
  for (Device* device : devices()) {
    TestTensor order(*device, DType::kI32, {s.T, kTokenRowInts}, order_of(ids, s.V));
    TestTensor d_out(*device, d_out_dtype, {s.T, s.C}, d_y), d_table(*device, table_dtype, {s.V, s.C}, before);
    embedding_backward(*device, {.order = order, .d_out = d_out, .d_table = d_table});
    const std::vector<float> after = d_table.host();
    std::vector<float> sum(before.size()), piece(before.size());
    std::vector<double> exact(before.begin(), before.end()), magnitude(before.size()), rows(before.size());
    for (int64_t t = 0; t < s.T; ++t) {
      if (ids[t] == kImageSlot) continue;
      for (int64_t c = 0; c < s.C; ++c) {
        const int64_t at = static_cast<int64_t>(ids[t]) * s.C + c;
        piece[at] += d_y[t * s.C + c];
        exact[at] += d_y[t * s.C + c];
        magnitude[at] += std::abs(d_y[t * s.C + c]);
        rows[at] += 1;
        if (static_cast<int64_t>(rows[at]) % kEmbeddingPiece == 0) sum[at] += std::exchange(piece[at], 0.0f);
      }
    }
    int wrong_bits = 0, wrong = 0;
    for (size_t at = 0; at < before.size(); ++at) {
      const float want = before[at] + (sum[at] + piece[at]);
      wrong_bits += after[at] != (table_dtype == DType::kBF16 ? decode_bf16(encode_bf16(want)) : want);
      const double bound = (rows[at] + 1) * 0x1p-24 * (magnitude[at] + std::abs(before[at])) +
                           1.01 * unit_roundoff(table_dtype) * std::abs(exact[at]);
      wrong += !(std::abs(after[at] - exact[at]) <= bound);
    }
    CHECK(wrong_bits == 0);
    CHECK(wrong == 0);
    CHECK((d_table.guard_intact() && d_out.guard_intact()));
  }
}

TEST_CASE("embedding_backward adds the rows of each token in order, once", "[kernels][embedding]") {
  const DType d_out_dtype = GENERATE(DType::kF32, DType::kBF16), table_dtype = GENERATE(DType::kF32, DType::kBF16);
  for (const Shape& s : kShapes) check_backward(s, random_ids(s, 3), d_out_dtype, table_dtype);
  for (const TokenIds& of : ids_of_all_kinds()) {
    CAPTURE(of.name);
    check_backward({static_cast<int64_t>(of.ids.size()), of.V, 5}, of.ids, d_out_dtype, table_dtype);
  }
}

TEST_CASE("embedding multiplies rows and the sums of their gradients by its scale, rounding once",
          "[kernels][embedding]") {
  const Shape s = GENERATE(from_range(kShapes));
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  const float scale = 25.25f;
  CAPTURE(s, name_of(dtype));
  const std::vector<float> ids = random_ids(s, 1), x = random_values(dtype, s.V * s.C, 2);
  const std::vector<float> d_y = random_values(dtype, s.T * s.C, 4);
  const auto rounded = [&](float v) { return dtype == DType::kBF16 ? decode_bf16(encode_bf16(v)) : v; };
  for (Device* device : devices()) {
    TestTensor id(*device, DType::kI32, {s.T}, ids), table(*device, dtype, {s.V, s.C}, x);
    TestTensor order(*device, DType::kI32, {s.T, kTokenRowInts}, order_of(ids, s.V));
    TestTensor out(*device, dtype, {s.T, s.C}), d_out(*device, dtype, {s.T, s.C}, d_y);
    embedding_forward(*device, {.ids = id, .table = table, .out = out, .scale = scale});
    const std::vector<float> y = out.host();
    int wrong = 0;
    for (int64_t t = 0; t < s.T; ++t) {
      for (int64_t c = 0; c < s.C; ++c) {
        wrong += y[t * s.C + c] != rounded(x[static_cast<int64_t>(ids[t]) * s.C + c] * scale);
      }
    }
    CHECK(wrong == 0);

    // The sum alone, in fp32, is that of a table of zeros without a scale.
    const std::vector<float> zeros(static_cast<size_t>(s.V * s.C));
    TestTensor sums(*device, DType::kF32, {s.V, s.C}, zeros);
    embedding_backward(*device, {.order = order, .d_out = d_out, .d_table = sums});
    embedding_backward(*device, {.order = order, .d_out = d_out, .d_table = table, .scale = scale});
    const std::vector<float> sum = sums.host(), got = table.host();
    for (size_t i = 0; i < got.size(); ++i) wrong += got[i] != rounded(x[i] + sum[i] * scale);
    CHECK(wrong == 0);
    CHECK((table.guard_intact() && out.guard_intact()));
  }
}

TEST_CASE("embedding_backward is the transpose of embedding_forward", "[kernels][embedding]") {
  // Whole numbers, so that sum d_out * forward(table) = sum backward(d_out) * table holds exactly.
  const Shape s{53, 11, 7};
  const float scale = GENERATE(1.0f, 3.0f);
  const auto whole = [](int64_t count, uint64_t seed) {
    std::vector<float> values = random_normal(count, seed, 4.0f);
    for (float& v : values) v = std::round(v);
    return values;
  };
  const std::vector<float> x = whole(s.V * s.C, 1), d_y = whole(s.T * s.C, 2);
  const std::vector<float> ids = random_ids(s, 6);
  for (Device* device : devices()) {
    TestTensor id(*device, DType::kI32, {s.T}, ids);
    TestTensor order(*device, DType::kI32, {s.T, kTokenRowInts}, order_of(ids, s.V));
    TestTensor table(*device, DType::kF32, {s.V, s.C}, x);
    TestTensor out(*device, DType::kF32, {s.T, s.C}), d_out(*device, DType::kF32, {s.T, s.C}, d_y);
    TestTensor d_table(*device, DType::kF32, {s.V, s.C}, std::vector<float>(x.size()));
    embedding_forward(*device, {.ids = id, .table = table, .out = out, .scale = scale});
    embedding_backward(*device, {.order = order, .d_out = d_out, .d_table = d_table, .scale = scale});
    const std::vector<float> y = out.host(), d_x = d_table.host();
    double forward = 0, backward = 0;
    for (size_t i = 0; i < y.size(); ++i) forward += double{y[i]} * d_y[i];
    for (size_t i = 0; i < x.size(); ++i) backward += double{d_x[i]} * x[i];
    CHECK(forward == backward);
    CHECK(forward != 0);
  }
}

TEST_CASE("embedding refuses an id outside the table", "[kernels][embedding]") {
  const int bad = GENERATE(-1, 5, 1 << 20, -100);
  Device& device = *devices()[0];
  const std::vector<float> some_bad = {0, 4, static_cast<float>(bad), 1};
  TestTensor ids(device, DType::kI32, {4}, some_bad);
  TestTensor order(device, DType::kI32, {4, kTokenRowInts}, order_of(some_bad, 5));
  const std::vector<float> zeros(10, 0.0f);
  TestTensor table(device, DType::kF32, {5, 2}, zeros),
      out(device, DType::kF32, {4, 2}, std::vector<float>(8, 1.0f));
  const std::string forward = bad_input_error([&] { embedding_forward(device, {ids, table, out}); });
  const std::string backward = bad_input_error([&] { embedding_backward(device, {order, out, table}); });
  const std::string where = "row 2 has token id " + std::to_string(bad);
  CHECK(contains(forward, "embedding_forward: " + where));
  CHECK(contains(backward, "embedding_backward: " + where));
  CHECK(table.host() == zeros);
}

TEST_CASE("embedding keeps a NaN to its token", "[kernels][embedding]") {
  for (Device* device : devices()) {
    TestTensor order(*device, DType::kI32, {3, kTokenRowInts}, order_of({2, 0, 2}, 3));
    TestTensor table(*device, DType::kF32, {3, 1}, {1, 2, 3}),
        d_out(*device, DType::kF32, {3, 1}, {1, 2, std::nanf("")});
    embedding_backward(*device, {.order = order, .d_out = d_out, .d_table = table});
    const std::vector<float> after = table.host();
    CHECK((after[0] == 3.0f && after[1] == 2.0f && std::isnan(after[2])));
  }
}

TEST_CASE("embedding_backward gives the same bits on any number of threads", "[kernels][embedding]") {
  const Shape s{500, 61, 9};
  Device& device = *devices()[0];
  TestTensor order(device, DType::kI32, {s.T, kTokenRowInts}, order_of(random_ids(s, 7), s.V));
  TestTensor d_out(device, DType::kF32, {s.T, s.C}, random_normal(s.T * s.C, 8));
  CHECK(same_on_one_thread([&] {
    TestTensor d_table(device, DType::kF32, {s.V, s.C}, std::vector<float>(static_cast<size_t>(s.V * s.C)));
    embedding_backward(device, {order, d_out, d_table});
    return d_table.bytes();
  }));
}

TEST_CASE("embedding accepts no rows and refuses wrong arguments", "[kernels][embedding]") {
  Device& device = *devices()[0];
  const std::vector<float> id = {0, 1, 2, 0}, right = order_of(id, 5);
  TestTensor ids(device, DType::kI32, {4}, id), order(device, DType::kI32, {4, kTokenRowInts}, right);
  TestTensor table(device, DType::kF32, {5, 2}), out(device, DType::kF32, {4, 2});
  TestTensor no_ids(device, DType::kI32, {0}), no_order(device, DType::kI32, {0, kTokenRowInts}),
      no_rows(device, DType::kF32, {0, 2}), half(device, DType::kBF16, {4, 2});
  const auto forward = [&](const TensorView& i, const TensorView& x, const TensorView& y) {
    return internal_error([&] { embedding_forward(device, {i, x, y}); });
  };
  const auto backward = [&](const TensorView& o, const TensorView& d_y, const TensorView& d_x) {
    return internal_error([&] { embedding_backward(device, {o, d_y, d_x}); });
  };
  embedding_forward(device, {no_ids, table, no_rows});
  embedding_backward(device, {no_order, no_rows, table});
  CHECK((table.guard_intact() && no_rows.guard_intact()));
  CHECK(contains(forward(out, table, out), "embedding_forward: ids"));
  CHECK(contains(forward(ids, ids, out), "embedding_forward: table"));
  CHECK(contains(forward(ids, table, half), "embedding_forward: out"));
  CHECK(contains(forward(ids, table, out.view().rows(0, 3)), "embedding_forward: out"));
  CHECK(contains(backward(ids, out, table), "embedding_backward: order"));
  CHECK(contains(backward(order.view().rows(0, 3), out, table), "embedding_backward: order"));
  CHECK(contains(backward(order, TensorView(out.view().data, DType::kI32, {4, 2}), table),
                 "embedding_backward: d_out"));
  CHECK(contains(backward(order, out, TensorView(table.view().data, DType::kI32, {5, 2})),
                 "embedding_backward: d_table"));
  // With one number of the order larger by one it is not that of any ids.
  for (size_t at = 0; at < right.size(); ++at) {
    if (at == right.size() - kTokenRowInts + 1) continue;  // except for the id of the last row
    CAPTURE(at);
    std::vector<float> wrong = right;
    wrong[at] += 1;
    CHECK(!backward(TestTensor(device, DType::kI32, {4, kTokenRowInts}, wrong), out, table).empty());
  }
}

TEST_CASE("embedding_forward leaves the rows of image slots as they are", "[kernels][embedding]") {
  const float slot = kImageSlot;
  for (Device* device : devices()) {
    for (const float scale : {1.0f, 3.0f}) {
      for (const int64_t C : {1, 8}) {
        const TestTensor ids(*device, DType::kI32, {4}, {slot, 1, slot, 0});
        std::vector<float> rows(static_cast<size_t>(2 * C)), want(static_cast<size_t>(4 * C), 7.0f);
        for (int64_t i = 0; i < 2 * C; ++i) rows[i] = static_cast<float>(i);
        for (int64_t c = 0; c < C; ++c) want[C + c] = scale * rows[C + c], want[3 * C + c] = scale * rows[c];
        const TestTensor table(*device, DType::kBF16, {2, C}, rows);
        const TestTensor out(*device, DType::kBF16, {4, C}, std::vector<float>(want.size(), 7.0f));
        embedding_forward(*device, {.ids = ids, .table = table, .out = out, .scale = scale});
        CAPTURE(device->name(), scale, C);
        CHECK((out.host() == want));
      }
    }
  }
}

TEST_CASE("embedding_backward does not read the gradients of image slots", "[kernels][embedding]") {
  // NaN in every one of them, which a sum would show.
  const TokenIds of = with_image_slots(zipf_ids(600, 50, 11));
  const auto T = static_cast<int64_t>(of.ids.size());
  std::vector<float> d_y = random_bf16(T * 8, 12), zeros(static_cast<size_t>(of.V * 8));
  for (int64_t i = 0; i < T * 8; ++i) {
    if (of.ids[i / 8] == kImageSlot) d_y[i] = std::nanf("");
  }
  for (Device* device : devices()) {
    const TestTensor order(*device, DType::kI32, {T, kTokenRowInts}, order_of(of.ids, of.V));
    const TestTensor d_out(*device, DType::kBF16, {T, 8}, d_y), d_table(*device, DType::kF32, {of.V, 8}, zeros);
    embedding_backward(*device, {.order = order, .d_out = d_out, .d_table = d_table});
    int wrong = 0;
    double magnitude = 0;
    for (const float x : d_table.host()) wrong += !std::isfinite(x), magnitude += std::abs(x);
    CHECK(wrong == 0);
    CHECK(magnitude > 0);
    CHECK(d_table.guard_intact());
  }
}

TEST_CASE("scatter_rows puts features at their positions, and gather_rows takes them from there",
          "[kernels][embedding]") {
  for (Device* device : devices()) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      for (uint64_t n = 0; n < 12; ++n) {
        const auto draw = philox4x32(91, 1, n);
        const int64_t T = 1 + draw[0] % 300, C = n % 2 == 0 ? 1 + draw[1] % 70 : 8 * (1 + draw[1] % 300);
        // A part of the rows in any order, and features without a row.
        std::vector<float> positions;
        for (int64_t t = 0; t < T; ++t)
          positions.push_back(t % 3 == 0 ? -1 - static_cast<float>(t) : static_cast<float>(t));
        for (size_t i = positions.size(); i > 1; --i)
          std::swap(positions[i - 1], positions[philox4x32(n, 2, i)[0] % i]);
        const int64_t N = 1 + draw[2] % T;
        positions.resize(static_cast<size_t>(N));
        const std::vector<float> values = random_values(dtype, N * C, 92), before = random_values(dtype, T * C, 93);
        std::vector<float> want = before, want_back(values.size());
        for (int64_t i = 0; i < N * C; ++i) {
          const float position = positions[i / C];
          if (position < 0) continue;
          want[static_cast<int64_t>(position) * C + i % C] = values[i];
          want_back[i] = values[i];
        }
        const TestTensor at(*device, DType::kI32, {N}, positions), x(*device, dtype, {N, C}, values),
            out(*device, dtype, {T, C}, before), back(*device, dtype, {N, C});
        scatter_rows(*device, {.positions = at, .x = x, .out = out});
        gather_rows(*device, {.positions = at, .x = out, .out = back});
        CAPTURE(device->name(), name_of(dtype), T, N, C);
        CHECK((out.host() == want));
        CHECK((back.host() == want_back));
        CHECK((x.guard_intact() && out.guard_intact() && back.guard_intact()));
      }
    }
  }
}

TEST_CASE("scatter_rows and gather_rows take no features, and refuse wrong arguments", "[kernels][embedding]") {
  for (Device* device : devices()) {
    const TestTensor at(*device, DType::kI32, {0}), none(*device, DType::kF32, {0, 2}),
        x(*device, DType::kF32, {3, 2}, {1, 2, 3, 4, 5, 6});
    scatter_rows(*device, {.positions = at, .x = none, .out = x});
    gather_rows(*device, {.positions = at, .x = x, .out = none});
    CHECK((x.host() == std::vector<float>{1, 2, 3, 4, 5, 6}));
  }
  Device& device = cpu_device();
  const TestTensor at(device, DType::kI32, {2}, {0, 2}), beyond(device, DType::kI32, {2}, {0, 3}),
      twice(device, DType::kI32, {2}, {1, 1}), rows(device, DType::kF32, {3, 2}), x(device, DType::kF32, {2, 2}),
      half(device, DType::kBF16, {2, 2});
  const auto scatter = [&](const TensorView& positions, const TensorView& from) {
    return [&, positions, from] { scatter_rows(device, {.positions = positions, .x = from, .out = rows}); };
  };
  const auto gather = [&](const TensorView& positions, const TensorView& to) {
    return [&, positions, to] { gather_rows(device, {.positions = positions, .x = rows, .out = to}); };
  };
  CHECK(contains(internal_error(scatter(x, x)), "scatter_rows: positions is fp32"));
  CHECK(contains(internal_error(scatter(at, half)), "scatter_rows: out is fp32"));
  CHECK(contains(internal_error(gather(at, half)), "gather_rows: out is bf16"));
  CHECK(contains(internal_error(gather(at, rows)), "gather_rows: positions is int32 [2], wanted shape [3]"));
  CHECK(contains(bad_input_error(scatter(beyond, x)),
                 "scatter_rows: feature 1 has position 3, and there are 3 rows"));
  CHECK(contains(bad_input_error(scatter(twice, x)), "scatter_rows: feature 1 has position 1, as another has"));
  CHECK(
      contains(bad_input_error(gather(beyond, x)), "gather_rows: feature 1 has position 3, and there are 3 rows"));
}

}  // namespace
