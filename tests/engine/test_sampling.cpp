#include "engine/evaluation/generator.h"

#include <cmath>
#include <map>

#include "core/error.h"
#include "tests/support/catch.h"

using namespace parka;

namespace {

constexpr int64_t kDraws = 20000;

// How often each token was drawn.
std::map<int32_t, int64_t> draw(const std::vector<float>& logits, const SamplingOptions& options) {
  std::map<int32_t, int64_t> counts;
  for (int64_t i = 0; i < kDraws; ++i) ++counts[sample_token(logits, options, 0, static_cast<uint64_t>(i))];
  return counts;
}

// Whether the counts are within five standard deviations of those expected, and there are no others.
bool agrees(const std::map<int32_t, int64_t>& counts, const std::map<int32_t, double>& probability) {
  for (const auto& [token, count] : counts) {
    if (!probability.contains(token)) return false;
  }
  for (const auto& [token, p] : probability) {
    const double want = p * static_cast<double>(kDraws), deviation = std::sqrt(want * (1 - p));
    const double got = counts.contains(token) ? static_cast<double>(counts.at(token)) : 0.0;
    if (std::abs(got - want) > 5 * deviation) return false;
  }
  return true;
}

// Tokens 2, 0, 3, 1 in falling order of probability.
const std::vector<float> kLogits = {std::log(0.3f), std::log(0.05f), std::log(0.5f), std::log(0.15f)};

}  // namespace

TEST_CASE("tokens are drawn with their probabilities", "[engine][sampling]") {
  CHECK(agrees(draw(kLogits, {.temperature = 1}), {{0, 0.3}, {1, 0.05}, {2, 0.5}, {3, 0.15}}));
  // Squares of the probabilities, over their sum.
  const double sum = 0.09 + 0.0025 + 0.25 + 0.0225;
  CHECK(agrees(draw(kLogits, {.temperature = 0.5}),
               {{0, 0.09 / sum}, {1, 0.0025 / sum}, {2, 0.25 / sum}, {3, 0.0225 / sum}}));
}

TEST_CASE("top-k and top-p leave the most likely tokens", "[engine][sampling]") {
  CHECK(agrees(draw(kLogits, {.temperature = 1, .top_k = 2}), {{0, 0.3 / 0.8}, {2, 0.5 / 0.8}}));
  CHECK(agrees(draw(kLogits, {.temperature = 1, .top_k = 9}), {{0, 0.3}, {1, 0.05}, {2, 0.5}, {3, 0.15}}));
  // 0.5 is not 0.6 yet; with the next it is.
  CHECK(agrees(draw(kLogits, {.temperature = 1, .top_p = 0.6}), {{0, 0.3 / 0.8}, {2, 0.5 / 0.8}}));
  CHECK(agrees(draw(kLogits, {.temperature = 1, .top_p = 0.4}), {{2, 1.0}}));
  CHECK(agrees(draw(kLogits, {.temperature = 1, .top_p = 0}), {{2, 1.0}}));
  // Of the three that top-k leaves, 0.5 / 0.95 is less than 0.55, and 0.8 / 0.95 more than that.
  CHECK(agrees(draw(kLogits, {.temperature = 1, .top_k = 3, .top_p = 0.55}), {{0, 0.3 / 0.8}, {2, 0.5 / 0.8}}));
}

TEST_CASE("at temperature 0 the first of the most likely tokens is taken", "[engine][sampling]") {
  CHECK(sample_token({1, 3, -2, 3}, {.temperature = 0}, 0, 0) == 1);
  CHECK(sample_token({1, 3, -2, 3}, {.temperature = 1e-300}, 0, 7) >= 1);  // no overflow: one of the two
  CHECK(sample_token({1, 3, -2, 3}, {.temperature = 1, .top_k = 1}, 0, 0) == 1);
}

TEST_CASE("draws depend on seed, stream and index alone", "[engine][sampling]") {
  const std::vector<float> flat(1000, 0.0f);
  const auto one = [&](int64_t seed, uint64_t stream, uint64_t index) {
    return sample_token(flat, {.temperature = 1, .seed = seed}, stream, index);
  };
  CHECK(one(1, 2, 3) == one(1, 2, 3));
  CHECK(one(1, 2, 3) != one(2, 2, 3));
  CHECK(one(1, 2, 3) != one(1, 3, 3));
  CHECK(one(1, 2, 3) != one(1, 2, 4));
}

TEST_CASE("logits that are not finite are refused", "[engine][sampling]") {
  for (const float bad : {NAN, INFINITY}) {
    try {
      sample_token({0, bad}, {.temperature = 0}, 0, 0);
      FAIL("nothing was thrown");
    } catch (const Error& error) {
      CHECK(error.code() == ExitCode::kNonFinite);
      CHECK(std::string(error.what()).find("token 1") != std::string::npos);
    }
  }
}
