#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kernels/op/workspace.h"
#include "kernels/ops/attention/attention.h"
#include "kernels/ops/attention/rope.h"
#include "tests/kernels/attention_reference.h"
#include "tests/kernels/float8_devices.h"
#include "tests/kernels/joint_scales.h"

// Attention of codes with joint scales against attention of what they decode to.
using namespace parka;
using namespace parka::test;

namespace {

// Queries and keys of each head in each tile of 64 rows of another size, neighbours by up to 2^8: scores of up
// to about 25 beside some of almost 0. Values are standard normals.
std::vector<float> attention_values_of_many_sizes(const AttentionShape& s) {
  constexpr int kExponents[] = {0, -8, -1, -6, -3};
  std::vector<float> x = random_bf16(s.T() * s.width(), 61);
  for (int64_t i = 0; i < s.T() * s.width(); ++i) {
    const int64_t tile = i / s.width() / kJointRows, head = i % s.width() / s.D;
    if (head < s.H + s.Hkv) x[i] = decode_bf16(encode_bf16(std::ldexp(2.2f * x[i], kExponents[(tile + head) % 5])));
  }
  return x;
}

enum class View { kWhole, kDocuments, kWindow };  // which keys rows see; kWindow: of documents, too

// Codes as rope_forward saves them on the CPU, and in qkv what they decode to.
struct CodedInputs {
  AttentionShape s;
  std::shared_ptr<JointRotation> rotation;
  std::vector<float> qkv, d_out;
  float scale;
  FirstKeys first_keys = {};
  int64_t window = 0;

  CodedInputs(const AttentionShape& shape, int64_t group, const std::vector<float>& x)
      : s(shape),
        rotation(std::make_shared<JointRotation>(cpu_device(), JointShape{s.T(), s.S, s.H, s.Hkv, s.D, group},
                                                 DType::kBF16, x, rope_table(s.S, s.D, 1e4))),
        qkv(rotation->qkv.host()),
        d_out(random_bf16(s.T() * s.out_width(), 62)),
        scale(1.0f / std::sqrt(static_cast<float>(s.D))) {}
  CodedInputs(const AttentionShape& shape, int64_t group, View view = View::kWhole)
      : CodedInputs(shape, group, attention_values_of_many_sizes(shape)) {
    if (view != View::kWhole) see_documents();
    if (view != View::kWindow) return;
    window = s.S >= 320 ? 200 : 50;
    first_keys = windowed(s, window, first_keys);
  }

  // Documents that end at, beside and between tile borders; others in each sequence.
  void see_documents() {
    constexpr int64_t kLengths[] = {65, 63, 100, 1, 130};
    for (int64_t b = 0; b < s.B; ++b) {
      int64_t begin = 0, length = kLengths[b % 5];
      for (int64_t i = 0, count = b; i < s.S; ++i) {
        if (i == begin + length) begin = i, length = kLengths[++count % 5];
        first_keys.push_back(static_cast<int32_t>(begin));
      }
    }
  }
  // The largest magnitude of a score that counts.
  double largest_score() const {
    const Doubles x = to_doubles(qkv);
    double largest = 0;
    for (int64_t b = 0; b < s.B; ++b) {
      for (int64_t h = 0; h < s.H; ++h) {
        for (int64_t i = 0; i < s.S; ++i) {
          for (int64_t j = first_key_of(first_keys, s, b, i); j < s.key_end(i); ++j) {
            const double score = dot(&x[s.q(b, i, h)], &x[s.k(b, j, h / s.group())], s.D).value;
            largest = std::max(largest, std::abs(scale * score));
          }
        }
      }
    }
    return largest;
  }
};

struct CodedResults {
  std::vector<float> out, lse, d_q, d_k, d_v;
  float out_amax;
  std::vector<std::byte> bytes;  // of all of it
  bool intact;                   // inputs as they were, nothing written outside the outputs
};

int64_t scratch_bytes(const AttentionShape& s) {
  return cuda::attention_backward_scratch_bytes(s.B, s.S, s.H, s.Hkv, s.D);
}

// Columns [begin, end) of each row.
std::vector<float> columns_of(const std::vector<float>& x, int64_t width, int64_t begin, int64_t end) {
  std::vector<float> part;
  for (auto row = x.begin(); row != x.end(); row += width) part.insert(part.end(), row + begin, row + end);
  return part;
}

CodedResults run(Device& device, const CodedInputs& in, DType dtype, bool with_codes, int64_t scratch_size) {
  const AttentionShape& s = in.s;
  const TestTensor qkv(device, dtype, {s.T(), s.width()}, in.qkv), out(device, dtype, {s.T(), s.out_width()});
  const TestTensor d_out(device, dtype, {s.T(), s.out_width()}, in.d_out), d_qkv(device, dtype, {s.T(), s.width()});
  const TestTensor lse(device, DType::kF32, {s.B, s.H, s.S}), scratch(device, DType::kU8, {scratch_size});
  const TestTensor out_amax(device, DType::kF32, {1}), d_qkv_amax(device, DType::kF32, {1});
  const TestTensor table(device, DType::kF32, {s.S, s.D}, rope_table(s.S, s.D, 1e4));
  const std::vector<float> keys(in.first_keys.begin(), in.first_keys.end());
  const TestTensor first_key(device, DType::kI32, {s.T()}, keys);
  const TensorView first = in.first_keys.empty() ? TensorView() : first_key.view();
  const std::unique_ptr<TestMatrix> codes = copy_on(device, in.rotation->saved);
  const ScaledView given = with_codes ? codes->view() : ScaledView();
  const std::vector<std::byte> qkv_before = qkv.bytes();
  attention_forward(device,
                    {qkv, out, lse, s.S, s.H, s.Hkv, in.scale, out_amax, first, in.window, s.causal, given});
  attention_backward(device, {qkv, out, d_out, lse, d_qkv, s.S, s.H, s.Hkv, in.scale, first, table, d_qkv_amax,
                              scratch, in.window, s.causal, given});

  const std::vector<float> gradient = d_qkv.host();
  const int64_t keys_at = s.H * s.D, values_at = keys_at + s.Hkv * s.D;
  CodedResults r{out.host(),
                 lse.host(),
                 columns_of(gradient, s.width(), 0, keys_at),
                 columns_of(gradient, s.width(), keys_at, values_at),
                 columns_of(gradient, s.width(), values_at, s.width()),
                 out_amax.host()[0],
                 {},
                 qkv.bytes() == qkv_before && d_out.host() == in.d_out};
  for (const TestTensor* t : {&out, &lse, &d_qkv, &out_amax, &d_qkv_amax}) {
    const std::vector<std::byte> bytes = t->bytes();
    r.bytes.insert(r.bytes.end(), bytes.begin(), bytes.end());
  }
  for (const TestTensor* t : {&qkv, &out, &d_out, &lse, &d_qkv, &out_amax, &d_qkv_amax, &scratch}) {
    r.intact = r.intact && t->guard_intact();
  }
  r.intact = r.intact && codes->guard_intact() && same_bits(*codes, in.rotation->saved);
  return r;
}

CodedResults run(Device& device, const CodedInputs& in, bool with_codes = true) {
  return run(device, in, DType::kBF16, with_codes, scratch_bytes(in.s));
}

// Of the elements [T, heads * D] the root mean square of each head in each tile of 64 rows of a sequence.
Doubles sizes_of_tiles(const AttentionShape& s, const std::vector<float>& x, int64_t heads) {
  const int64_t tiles = ceil_div(s.S, kJointRows);
  Doubles sums(static_cast<size_t>(s.B * heads * tiles)), counts = sums;
  for (size_t i = 0; i < x.size(); ++i) {
    const int64_t row = static_cast<int64_t>(i) / (heads * s.D), head = static_cast<int64_t>(i) / s.D % heads;
    const int64_t at = (row / s.S * heads + head) * tiles + row % s.S / kJointRows;
    sums[at] += std::pow(double{x[i]}, 2);
    ++counts[at];
  }
  for (size_t i = 0; i < sums.size(); ++i) sums[i] = std::sqrt(sums[i] / counts[i]);
  return sums;
}

std::vector<float> difference_of(const std::vector<float>& x, const std::vector<float>& y) {
  REQUIRE(x.size() == y.size());
  std::vector<float> z;
  for (size_t i = 0; i < x.size(); ++i) z.push_back(x[i] - y[i]);
  return z;
}

// The tiles of heads that are further from `want`, in their root mean square, than `tolerance` of it, or of a
// tenth of its largest tile in that sequence and head, and twice what bf16 alone makes of them.
int64_t count_far_tiles(const AttentionShape& s, int64_t heads, const std::vector<float>& got,
                        const std::vector<float>& want, const std::vector<float>& rounded, double tolerance) {
  const Doubles sizes = sizes_of_tiles(s, want, heads), errors = sizes_of_tiles(s, difference_of(got, want), heads),
                of_bf16 = sizes_of_tiles(s, difference_of(rounded, want), heads);
  const size_t tiles = static_cast<size_t>(ceil_div(s.S, kJointRows));
  int64_t far = 0;
  for (size_t i = 0; i < sizes.size(); ++i) {
    const auto head = sizes.begin() + static_cast<Doubles::difference_type>(i / tiles * tiles);
    const double largest = *std::max_element(head, head + static_cast<Doubles::difference_type>(tiles));
    far += !(errors[i] <= 2 * of_bf16[i] + tolerance * std::max(sizes[i], 0.1 * largest));
  }
  return far;
}

// The results of other devices against those of the CPU in fp32, by tiles of heads, which differ in size.
//
// FP8 tensor cores add up products and sums of 32 columns with about 14 bits: each step cuts off at most 2^-13
// of the largest magnitude. So a score is off by at most D / 32 * 2^-13 of the largest score, as is a row's
// lse, a mean of such errors. In the root mean square a score is off by 2^-12 of the largest score at most.
// Probabilities are off by that of the score and that of lse, relatively, so `out` and d_v are by 2 of it; d_q
// and d_k by 4, because delta comes from `out`. What remains are the 2^-8 of P and dS, which tensor cores take
// as bf16, and what the CPU's own results in bf16 are off by.
void check_codes_against_cpu(const CodedInputs& in) {
  const AttentionShape& s = in.s;
  CAPTURE(s.B, s.S, s.H, s.Hkv, s.D, s.causal, in.window, in.first_keys.size());
  if (other_devices().empty()) return;
  const double largest = in.largest_score(), steps = static_cast<double>(s.D) / 32;
  CAPTURE(largest);
  CHECK(largest < 35);
  const double lse_tolerance = 1e-5 + steps * 0x1p-13 * largest, error = 0x1p-12 * largest, bf16 = 0x1p-8;
  const CodedResults want = run(cpu_device(), in, DType::kF32, false, 0);
  const CodedResults rounded = run(cpu_device(), in, DType::kBF16, false, 0);
  for (Device* device : other_devices()) {
    const CodedResults got = run(*device, in);
    CHECK(got.intact);
    int64_t far = 0;
    for (size_t i = 0; i < want.lse.size(); ++i) {
      far += !(std::abs(double{got.lse[i]} - want.lse[i]) <= lse_tolerance * std::max(1.0f, std::abs(want.lse[i])));
    }
    CHECK(far == 0);
    float out_amax = 0;
    for (const float v : got.out) out_amax = std::max(out_amax, std::abs(v));
    CHECK(got.out_amax == out_amax);
    CHECK(count_far_tiles(s, s.H, got.out, want.out, rounded.out, bf16 + 2 * error) == 0);
    CHECK(count_far_tiles(s, s.Hkv, got.d_v, want.d_v, rounded.d_v, bf16 + 2 * error) == 0);
    CHECK(count_far_tiles(s, s.H, got.d_q, want.d_q, rounded.d_q, bf16 + 4 * error) == 0);
    CHECK(count_far_tiles(s, s.Hkv, got.d_k, want.d_k, rounded.d_k, bf16 + 4 * error) == 0);
    CHECK(run(*device, in).bytes == got.bytes);  // again
    CHECK(run(*device, in, DType::kBF16, true, 0).bytes == got.bytes);
  }
}

TEST_CASE("attention on the CPU gives the same bits with codes", "[kernels][attention]") {
  // What the tests of other devices rely on, too: large scores, and joint scales of neighbours far apart.
  const CodedInputs in({2, 192, 4, 2, 64}, 32, GENERATE(View::kWhole, View::kDocuments, View::kWindow));
  const double largest = in.largest_score();
  CHECK((largest > 10 && largest < 35));
  const std::vector<float> scales = in.rotation->saved.scale->host();
  const int64_t groups = in.s.width() / 32;
  double most = 0;
  for (int64_t c = 0; c < (in.s.H + in.s.Hkv) * 2; ++c)
    most = std::max(most, double{scales[c] / scales[c + 64 * groups]});
  CHECK((most >= 128 && most <= 512));
  const CodedResults with = run(cpu_device(), in), without = run(cpu_device(), in, false);
  CHECK(with.bytes == without.bytes);
  CHECK((with.intact && without.intact));
}

TEST_CASE("attention refuses codes that rope_forward cannot have saved", "[kernels][attention]") {
  Device& device = cpu_device();
  const TestTensor qkv(device, DType::kBF16, {64, 128}), out(device, DType::kBF16, {64, 64}),
      lse(device, DType::kF32, {1, 2, 64});
  const auto refused = [&](const ScaledView& codes) {
    const std::string forward = internal_error([&] {
      attention_forward(device, {qkv, out, lse, 64, 2, 1, 1, {}, {}, 0, true, codes});
    });
    const std::string backward = internal_error([&] {
      attention_backward(device, {qkv, out, out, lse, qkv, 64, 2, 1, 1, {}, {}, {}, {}, 0, true, codes});
    });
    return contains(forward, "attention_forward: codes") && contains(backward, "attention_backward: codes");
  };
  CHECK(refused(qkv));
  CHECK(refused(TestMatrix(device, DType::kE5M2, 64, 128, Scaling::kGroup, 16)));
  CHECK(refused(TestMatrix(device, DType::kE4M3, 64, 128, Scaling::kTensor)));
  CHECK(refused(TestMatrix(device, DType::kE4M3, 32, 128, Scaling::kGroup, 16)));
  CHECK(refused(TestMatrix(device, DType::kE4M3, 64, 64, Scaling::kGroup, 16)));
  CHECK(refused(TestMatrix(device, DType::kE4M3, 64, 128, Scaling::kGroup, 64)));  // of two heads
}

TEST_CASE("attention of codes reads those of queries and keys, too", "[kernels][attention]") {
  Device& device = cpu_device();
  const TestTensor qkv(device, DType::kBF16, {64, 128}), out(device, DType::kBF16, {64, 64}),
      lse(device, DType::kF32, {1, 2, 64});
  const TestMatrix codes(device, DType::kE4M3, 64, 128, Scaling::kGroup, 16, DType::kBF16);
  AttentionForward forward = {qkv, out, lse, 64, 2, 1, 1};
  AttentionBackward backward = {qkv, out, out, lse, qkv, 64, 2, 1, 1};
  const double plain_forward = cost_of(forward).bytes, plain_backward = cost_of(backward).bytes;
  forward.codes = codes;
  backward.codes = codes;
  constexpr double kCodes = 64 * 96, kScales = kCodes / 16 * 2;  // of three heads of 32
  CHECK(cost_of(forward).bytes == plain_forward + kCodes + kScales);
  CHECK(cost_of(backward).bytes == plain_backward + kCodes + kScales);
}

TEST_CASE("attention of codes on other devices agrees with the CPU", "[kernels][attention][devices][slow]") {
  const std::vector<int64_t> lengths = {64, 128, 192, 320, 448, 1000}, groups = {32, 16, 64};
  const std::vector<std::pair<int64_t, int64_t>> heads = {{2, 2}, {4, 2}, {4, 1}};
  const size_t length = GENERATE(range(size_t{0}, size_t{6}));
  const View view = GENERATE(View::kWhole, View::kDocuments, View::kWindow);
  const int64_t D = GENERATE(int64_t{64}, int64_t{128});
  // Heads, groups and sequences so that every width meets each of them.
  const size_t turn = length + static_cast<size_t>(view);
  const auto [H, Hkv] = heads[(turn + static_cast<size_t>(D / 128)) % 3];
  const int64_t B = turn % 2 == 0 ? 3 : 1;
  check_codes_against_cpu(CodedInputs({B, lengths[length], H, Hkv, D}, groups[length % 3], view));
}

TEST_CASE("attention of codes over all keys on other devices agrees with the CPU",
          "[kernels][attention][devices]") {
  const int64_t S = GENERATE(int64_t{64}, int64_t{192}), D = GENERATE(int64_t{64}, int64_t{128});
  check_codes_against_cpu(CodedInputs({2, S, 4, 2, D, /*causal=*/false}, 32));
}

TEST_CASE("attention on other devices reads no codes where sequences end within tiles",
          "[kernels][attention][devices]") {
  const int64_t D = GENERATE(int64_t{64}, int64_t{128}), S = GENERATE(int64_t{1000}, int64_t{200}, int64_t{33});
  const int64_t B = GENERATE(int64_t{1}, int64_t{2});
  CAPTURE(S, D, B);
  for (Device* device : other_devices()) {
    const CodedInputs in({B, S, 4, 2, D}, 32);
    CHECK(run(*device, in).bytes == run(*device, in, false).bytes);
  }
}

// Rows of query heads whose `out` or lse is NaN where it should not be, or the other way round: those have one
// that see key `row` of key head `head` in sequence `batch`.
int64_t count_wrong_nans(const CodedInputs& in, const CodedResults& r, int64_t batch, int64_t row, int64_t head) {
  const AttentionShape& s = in.s;
  int64_t wrong = 0;
  for (int64_t b = 0; b < s.B; ++b) {
    for (int64_t h = 0; h < s.H; ++h) {
      for (int64_t i = 0; i < s.S; ++i) {
        const bool sees = b == batch && h / s.group() == head && row < s.key_end(i) &&
                          first_key_of(in.first_keys, s, b, i) <= row;
        wrong += std::isnan(r.lse[s.lse(b, i, h)]) != sees;
        for (int64_t d = 0; d < s.D; ++d) wrong += std::isnan(r.out[s.out(b, i, h) + d]) != sees;
      }
    }
  }
  return wrong;
}

TEST_CASE("with codes later queries see the NaN of a key, and no others", "[kernels][attention][devices]") {
  constexpr int64_t kBatch = 1, kHead = 1;
  const View view = GENERATE(View::kWhole, View::kDocuments, View::kWindow);
  const int64_t D = GENERATE(int64_t{64}, int64_t{128}), row = GENERATE(int64_t{0}, int64_t{100}, int64_t{191});
  const AttentionShape s{2, 192, 4, 2, D};
  CAPTURE(static_cast<int>(view), D, row);
  CodedInputs in(s, 32, view);
  std::vector<float> x = attention_values_of_many_sizes(s);
  x[s.k(kBatch, row, kHead) + 3] = NAN;
  const CodedInputs poisoned(s, 32, x);
  in.rotation = poisoned.rotation;
  in.qkv = poisoned.qkv;
  for (Device* device : devices()) {
    const CodedResults r = run(*device, in);
    CHECK(r.intact);
    CHECK(count_wrong_nans(in, r, kBatch, row, kHead) == 0);
    // It shows in the gradients of what it has met, and stays in its sequence and its heads.
    const int64_t q = (kBatch * s.S + row) * s.H * D, k = (kBatch * s.S + row) * s.Hkv * D;
    CHECK((std::isnan(r.d_q[q + kHead * s.group() * D]) && std::isnan(r.d_k[k + kHead * D])));
    int64_t elsewhere = 0;
    for (int64_t i = 0; i < s.T() * s.H * D; ++i) {
      const bool met = i / (s.H * D * s.S) == kBatch && i / D % s.H / s.group() == kHead;
      elsewhere += !met && std::isnan(r.d_q[i]);
    }
    for (int64_t i = 0; i < s.T() * s.Hkv * D; ++i) {
      const bool met = i / (s.Hkv * D * s.S) == kBatch && i / D % s.Hkv == kHead;
      elsewhere += !met && (std::isnan(r.d_k[i]) || std::isnan(r.d_v[i]));
    }
    CHECK(elsewhere == 0);
  }
}

}  // namespace
