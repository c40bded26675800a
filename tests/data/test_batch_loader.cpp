#include "data/batch_loader.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "tests/data/token_file_fixtures.h"
#include "tests/support/catch.h"
#include "tests/support/no_threads.h"

using namespace parka;
using namespace parka::test;

namespace {

constexpr int64_t kSequence = 8;

// Three files of 13, 1 and 9 sequences with remainders between them; every token of sequence i is i.
struct Corpus {
  static constexpr int64_t kNumSequences = 23;

  TemporaryFolder folder;
  TokenFiles files = make();

  TokenFiles make() const {
    std::vector<std::string> paths;
    uint16_t sequence = 0;
    for (const int count : {13, 1, 9}) {
      std::vector<uint16_t> ids;
      for (int i = 0; i < count; ++i) ids.insert(ids.end(), kSequence, sequence++);
      ids.insert(ids.end(), 3, 999);
      paths.push_back(folder / std::to_string(count));
      write_tokens(paths.back(), ids);
    }
    return TokenFiles(paths, TokenType::kUint16, kSequence, 1000);
  }
};

// The sequences of a micro-batch, or -1 where a row is not one whole sequence.
std::vector<int64_t> sequences_of(const MicroBatch& batch) {
  std::vector<int64_t> sequences;
  for (size_t i = 0; i + kSequence <= batch.tokens.size(); i += kSequence) {
    const auto row = batch.tokens.begin() + static_cast<int64_t>(i);
    const bool whole = std::all_of(row, row + kSequence, [&](int32_t id) { return id == *row; });
    sequences.push_back(whole ? *row : -1);
  }
  return sequences;
}

struct Read {
  std::vector<int64_t> sequences;
  DataPosition start, after;
  bool operator==(const Read&) const = default;
};

std::vector<Read> read_micro_batches(const TokenFiles& files, const BatchLoaderOptions& options, int count) {
  BatchLoader loader(files, options);
  std::vector<Read> reads;
  for (int i = 0; i < count; ++i) {
    const MicroBatch batch = loader.next();
    reads.push_back({sequences_of(batch), batch.start, batch.after});
  }
  return reads;
}

}  // namespace

TEST_CASE("micro-batches follow the order through files and epochs", "[data][batch_loader]") {
  const Corpus corpus;
  const int64_t prefetch = GENERATE(1, 3, 100);
  const BatchLoaderOptions options{.seed = 6198, .global_batch = 6, .micro_batch = 2, .prefetch = prefetch};
  const std::vector<Read> reads = read_micro_batches(corpus.files, options, 5 * 3);  // 3 steps, new epoch, 2 steps
  const SampleOrder order(Corpus::kNumSequences, 6198, true);
  int wrong = 0;
  for (int i = 0; i < 15; ++i) {
    const int64_t step = i / 3, micro = i % 3, epoch = step / 3, first = step % 3 * 6;
    const std::vector<uint32_t> entries = order.epoch(epoch);
    const auto begin = entries.begin() + first + micro * 2;
    const Read want{{begin, begin + 2}, {epoch, first}, {epoch, micro == 2 ? first + 6 : first}};
    wrong += !(reads[static_cast<size_t>(i)] == want);
  }
  CHECK(wrong == 0);
}

TEST_CASE("resuming after any micro-batch continues as if never stopped", "[data][batch_loader]") {
  const Corpus corpus;
  const bool shuffle = GENERATE(true, false);
  const BatchLoaderOptions options{
      .seed = 3, .shuffle = shuffle, .global_batch = 6, .micro_batch = 2, .prefetch = 2, .start = {2, 4}};
  constexpr int kCount = 24;  // 8 steps over three epochs, from an offset that is no multiple of the batch
  const std::vector<Read> straight = read_micro_batches(corpus.files, options, kCount);
  int wrong = 0;
  for (int stop = 1; stop < kCount; ++stop) {
    BatchLoaderOptions resumed = options;
    resumed.start = straight[static_cast<size_t>(stop - 1)].after;
    const int finished = stop / 3 * 3;  // micro-batches of whole steps
    const std::vector<Read> rest = read_micro_batches(corpus.files, resumed, kCount - finished);
    wrong += !std::equal(rest.begin(), rest.end(), straight.begin() + finished, straight.end());
  }
  CHECK(wrong == 0);
  CHECK(
      (straight.back().after == DataPosition{4, 12}));  // 3 steps of epoch 2 (22 of 23), 3 of epoch 3, 2 of epoch 4
}

TEST_CASE("the number of ranks does not change what a step trains on", "[data][batch_loader]") {
  const Corpus corpus;
  constexpr int kSteps = 5;
  const auto [world_size, micro_batch] =
      GENERATE(table<int64_t, int64_t>({{1, 8}, {1, 2}, {2, 2}, {2, 4}, {4, 1}}));
  CAPTURE(world_size, micro_batch);
  const SampleOrder order(Corpus::kNumSequences, 6198, true);
  const int64_t per_rank = 8 / world_size, num_micro_batches = per_rank / micro_batch;
  int wrong = 0;
  for (int64_t rank = 0; rank < world_size; ++rank) {
    const BatchLoaderOptions options{.seed = 6198,
                                     .global_batch = 8,
                                     .micro_batch = micro_batch,
                                     .rank = rank,
                                     .world_size = world_size,
                                     .prefetch = 3};
    BatchLoader loader(corpus.files, options);
    for (int64_t step = 0; step < kSteps; ++step) {
      const std::vector<uint32_t> entries = order.epoch(step / 2);  // 23 sequences make two steps of 8
      std::vector<int64_t> got, want;
      for (int64_t i = 0; i < num_micro_batches; ++i) {
        const std::vector<int64_t> part = sequences_of(loader.next());
        got.insert(got.end(), part.begin(), part.end());
      }
      for (int64_t i = 0; i < per_rank; ++i) {
        want.push_back(entries[static_cast<size_t>(step % 2 * 8 + rank + i * world_size)]);
      }
      wrong += got != want;
    }
  }
  CHECK(wrong == 0);
}

TEST_CASE("an epoch reads no sequence twice", "[data][batch_loader]") {
  const Corpus corpus;
  const BatchLoaderOptions options{.seed = 1, .global_batch = 2, .micro_batch = 1, .prefetch = 2};
  std::set<int64_t> seen;
  for (const Read& read : read_micro_batches(corpus.files, options, 22)) seen.insert(read.sequences.at(0));
  CHECK((seen.size() == 22 && *seen.begin() >= 0));
}

TEST_CASE("a bad token is reported by the call that would have returned it, and after", "[data][batch_loader]") {
  const TemporaryFolder folder;
  constexpr int64_t kLong = 1000;
  std::vector<uint16_t> ids(30 * kLong, 5);
  ids[13 * kLong + 2] = 1000;  // on none of the pages that are looked at when a file is opened
  write_tokens(folder / "t.npy", ids);
  const TokenFiles files({folder / "t.npy"}, TokenType::kUint16, kLong, 1000);
  const int64_t prefetch = GENERATE(1, 100);
  BatchLoader loader(files, {.shuffle = false, .global_batch = 4, .micro_batch = 2, .prefetch = prefetch});
  // So that with room for all the reader has most likely failed already: what it read before must not be lost.
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  for (int i = 0; i < 6; ++i) CHECK(loader.next().tokens == std::vector<int32_t>(2 * kLong, 5));
  for (int call = 0; call < 2; ++call) {
    const Error error = error_of([&] { loader.next(); });
    CHECK(error.code() == ExitCode::kBadInput);
    CHECK(contains(error, folder / "t.npy" + ": token 13002 is id 1000"));
  }
}

TEST_CASE("a loader can be destroyed at any moment", "[data][batch_loader]") {
  const Corpus corpus;
  int short_batches = 0;
  for (int round = 0; round < 60; ++round) {
    BatchLoader loader(corpus.files, {.global_batch = 4, .micro_batch = 2, .prefetch = 1 + round % 3});
    for (int i = 0; i < round % 5; ++i) short_batches += loader.next().tokens.size() != 2 * kSequence;
  }
  CHECK(short_batches == 0);
}

TEST_CASE("waiting is counted and is part of the time that passes", "[data][batch_loader]") {
  const TemporaryFolder folder;
  write_tokens(folder / "t.npy", std::vector<uint16_t>(64 * 2048, 1));
  const TokenFiles files({folder / "t.npy"}, TokenType::kUint16, 2048, 10);
  const auto begin = std::chrono::steady_clock::now();
  BatchLoader loader(files, {.global_batch = 64, .micro_batch = 64, .prefetch = 1});
  CHECK(loader.wait_seconds() == 0);
  for (int i = 0; i < 100; ++i) loader.next();  // far faster than 64 sequences can be read
  const double elapsed = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  CHECK((loader.wait_seconds() > 0 && loader.wait_seconds() <= elapsed));
}

TEST_CASE("batches that cannot be made are refused at once", "[data][batch_loader]") {
  const Corpus corpus;
  const auto [options, message] = GENERATE(table<BatchLoaderOptions, std::string>({
      {{.global_batch = 24, .micro_batch = 4}, "23 sequences, fewer than one global batch of 24"},
      {{.seed = -1}, "data.seed is -1"},
      {{.start = {0, 24}}, "cannot continue at sequence 24 of epoch 0: the data has 23 sequences"},
  }));
  CAPTURE(message);
  const Error error = error_of([&, o = options] { BatchLoader(corpus.files, o); });
  CHECK(error.code() == ExitCode::kBadInput);
  CHECK(contains(error, message));
}

TEST_CASE("Where no thread can be made a loader says so, and leaves nothing behind", "[batch_loader]") {
  const Corpus corpus;
  std::string message;
  try {
    const NoThreads no_threads;
    const BatchLoader loader(corpus.files, {});
  } catch (const Error& error) {
    message = error.what();
  }
  CHECK(message.find("cannot start the thread that reads the data") == 0);
}

TEST_CASE("ranks that share sequences get their slices, and the targets of these", "[data][batch_loader]") {
  constexpr int64_t kLength = 12, kCount = 10;
  const TemporaryFolder folder;
  std::vector<uint16_t> ids;
  for (int64_t i = 0; i < kCount * kLength; ++i) ids.push_back(static_cast<uint16_t>(i % 97 == 5 ? 0 : i % 97 + 1));
  write_tokens(folder / "tokens", ids);
  const bool separate = GENERATE(false, true);
  ExampleRules rules;
  rules.separate_documents = separate;
  if (separate) rules.document_ids.end = 0;
  const TokenFiles files({folder / "tokens"}, TokenType::kUint16, kLength, 1000, rules);
  for (const int64_t slices : {2, 3, 4}) {
    const BatchLoaderOptions whole_options{
        .seed = 4, .global_batch = 4, .micro_batch = 2, .rank = 1, .world_size = 2};
    BatchLoader whole_loader(files, whole_options);
    std::vector<std::unique_ptr<BatchLoader>> loaders;
    for (int64_t slice = 0; slice < slices; ++slice) {
      BatchLoaderOptions options = whole_options;
      options.slice_rank = slice;
      options.num_slices = slices;
      loaders.push_back(std::make_unique<BatchLoader>(files, options));
    }
    for (int i = 0; i < 4; ++i) {
      CAPTURE(separate, slices, i);
      const MicroBatch whole = whole_loader.next();
      int64_t num_targets = 0, step_targets = 0;
      for (int64_t slice = 0; slice < slices; ++slice) {
        const MicroBatch part = loaders[static_cast<size_t>(slice)]->next();
        const int64_t length = kLength / slices;
        REQUIRE(part.tokens.size() == static_cast<size_t>(2 * length));
        int64_t wrong = 0;
        for (int64_t t = 0; t < 2 * length; ++t) {
          const auto at = static_cast<size_t>(t / length * kLength + slice * length + t % length);
          wrong += part.tokens[static_cast<size_t>(t)] != whole.tokens[at];
          wrong += part.targets[static_cast<size_t>(t)] != whole.targets[at];
        }
        CHECK(wrong == 0);
        CHECK(part.first_keys == whole.first_keys);
        CHECK((part.start == whole.start && part.after == whole.after));
        num_targets += part.num_targets;
        step_targets += part.step_targets;
      }
      CHECK(num_targets == whole.num_targets);
      CHECK(step_targets == whole.step_targets);
    }
  }
  const BatchLoaderOptions options{.global_batch = 4, .micro_batch = 2, .num_slices = 5};
  CHECK_THROWS_AS(BatchLoader(files, options), Error);  // 12 tokens in 5 slices
}
