#include <cmath>
#include <vector>

#include "kernels/ops/elementwise/pointwise.h"
#include "tests/kernels/op_bounds.h"
#include "tests/support/catch.h"

using namespace parka;
using namespace parka::test;

namespace {

constexpr uint64_t kSeed = 77;
constexpr uint32_t kStream = 9;

float rounded(DType dtype, float x) { return dtype == DType::kBF16 ? decode_bf16(encode_bf16(x)) : x; }

struct Place {
  int32_t step, first, stride;
};

struct Position : TestTensor {
  Position(Device& device, const Place& place) : TestTensor(device, DType::kI32, {3}) {
    device.copy_to_device(view().data, &place, sizeof(place));
  }
};

// By philox4x32 itself: whether element (t, k) is kept.
bool is_kept(const Place& place, int64_t S, int64_t K, double p, int64_t t, int64_t k) {
  const auto row = static_cast<uint64_t>((place.first + t / S * place.stride) * S + t % S);
  const uint64_t stream = static_cast<uint64_t>(place.step) << 32 | kStream;
  const auto words =
      philox4x32(kSeed, stream, row * static_cast<uint64_t>((K + 3) / 4) + static_cast<uint64_t>(k / 4));
  return words[static_cast<size_t>(k % 4)] >= p * 4294967296.0;
}

}  // namespace

TEST_CASE("dropout keeps what its counter says, and scales it", "[kernels][dropout]") {
  for (Device* device : devices()) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      for (const auto& [S, sequences, K] :
           {std::tuple<int64_t, int64_t, int64_t>(1, 1, 1), {5, 3, 7}, {8, 2, 64}, {33, 4, 12}, {16, 5, 130}}) {
        for (const double p : {0.0, 0.1, 0.5, 0.9}) {
          for (const bool accumulate : {false, true}) {
            for (const bool transposed : {false, true}) {
              const int64_t T = S * sequences;
              CAPTURE(device->name(), name_of(dtype), S, sequences, K, p, accumulate, transposed);
              const Place place = {3, 5, 2};
              const std::vector<float> values = random_values(dtype, T * K, 1),
                                       before = random_values(dtype, T * K, 2);
              const int64_t rows = transposed ? K : T, cols = transposed ? T : K;
              const TestTensor x(*device, dtype, {rows, cols}, values), y(*device, dtype, {rows, cols}, before);
              const Position position(*device, place);
              dropout(*device, {.x = x,
                                .y = y,
                                .position = position,
                                .sequence_length = S,
                                .probability = p,
                                .seed = kSeed,
                                .stream = kStream,
                                .accumulate = accumulate,
                                .transposed = transposed});
              const std::vector<float> got = y.host();
              const auto factor = static_cast<float>(1 / (1 - p));
              int64_t wrong = 0;
              for (int64_t t = 0; t < T; ++t) {
                for (int64_t k = 0; k < K; ++k) {
                  const int64_t i = transposed ? k * T + t : t * K + k;
                  const float kept = is_kept(place, S, K, p, t, k) ? values[i] * factor : 0.0f;
                  wrong += got[i] != rounded(dtype, accumulate ? before[i] + kept : kept);
                }
              }
              CHECK(wrong == 0);
              CHECK((x.host() == values && x.guard_intact() && y.guard_intact()));
            }
          }
        }
      }
    }
  }
}

TEST_CASE("dropout drops its share, other elements in other steps, streams and sequences", "[kernels][dropout]") {
  constexpr int64_t kTokens = 64, kWidth = 256, kCount = kTokens * kWidth;
  for (Device* device : devices()) {
    const TestTensor x(*device, DType::kF32, {kTokens, kWidth}, std::vector<float>(kCount, 1.0f));
    const auto masked = [&](const Place& place, uint32_t stream, double p) {
      const TestTensor y(*device, DType::kF32, {kTokens, kWidth});
      const Position position(*device, place);
      dropout(*device, {.x = x,
                        .y = y,
                        .position = position,
                        .sequence_length = 16,
                        .probability = p,
                        .seed = kSeed,
                        .stream = stream});
      return y.host();
    };
    const std::vector<float> one = masked({1, 0, 1}, 1, 0.25);
    double kept = 0;
    for (const float value : one) kept += value != 0;
    // Five standard deviations of a binomial distribution.
    CHECK(std::abs(kept / kCount - 0.75) < 5 * std::sqrt(0.25 * 0.75 / kCount));
    CHECK(masked({1, 0, 1}, 1, 0.25) == one);
    for (const auto& other : {masked({2, 0, 1}, 1, 0.25), masked({1, 0, 1}, 2, 0.25), masked({1, 4, 1}, 1, 0.25)}) {
      int64_t equal = 0;
      for (size_t i = 0; i < one.size(); ++i) equal += (one[i] == 0) == (other[i] == 0);
      CHECK(std::abs(static_cast<double>(equal) / kCount - 0.625) < 5 * std::sqrt(0.625 * 0.375 / kCount));
    }
    // The second of two ranks has sequences 1, 3, 5 and 7 of what one rank has.
    const std::vector<float> second = masked({1, 1, 2}, 1, 0.25), more = masked({1, 4, 1}, 1, 0.25);
    constexpr int64_t kSequence = 16 * kWidth;
    for (int64_t s = 0; s < 4; ++s) {
      const int64_t place = 2 * s + 1;
      const std::vector<float>& of = place < 4 ? one : more;
      CHECK(std::equal(second.begin() + s * kSequence, second.begin() + (s + 1) * kSequence,
                       of.begin() + place % 4 * kSequence));
    }
    const TestTensor none(*device, DType::kF32, {0, 4});
    const Position position(*device, {0, 0, 1});
    dropout(*device, {.x = none, .y = none, .position = position, .sequence_length = 1, .probability = 0.5});
    CHECK(none.guard_intact());
  }
}

TEST_CASE("dropout works in place", "[kernels][dropout]") {
  for (Device* device : devices()) {
    const std::vector<float> values = random_values(DType::kBF16, 24 * 20, 1);
    const TestTensor x(*device, DType::kBF16, {24, 20}, values), y(*device, DType::kBF16, {24, 20});
    const Position position(*device, {1, 2, 3});
    Dropout a = {.x = x, .y = y, .position = position, .sequence_length = 8, .probability = 0.3, .seed = kSeed};
    dropout(*device, a);
    a.y = x;
    dropout(*device, a);
    CHECK(x.host() == y.host());
  }
}

TEST_CASE("dropout refuses wrong arguments", "[kernels][dropout]") {
  Device& device = cpu_device();
  const TestTensor x(device, DType::kF32, {4, 4}), half(device, DType::kBF16, {4, 4}),
      wide(device, DType::kF32, {4, 8}), two(device, DType::kI32, {2});
  const Position position(device, {1, 0, 1});
  const auto message = [&](const TensorView& y, const TensorView& at, int64_t S, double p) {
    return internal_error(
        [&] { dropout(device, {.x = x, .y = y, .position = at, .sequence_length = S, .probability = p}); });
  };
  CHECK(contains(message(half, position, 4, 0.5), "dropout: y"));
  CHECK(contains(message(wide, position, 4, 0.5), "dropout: y"));
  CHECK(contains(message(x, two, 4, 0.5), "dropout: position"));
  CHECK(contains(message(x, position, 0, 0.5), "dropout: sequence_length is 0"));
  CHECK(contains(message(x, position, 4, 1.0), "dropout: probability is 1"));
}
