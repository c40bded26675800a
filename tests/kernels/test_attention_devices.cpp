#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "kernels/op/workspace.h"
#include "kernels/ops/attention/attention.h"
#include "kernels/ops/attention/rope.h"
#include "tests/kernels/attention_reference.h"
#include "tests/kernels/op_bounds.h"
#include "tests/support/catch.h"
#include "tests/support/tensors.h"

// Attention on other devices against the CPU, backward as models call it. There P and dS may be rounded to bf16
// before they are multiplied, which the bounds of test_attention.cpp do not allow for: here errors are measured as
// a whole, and against those that the CPU itself makes in bf16. Where there is no other device nothing is run.
using namespace parka;
using namespace parka::test;

namespace {

std::vector<Device*> other_devices() {
  std::vector<Device*> others = devices();
  others.erase(others.begin());
  return others;
}

// Elements of q, k, v and d_out, as values that bf16 holds exactly.
struct Inputs {
  AttentionShape s;
  std::vector<float> qkv, d_out;
  float scale;
  FirstKeys first_keys = {};
  int64_t window = 0;

  explicit Inputs(const AttentionShape& shape, float qkv_scale = 1.0f)
      : s(shape),
        qkv(random_bf16(s.T() * s.width(), 11, qkv_scale)),
        d_out(random_bf16(s.T() * s.out_width(), 12)),
        scale(1.0f / std::sqrt(static_cast<float>(s.D))) {}
};

struct Results {
  std::vector<float> out, lse, d_q, d_k, d_v;
  std::vector<std::byte> bytes;  // of all of it
  bool intact;                   // inputs as they were, nothing written outside the outputs
};

int64_t scratch_bytes(const AttentionShape& s) {
  return cuda::attention_backward_scratch_bytes(s.B, s.S, s.H, s.Hkv, s.D);
}

Results run(Device& device, const Inputs& in, DType dtype, int64_t scratch_size) {
  const AttentionShape& s = in.s;
  const TestTensor qkv(device, dtype, {s.T(), s.width()}, in.qkv), out(device, dtype, {s.T(), s.out_width()});
  const TestTensor d_out(device, dtype, {s.T(), s.out_width()}, in.d_out), d_qkv(device, dtype, {s.T(), s.width()});
  const TestTensor lse(device, DType::kF32, {s.B, s.H, s.S});
  const std::vector<float> keys(in.first_keys.begin(), in.first_keys.end());
  const TestTensor first_key(device, DType::kI32, {s.T()}, keys);
  const TensorView first = in.first_keys.empty() ? TensorView() : first_key.view();
  attention_forward(device, {qkv, out, lse, s.S, s.H, s.Hkv, in.scale, {}, first, in.window, s.causal});
  const TestTensor table(device, DType::kF32, {s.S, s.D}, rope_table(s.S, s.D, 1e4)),
      amax(device, DType::kF32, {1}), scratch(device, DType::kU8, {scratch_size});
  const TensorView cos_sin = s.causal ? table.view() : TensorView();  // vision towers rotate nothing
  attention_backward(device, {qkv, out, d_out, lse, d_qkv, s.S, s.H, s.Hkv, in.scale, first, cos_sin, amax, scratch,
                              in.window, s.causal});

  Results r{out.host(), lse.host(), {}, {}, {}, {}, true};
  const std::vector<float> gradient = d_qkv.host();
  const int64_t q_columns = s.H * s.D, k_columns = s.Hkv * s.D;
  for (int64_t row = 0; row < s.T(); ++row) {
    const float* x = &gradient[row * s.width()];
    r.d_q.insert(r.d_q.end(), x, x + q_columns);
    r.d_k.insert(r.d_k.end(), x + q_columns, x + q_columns + k_columns);
    r.d_v.insert(r.d_v.end(), x + q_columns + k_columns, x + s.width());
  }
  for (const TestTensor* t : {&out, &lse, &d_qkv, &amax}) {
    const std::vector<std::byte> bytes = t->bytes();
    r.bytes.insert(r.bytes.end(), bytes.begin(), bytes.end());
  }
  for (const TestTensor* t : {&qkv, &out, &d_out, &lse, &d_qkv, &amax, &scratch}) {
    r.intact = r.intact && t->guard_intact();
  }
  r.intact = r.intact && qkv.host() == in.qkv && d_out.host() == in.d_out;
  return r;
}

Results run(Device& device, const Inputs& in, DType dtype) { return run(device, in, dtype, scratch_bytes(in.s)); }

// Root mean square of got - want over that of want; over `floor` where want is about zero, as the gradients of a
// query and a key are that see nothing else. NaN if there is any.
double relative_error(const std::vector<float>& got, const std::vector<float>& want, double floor = 0.1) {
  REQUIRE(got.size() == want.size());
  double difference = 0, norm = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    difference += std::pow(double{got[i]} - want[i], 2);
    norm += std::pow(want[i], 2);
  }
  const double count = static_cast<double>(want.size());
  return std::sqrt(difference / count) / std::max(std::sqrt(norm / count), floor);
}

// The largest error, relative to the larger of the value and 1.
double lse_error(const std::vector<float>& got, const std::vector<float>& want) {
  double worst = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    const double error = std::abs(double{got[i]} - want[i]) / std::max(1.0f, std::abs(want[i]));
    if (std::isnan(error)) return error;
    worst = std::max(worst, error);
  }
  return worst;
}

// The results of a device against those of the CPU in fp32: within 1e-5 in fp32; in bf16 within 1e-2 and within
// twice what the CPU makes of the same input in bf16.
void check_against_cpu(const Inputs& in, DType dtype) {
  const AttentionShape& s = in.s;
  CAPTURE(s.B, s.S, s.H, s.Hkv, s.D, name_of(dtype));
  const std::vector<Device*> others = other_devices();
  if (others.empty()) return;
  Device& cpu = *devices().front();
  const Results want = run(cpu, in, DType::kF32);
  const Results rounded = dtype == DType::kF32 ? want : run(cpu, in, dtype);
  for (Device* device : others) {
    const Results got = run(*device, in, dtype);
    CHECK(got.intact);
    CHECK(lse_error(got.lse, want.lse) <= 1e-5);
    const auto check = [&](std::vector<float> Results::*part) {
      const double error = relative_error(got.*part, want.*part);
      if (dtype == DType::kF32) {
        CHECK(error <= 1e-5);
      } else {
        CHECK(error <= std::min(1e-2, 2 * relative_error(rounded.*part, want.*part) + 1e-3));
      }
    };
    check(&Results::out);
    check(&Results::d_q);
    check(&Results::d_k);
    check(&Results::d_v);
  }
}

TEST_CASE("attention on other devices agrees with the CPU", "[kernels][attention][devices]") {
  const std::vector<int64_t> lengths = {1, 17, 64, 65, 128, 200, 333}, widths = {16, 64, 128, 48, 256};
  const std::vector<std::pair<int64_t, int64_t>> heads = {{4, 4}, {4, 2}, {6, 1}};
  const size_t length = GENERATE(range(size_t{0}, size_t{7})), width = GENERATE(range(size_t{0}, size_t{5}));
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  // Every length and width; heads and batch so that every width meets each pair of them.
  const auto [H, Hkv] = heads[(length + width) % heads.size()];
  const int64_t B = (length + width / 2) % 2 == 0 ? 1 : 3;
  check_against_cpu(Inputs({B, lengths[length], H, Hkv, widths[width]}), dtype);
}

TEST_CASE("attention on other devices takes large scores", "[kernels][attention][devices]") {
  const int64_t D = GENERATE(int64_t{48}, int64_t{64}, int64_t{128}, int64_t{256});
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  // Scores of about +-10, most of the probability on one or two keys.
  check_against_cpu(Inputs({1, 200, 4, 2, D}, 3.0f), dtype);
}

TEST_CASE("attention on other devices takes any scale", "[kernels][attention][devices]") {
  Inputs in({1, 100, 2, 1, 64});
  in.scale = GENERATE(-0.2f, 0.0f, 1.0f);
  CAPTURE(in.scale);
  check_against_cpu(in, DType::kBF16);
}

TEST_CASE("attention on other devices takes many heads of one key head", "[kernels][attention][devices]") {
  // Less than a byte of keys and values per head, by which heads are put together.
  const int64_t D = GENERATE(int64_t{16}, int64_t{64}, int64_t{128});
  check_against_cpu(Inputs({2, 1, 1280, 1, D}), DType::kBF16);
}

TEST_CASE("attention on other devices keeps documents apart", "[kernels][attention][devices][slow]") {
  // Documents of one token, shorter than a tile, as long as tiles and longer, beginning at and beside tile borders.
  const std::vector<int64_t> documents =
      GENERATE(std::vector<int64_t>{333}, std::vector<int64_t>{1, 332}, std::vector<int64_t>{332, 1},
               std::vector<int64_t>{128, 64, 64, 77}, std::vector<int64_t>{127, 2, 1, 1, 1, 1, 200},
               std::vector<int64_t>{65, 63, 64, 141}, std::vector<int64_t>(333, 1), std::vector<int64_t>(37, 9));
  const int64_t D = GENERATE(int64_t{48}, int64_t{64}, int64_t{128}, int64_t{256});
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  Inputs in({2, 333, 4, 2, D});
  FirstKeys one, other;  // the second sequence has the same documents in reverse order
  for (size_t i = 0; i < documents.size(); ++i) {
    one.insert(one.end(), static_cast<size_t>(documents[i]), static_cast<int32_t>(one.size()));
    const auto length = static_cast<size_t>(documents[documents.size() - 1 - i]);
    other.insert(other.end(), length, static_cast<int32_t>(other.size()));
  }
  in.first_keys = one;
  in.first_keys.insert(in.first_keys.end(), other.begin(), other.end());
  CAPTURE(documents);
  check_against_cpu(in, dtype);
  for (Device* device : other_devices()) CHECK(run(*device, in, dtype).bytes == run(*device, in, dtype).bytes);
}

// Through a window and, if `document` is not 0, within documents of so many tokens.
void look_through_window(Inputs& in, int64_t window, int64_t document) {
  FirstKeys begins;
  for (int64_t row = 0; row < in.s.T(); ++row) {
    begins.push_back(static_cast<int32_t>(document == 0 ? 0 : row % in.s.S / document * document));
  }
  in.first_keys = windowed(in.s, window, begins);
  in.window = window;
}

void check_windows(Inputs in, int64_t window, int64_t document, DType dtype) {
  look_through_window(in, window, document);
  CAPTURE(window, document);
  check_against_cpu(in, dtype);
  for (Device* device : other_devices()) CHECK(run(*device, in, dtype).bytes == run(*device, in, dtype).bytes);
}

TEST_CASE("attention on other devices looks through a window", "[kernels][attention][devices][slow]") {
  // One key, fewer than a tile has, one less, a tile, one more, several, all but one.
  const int64_t window = GENERATE(int64_t{1}, int64_t{9}, int64_t{63}, int64_t{64}, int64_t{65}, int64_t{128},
                                  int64_t{200}, int64_t{332});
  const int64_t D = GENERATE(int64_t{48}, int64_t{64}, int64_t{128}, int64_t{256});
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  const int64_t document = GENERATE(int64_t{0}, int64_t{77});
  check_windows(Inputs({2, 333, 4, 2, D}), window, document, dtype);
}

TEST_CASE("attention on other devices looks through a window of several tiles",
          "[kernels][attention][devices][slow]") {
  // Tiles that all queries of a tile see lie between two that some do not. Windows and documents end within tiles,
  // in either half of them, at their borders and beside those.
  const int64_t window =
      GENERATE(int64_t{127}, int64_t{129}, int64_t{192}, int64_t{256}, int64_t{257}, int64_t{300}, int64_t{513});
  const int64_t S = GENERATE(int64_t{640}, int64_t{701});
  const int64_t D = GENERATE(int64_t{64}, int64_t{128});
  const int64_t document = GENERATE(int64_t{0}, int64_t{320}, int64_t{411});
  check_windows(Inputs({2, S, 2, 1, D}), window, document, DType::kBF16);
}

TEST_CASE("attention over all keys on other devices agrees with the CPU", "[kernels][attention][devices]") {
  // Those of vision towers, 577 and 729, and lengths at and beside tile borders.
  const std::vector<int64_t> lengths = {1, 17, 63, 64, 65, 128, 129, 200, 577, 729},
                             widths = {16, 64, 72, 128, 256};
  const std::vector<std::pair<int64_t, int64_t>> heads = {{4, 4}, {4, 2}, {3, 1}};
  const size_t length = GENERATE(range(size_t{0}, size_t{10})), width = GENERATE(range(size_t{0}, size_t{5}));
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  const auto [H, Hkv] = heads[(length + width) % heads.size()];
  const Inputs in({2, lengths[length], H, Hkv, widths[width], /*causal=*/false});
  check_against_cpu(in, dtype);
  for (Device* device : other_devices()) CHECK(run(*device, in, dtype).bytes == run(*device, in, dtype).bytes);
}

TEST_CASE("attention over all keys on other devices takes large scores", "[kernels][attention][devices]") {
  const int64_t D = GENERATE(int64_t{48}, int64_t{64}, int64_t{72}, int64_t{128});
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  check_against_cpu(Inputs({2, 200, 4, 2, D, /*causal=*/false}, 4.0f), dtype);
}

TEST_CASE("attention over all keys of large negative scores has no NaN where a tile is not full",
          "[kernels][attention][devices]") {
  // Keys past the end are zeros, whose scores of 0 would be the largest by far.
  const int64_t D = GENERATE(int64_t{48}, int64_t{64}, int64_t{72}, int64_t{128});
  Inputs in({1, 70, 1, 1, D, /*causal=*/false});
  for (int64_t i = 0; i < in.s.S; ++i) {
    for (int64_t d = 0; d < D; ++d) {
      in.qkv[static_cast<size_t>(in.s.q(0, i, 0) + d)] = 16.0f;
      in.qkv[static_cast<size_t>(in.s.k(0, i, 0) + d)] = -1.0f;
    }
  }
  check_against_cpu(in, DType::kBF16);
}

TEST_CASE("attention on a GPU refuses very wide heads", "[kernels][attention][devices]") {
  for (Device* device : other_devices()) {
    const Inputs in({1, 2, 1, 1, 520});
    CHECK(
        contains(bad_input_error([&] { run(*device, in, DType::kBF16); }), "heads of up to 512 columns, not 520"));
  }
}

TEST_CASE("attention on other devices gives the same bits again", "[kernels][attention][devices]") {
  const int64_t D = GENERATE(int64_t{48}, int64_t{64}, int64_t{128}, int64_t{256});
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  for (Device* device : other_devices()) {
    const Inputs in({2, 333, 6, 2, D});
    CHECK(run(*device, in, dtype).bytes == run(*device, in, dtype).bytes);
  }
}

// The sequences of `in` again and again.
Inputs repeated(const Inputs& in, int64_t copies) {
  Inputs many = in;
  many.s.B *= copies;
  for (int64_t i = 1; i < copies; ++i) {
    many.qkv.insert(many.qkv.end(), in.qkv.begin(), in.qkv.end());
    many.d_out.insert(many.d_out.end(), in.d_out.begin(), in.d_out.end());
    many.first_keys.insert(many.first_keys.end(), in.first_keys.begin(), in.first_keys.end());
  }
  return many;
}

TEST_CASE("attention on other devices gives a sequence the same bits in any batch",
          "[kernels][attention][devices][large]") {
  // So many heads that a GPU takes them in several sections (attention_tiles.cuh) and a block takes many tiles, of
  // different numbers of keys; three sequences in turn.
  constexpr int64_t kCopies = 12;
  const int64_t window = GENERATE(int64_t{0}, int64_t{50}, int64_t{300}, int64_t{1000});
  const int64_t D = GENERATE(int64_t{64}, int64_t{128});
  CAPTURE(window, D);
  for (Device* device : other_devices()) {
    Inputs in({3, 1000, 2, 1, D});
    if (window > 0) look_through_window(in, window, 411);
    const Results one = run(*device, in, DType::kBF16), all = run(*device, repeated(in, kCopies), DType::kBF16);
    int64_t different = 0;
    const auto compare = [&](std::vector<float> Results::*part) {
      const std::vector<float>&a = one.*part, &b = all.*part;
      REQUIRE(b.size() == a.size() * kCopies);
      for (size_t i = 0; i < b.size(); ++i) different += b[i] != a[i % a.size()];
    };
    for (auto part : {&Results::out, &Results::lse, &Results::d_q, &Results::d_k, &Results::d_v}) compare(part);
    CHECK(different == 0);
    CHECK(all.intact);
  }
}

void check_rooms_for_score_gradients(const AttentionShape& s) {
  CAPTURE(s.B, s.S, s.H, s.Hkv, s.D);
  const int64_t of_group = s.group() * cuda::score_gradient_bytes(s.S);
  REQUIRE(scratch_bytes(s) >= of_group);
  if (other_devices().empty()) return;
  const Inputs in(s);
  for (Device* device : other_devices()) {
    CAPTURE(device->name());
    const Results without = run(*device, in, DType::kBF16, 0);
    // Nothing fits; passes of one key/value head; of two, the last one maybe of one; as models have it.
    for (const int64_t scratch_size : {of_group - 1, of_group, 2 * of_group + 16, scratch_bytes(s)}) {
      CAPTURE(scratch_size);
      const Results with = run(*device, in, DType::kBF16, scratch_size);
      CHECK(with.bytes == without.bytes);
      CHECK((with.intact && without.intact));
    }
  }
}

TEST_CASE("attention_backward gives the same bits with any scratch memory for score gradients",
          "[kernels][attention][devices]") {
  // Lengths beside multiples of 64 and 128 rows, query heads that share keys.
  check_rooms_for_score_gradients(GENERATE(AttentionShape{2, 1, 1, 1, 128}, AttentionShape{1, 63, 2, 2, 128},
                                           AttentionShape{2, 64, 2, 1, 128}, AttentionShape{1, 65, 3, 3, 128},
                                           AttentionShape{3, 128, 2, 2, 128}, AttentionShape{1, 129, 4, 2, 128},
                                           AttentionShape{2, 192, 2, 1, 128}, AttentionShape{1, 256, 6, 2, 128},
                                           AttentionShape{5, 333, 4, 2, 128}, AttentionShape{40, 129, 4, 2, 128}));
}

// Apart from the others: under racecheck they take very long.
TEST_CASE("attention_backward gives the same bits with any scratch memory, in long sequences",
          "[kernels][attention][devices][large]") {
  check_rooms_for_score_gradients(GENERATE(AttentionShape{9, 1100, 8, 4, 128}, AttentionShape{4, 1024, 8, 8, 128},
                                           AttentionShape{3, 2048, 8, 4, 128}, AttentionShape{2, 4100, 4, 4, 128},
                                           AttentionShape{1, 8200, 5, 5, 128}));
}

TEST_CASE("scratch memory for score gradients of attention: none where it is of no use", "[kernels][attention]") {
  CHECK(cuda::attention_backward_scratch_bytes(4, 2048, 32, 32, 64) == 0);
  CHECK(cuda::attention_backward_scratch_bytes(1, 65536, 32, 32, 128) == 0);
  // Llama-2-7B at 4 x 2048: 4 passes of 32 of its 128 heads, each with 16 * 17 pairs of 16 KiB.
  CHECK(cuda::attention_backward_scratch_bytes(4, 2048, 32, 32, 128) == 32 * 272 * 16384);
  // OLMo-1B: the same 32,768 tokens in sequences of 8192 have passes of 512 tiles, 8 heads, longer ones of 256.
  CHECK(cuda::attention_backward_scratch_bytes(4, 8192, 16, 16, 128) == 8 * 4160 * 16384);
  CHECK(cuda::attention_backward_scratch_bytes(2, 16384, 16, 16, 128) == 2 * 16512 * 16384);
  CHECK(cuda::attention_backward_scratch_bytes(1, 32768, 16, 16, 128) == int64_t{65792} * 16384);
  CHECK(cuda::attention_backward_scratch_bytes(1, 65536, 16, 16, 128) == 0);
  // Passes of 256 tiles of keys: 4 heads of 64 * 65 pairs, or one of 256 * 257. With groups that is too much.
  CHECK(cuda::attention_backward_scratch_bytes(1, 8192, 32, 32, 128) == 4 * 4160 * 16384);
  CHECK(cuda::attention_backward_scratch_bytes(1, 32768, 32, 32, 128) == int64_t{65792} * 16384);
  CHECK(cuda::attention_backward_scratch_bytes(1, 8192, 32, 8, 128) == 0);
}

TEST_CASE("scratch memory that attention takes where it costs none: passes of 512 tiles of keys and longer",
          "[kernels][attention]") {
  using Choices = std::vector<int64_t>;
  const auto choices = cuda::attention_backward_scratch_choices;
  CHECK(choices(4, 2048, 32, 32, 64).empty());
  CHECK(choices(1, 8192, 32, 8, 128) == Choices{32 * int64_t{4160} * 16384});
  CHECK(choices(1, 8192, 32, 32, 128) ==
        Choices{8 * int64_t{4160} * 16384, 16 * int64_t{4160} * 16384, 32 * int64_t{4160} * 16384});
  CHECK(choices(4, 2048, 32, 32, 128).front() == 32 * int64_t{272} * 16384);
  CHECK(choices(4, 2048, 32, 32, 128).back() == 128 * int64_t{272} * 16384);
}

}  // namespace
