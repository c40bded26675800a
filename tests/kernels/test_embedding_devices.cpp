#include <memory>
#include <vector>

#include "kernels/ops/elementwise/embedding.h"
#include "tests/kernels/embedding_ids.h"
#include "tests/kernels/op_checks.h"
#include "tests/support/catch.h"

// The embedding on other devices against the CPU, bit for bit. Where there is no other device nothing is run.
using namespace parka;
using namespace parka::test;

namespace {

std::vector<Device*> other_devices() {
  const std::vector<Device*> all = devices();
  return {all.begin() + 1, all.end()};
}

struct Case {
  const TokenIds& of;
  int64_t C;
  DType d_out_dtype, table_dtype;
  int64_t offset = 0;  // of d_out and d_table, in elements: where rows are not aligned
  float scale = 1;
};

// What forward and backward leave on a device.
std::vector<std::byte> run(Device& device, const Case& c, const std::vector<float>& table,
                           const std::vector<float>& d_y) {
  const auto T = static_cast<int64_t>(c.of.ids.size()), V = c.of.V;
  const TestTensor ids(device, DType::kI32, {T}, c.of.ids);
  const TestTensor order(device, DType::kI32, {T, kTokenRowInts}, order_of(c.of.ids, V));
  const TestTensor d_out(device, c.d_out_dtype, {T * c.C + c.offset}, d_y);
  const TestTensor d_table(device, c.table_dtype, {V * c.C + c.offset}, table);
  const TestTensor out(device, c.table_dtype, {T, c.C});
  const auto matrix = [&](const TestTensor& t, int64_t rows) {
    return t.view().rows(c.offset, rows * c.C).reshaped({rows, c.C});
  };
  embedding_forward(device, {.ids = ids, .table = matrix(d_table, V), .out = out, .scale = c.scale});
  std::vector<std::byte> result = out.bytes();
  embedding_backward(device,
                     {.order = order, .d_out = matrix(d_out, T), .d_table = matrix(d_table, V), .scale = c.scale});
  const std::vector<std::byte> sums = d_table.bytes();
  result.insert(result.end(), sums.begin(), sums.end());
  for (const TestTensor* t : {&ids, &order, &d_out, &d_table, &out}) CHECK(t->guard_intact());
  return result;
}

void check_against_cpu(const Case& c) {
  CAPTURE(c.of.name, c.C, name_of(c.d_out_dtype), name_of(c.table_dtype), c.offset, c.scale);
  const std::vector<float> table = random_bf16(c.of.V * c.C + c.offset, 13),
                           d_y = random_bf16(static_cast<int64_t>(c.of.ids.size()) * c.C + c.offset, 12);
  for (Device* device : other_devices()) {
    const std::vector<std::byte> want = run(cpu_device(), c, table, d_y), got = run(*device, c, table, d_y);
    CHECK((want == got));
    CHECK((got == run(*device, c, table, d_y)));
  }
}

TEST_CASE("embedding on a GPU gives the bits of the CPU", "[kernels][embedding][devices][slow]") {
  const DType d_out_dtype = GENERATE(DType::kF32, DType::kBF16), table_dtype = GENERATE(DType::kF32, DType::kBF16);
  for (const TokenIds& of : ids_of_all_kinds()) {
    for (const int64_t C : {1, 7, 8, 20, 300, 512}) check_against_cpu({of, C, d_out_dtype, table_dtype});
    check_against_cpu({of, 16, d_out_dtype, table_dtype, 1});
    for (const int64_t C : {7, 300, 512}) check_against_cpu({of, C, d_out_dtype, table_dtype, 0, 25.25f});
    check_against_cpu({of, 16, d_out_dtype, table_dtype, 1, 25.25f});
  }
}

TEST_CASE("embedding on a GPU takes wide rows", "[kernels][embedding][devices][slow]") {
  const DType d_out_dtype = GENERATE(DType::kF32, DType::kBF16), table_dtype = GENERATE(DType::kF32, DType::kBF16);
  const TokenIds of = ids_of_counts("few", {70, 1, 64, 2, 3, 1, 130}, 7);
  for (const int64_t C : {2048, 5120, 4099, 11008}) {
    check_against_cpu({of, C, d_out_dtype, table_dtype});
    check_against_cpu({of, C, d_out_dtype, table_dtype, 0, 45.25f});
  }
}

TEST_CASE("embedding_backward on a GPU is the same when it is replayed", "[kernels][embedding][devices]") {
  const TokenIds of = ids_of_counts("few", {70, 1, 64, 2, 300}, 8);
  const auto T = static_cast<int64_t>(of.ids.size());
  const int64_t C = 512;
  const std::vector<float> d_y = random_bf16(T * C, 12), table = random_bf16(of.V * C, 13);
  const auto add_four_times = [&](Device& device) {
    const TestTensor order(device, DType::kI32, {T, kTokenRowInts}, order_of(of.ids, of.V));
    const TestTensor d_out(device, DType::kBF16, {T, C}, d_y), d_table(device, DType::kBF16, {of.V, C}, table);
    std::unique_ptr<Recording> recording;
    for (int n = 0; n < 2; ++n) {
      device.replay(recording, [&] {
        embedding_backward(device, {order, d_out, d_table});
        embedding_backward(device, {order, d_out, d_table});
      });
    }
    return d_table.bytes();
  };
  const std::vector<std::byte> want = add_four_times(cpu_device());
  for (Device* device : other_devices()) CHECK((add_four_times(*device) == want));
}

}  // namespace
