
#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>
#include <vector>

#include "data/batch_loader.h"
#include "data/data_order.h"
#include "tests/data/token_file_fixtures.h"
#include "tests/support/catch.h"

using namespace parka;
using namespace parka::test;

namespace {

std::vector<double> shares(const std::vector<double>& weights) {
  const double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
  std::vector<double> all;
  for (const double weight : weights) all.push_back(weight / sum);
  return all;
}

// Three sources of 5, 11 and 3 sequences in four files; every token of sequence i is i.
struct Corpus {
  TemporaryFolder folder;
  TokenFiles files = make();

  TokenFiles make() const {
    uint16_t sequence = 0;
    const std::vector<std::pair<std::string, int>> kFiles = {{"a-0", 2}, {"a-1", 3}, {"b", 11}, {"c", 3}};
    for (const auto& [name, count] : kFiles) {
      std::vector<uint16_t> ids;
      for (int i = 0; i < count; ++i) ids.insert(ids.end(), 4, sequence++);
      write_tokens(folder / name, ids);
    }
    return TokenFiles({folder / "a-*", folder / "b", folder / "c"}, TokenType::kUint16, 4, 100);
  }
};

const std::vector<double> kWeights = {0.25, 0.7, 0.05};

std::vector<int32_t> sequences_of(const MicroBatch& batch) {
  std::vector<int32_t> sequences;
  for (size_t i = 0; i < batch.tokens.size(); i += 4) sequences.push_back(batch.tokens[i]);
  return sequences;
}

// The sequences of each step, in the order of the whole batch.
std::vector<std::vector<int32_t>> steps_of(const TokenFiles& files, int64_t ranks, int64_t micro_batch,
                                           DataPosition start, int count) {
  constexpr int64_t kBatch = 8;
  std::vector<std::vector<int32_t>> steps(static_cast<size_t>(count), std::vector<int32_t>(kBatch));
  for (int64_t rank = 0; rank < ranks; ++rank) {
    BatchLoader loader(files, {.seed = 5,
                               .weights = kWeights,
                               .global_batch = kBatch,
                               .micro_batch = micro_batch,
                               .rank = rank,
                               .world_size = ranks,
                               .prefetch = 2,
                               .start = start});
    for (auto& step : steps) {
      for (int64_t nth = 0; nth < kBatch / ranks; nth += micro_batch) {
        const std::vector<int32_t> got = sequences_of(loader.next());
        for (int64_t i = 0; i < micro_batch; ++i) step[static_cast<size_t>(rank + (nth + i) * ranks)] = got[i];
      }
    }
  }
  return steps;
}

}  // namespace

TEST_CASE("sources keep to their weights at every moment", "[data][mixture]") {
  const std::vector<double> weights =
      GENERATE(std::vector<double>{1}, std::vector<double>{0.5, 0.5}, std::vector<double>{1, 2, 4},
               std::vector<double>{0.7, 0.1, 0.1, 0.05, 0.04, 0.01}, std::vector<double>{1e-6, 1, 1e-3, 3});
  const Mixture mixture(weights);
  const std::vector<double> share = shares(weights);
  std::vector<int64_t> counts(weights.size(), 0);
  const double bound = std::max(0.5 * static_cast<double>(weights.size()), 1.0);
  double worst = 0;
  int wrong = 0;
  constexpr int64_t kSequences = 300'000;
  for (int64_t n = 0; n < kSequences; ++n) {
    const Mixture::Draw draw = mixture.at(n);
    wrong += draw.source >= counts.size() || draw.index != counts[draw.source]++;
    for (size_t i = 0; i < counts.size(); ++i) {
      worst = std::max(worst, std::abs(static_cast<double>(counts[i]) - share[i] * static_cast<double>(n + 1)));
    }
    if (n % 10'007 == 0) wrong += mixture.counts(n + 1) != counts;
  }
  CHECK(wrong == 0);
  CHECK(worst <= bound);
  // Over the run: one token in 1e5.
  for (size_t i = 0; i < counts.size(); ++i) {
    CHECK(std::abs(static_cast<double>(counts[i]) / kSequences - share[i]) <= 1e-5);
  }
}

TEST_CASE("a mixture is exact far into a run", "[data][mixture]") {
  const std::vector<double> weights = {0.3, 0.6, 0.1};
  const Mixture mixture(weights);
  const int64_t n = (int64_t{1} << 52) + 12345;
  std::vector<int64_t> counts = mixture.counts(n);
  CHECK(std::accumulate(counts.begin(), counts.end(), int64_t{0}) == n);
  for (size_t i = 0; i < 3; ++i) {
    CHECK(std::abs(static_cast<double>(counts[i]) - weights[i] * static_cast<double>(n)) <= 2.0);
  }
  for (int64_t k = 0; k < 1000; ++k) {
    const Mixture::Draw draw = mixture.at(n + k);
    CHECK(draw.index == counts[draw.source]++);
  }
}

TEST_CASE("only ratios of weights count", "[data][mixture]") {
  const Mixture a({1, 3, 4}), b({0.125, 0.375, 0.5}), c({2e20, 6e20, 8e20});
  int wrong = 0;
  for (int64_t n = 0; n < 1000; ++n) wrong += !(a.at(n) == b.at(n) && a.at(n) == c.at(n));
  CHECK(wrong == 0);
  CHECK((a.parts() == b.parts() && a.parts() == c.parts()));
  CHECK(a.parts() == std::vector<double>{0.125, 3.0 / 7, 1});
}

TEST_CASE("mixtures have the same parts where the same integers draw, and nowhere else", "[data][mixture]") {
  const double small = std::ldexp(1.0, -20), above = std::nextafter(small, 1);  // by 2^-72, less than a take's unit
  CHECK(Mixture({above, 1 - small}).parts() == std::vector<double>{small, 1});
  CHECK(Mixture({std::nextafter(0.5, 1), 0.5}).parts() == std::vector<double>{0.5 + std::ldexp(1.0, -53), 1});
}

TEST_CASE("weights that are not positive numbers are refused", "[data][mixture]") {
  for (const double bad :
       {0.0, -1.0, std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
    const Error error = error_of([&] { Mixture({1, bad}); });
    CHECK((error.code() == ExitCode::kBadInput && contains(error, "is not a positive number")));
  }
  CHECK(error_of([] { Mixture({}); }).code() == ExitCode::kBadInput);
}

TEST_CASE("a mixture goes through each source in orders of its own", "[data][mixture]") {
  const Corpus corpus;
  const std::vector<int64_t> first = {0, 5, 16}, size = {5, 11, 3};
  REQUIRE(corpus.files.source_sequences() == size);
  std::vector<std::vector<int32_t>> of_source(3);
  for (const auto& step : steps_of(corpus.files, 1, 8, {}, 40)) {
    for (const int32_t sequence : step) {
      of_source[sequence < 5 ? 0 : sequence < 16 ? 1 : 2].push_back(sequence);
    }
  }
  // 320 sequences: 80 of the first source, 16 epochs; 224 of the second; 16 of the third.
  CHECK((of_source[0].size() == 80 && of_source[1].size() == 224 && of_source[2].size() == 16));
  int wrong = 0;
  for (size_t source = 0; source < 3; ++source) {
    const SampleOrder order(size[source], 5 + (static_cast<int64_t>(source) << 32), true);
    const auto per_epoch = static_cast<size_t>(size[source]);
    for (size_t i = 0; i < of_source[source].size(); ++i) {
      const std::vector<uint32_t> epoch = order.epoch(static_cast<int64_t>(i / per_epoch));
      wrong += of_source[source][i] != first[source] + epoch[i % per_epoch];
    }
  }
  CHECK(wrong == 0);
}

TEST_CASE("a mixture is the same on any number of ranks and from any step on", "[data][mixture]") {
  const Corpus corpus;
  constexpr int kSteps = 12;
  const auto straight = steps_of(corpus.files, 1, 8, {}, kSteps);
  for (const auto& [ranks, micro_batch] :
       std::vector<std::pair<int64_t, int64_t>>{{1, 2}, {2, 4}, {4, 1}, {8, 1}}) {
    CAPTURE(ranks, micro_batch);
    CHECK(steps_of(corpus.files, ranks, micro_batch, {}, kSteps) == straight);
    for (int stop = 1; stop < kSteps; ++stop) {
      const auto rest = steps_of(corpus.files, ranks, micro_batch, {0, 8 * stop}, kSteps - stop);
      CHECK(std::equal(rest.begin(), rest.end(), straight.begin() + stop, straight.end()));
    }
  }
  BatchLoader loader(corpus.files, {.seed = 5, .weights = kWeights, .global_batch = 8, .micro_batch = 4});
  CHECK((loader.next().after == DataPosition{0, 0}));
  CHECK((loader.next().after == DataPosition{0, 8}));
}

TEST_CASE("without weights several sources are one, in OLMo's order", "[data][mixture]") {
  const Corpus corpus;
  BatchLoader loader(corpus.files, {.seed = 6198, .global_batch = 19, .micro_batch = 19});
  const std::vector<uint32_t> order = SampleOrder(19, 6198, true).epoch(0);
  CHECK(sequences_of(loader.next()) == std::vector<int32_t>(order.begin(), order.end()));
}

TEST_CASE("orders of epochs that are made ahead are the same", "[data][mixture]") {
  constexpr int64_t kLarge = 70'000, kSmall = 100, kBatch = 7;
  const bool mixed = GENERATE(true, false);
  const std::vector<double> weights = mixed ? std::vector<double>{0.9, 0.1} : std::vector<double>{};
  DataOrder order({kLarge, kSmall}, 3, true, weights);
  const Mixture mixture({0.9, 0.1});
  const std::vector<SampleOrder> of_source = {SampleOrder(mixed ? kLarge : kLarge + kSmall, 3, true),
                                              SampleOrder(kSmall, 3 + (int64_t{1} << 32), true)};
  std::vector<int64_t> epochs = {-1, -1};
  std::vector<std::vector<uint32_t>> entries(2);
  int wrong = 0;
  DataPosition position;
  for (int step = 0; step < 25'000; ++step) {  // over two epochs of the large source
    position = order.batch_start(position, kBatch);
    for (int64_t i = 0; i < kBatch; i += 3) {
      Mixture::Draw draw{0, position.consumed + i};
      int64_t epoch = position.epoch, index = draw.index;
      if (mixed) {
        draw = mixture.at(position.consumed + i);
        const int64_t size = draw.source == 0 ? kLarge : kSmall;
        epoch = draw.index / size;
        index = draw.index % size;
      }
      if (epochs[draw.source] != epoch) entries[draw.source] = of_source[draw.source].epoch(epoch);
      epochs[draw.source] = epoch;
      const int64_t want = entries[draw.source][static_cast<size_t>(index)] + (draw.source == 1 ? kLarge : 0);
      wrong += order.sequence(position, i) != want;
    }
    position.consumed += kBatch;
  }
  CHECK(wrong == 0);
  CHECK(epochs[0] == 2);
}

TEST_CASE("mixtures that cannot be made are refused", "[data][mixture]") {
  const Corpus corpus;
  const auto refused = [&](const BatchLoaderOptions& options) {
    return error_of([&] { BatchLoader(corpus.files, options); });
  };
  CHECK(contains(refused({.weights = {1, 2}}), "data.weights has 2 numbers, but data.train has 3 entries"));
  CHECK(contains(refused({.weights = kWeights, .start = {1, 0}}), "cannot continue at sequence 0 of epoch 1 of a"));
  CHECK(contains(refused({.seed = -1, .weights = kWeights}), "data.seed is -1"));
}

TEST_CASE("the loader counts the targets of its step before it hands out a part of it", "[data][mixture]") {
  const TemporaryFolder folder;
  write_tokens(folder / "t.npy", std::vector<uint16_t>(16 * 4, 1));
  std::string marks(16 * 4, '\0');
  for (size_t i = 0; i < 16; ++i) {  // sequence i has i % 4 targets
    for (size_t t = 0; t < i % 4; ++t) marks[4 * i + 1 + t] = '\1';
  }
  write_file(folder / "t.npy.mask", marks);
  const TokenFiles files({folder / "t.npy"}, TokenType::kUint16, 4, 10, {.loss_mask = true});
  for (int64_t rank = 0; rank < 2; ++rank) {
    BatchLoader loader(
        files,
        {.shuffle = false, .global_batch = 8, .micro_batch = 2, .rank = rank, .world_size = 2, .prefetch = 1});
    for (int step = 0; step < 3; ++step) {
      int64_t sum = 0;
      for (int i = 0; i < 2; ++i) {
        const MicroBatch batch = loader.next();
        CHECK(batch.step_targets == (rank == 0 ? 4 : 8));  // sequences 0, 2, 4, 6 or 1, 3, 5, 7
        sum += batch.num_targets;
      }
      CHECK(sum == (rank == 0 ? 4 : 8));
    }
  }
}
