#pragma once
#include <algorithm>
#include <chrono>
#include <functional>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "engine/checkpoint/checkpoint.h"
#include "tests/engine/checkpoint_fixture.h"
#include "tests/support/thread_ranks.h"

// Ranks that save and load checkpoints together: threads here, each of which does what a process of a run does.
namespace parka::test {

// Calls body(rank) on `num_ranks` threads at once; what each threw.
inline std::vector<std::optional<Error>> on_ranks(int num_ranks, const std::function<void(int rank)>& body) {
  std::vector<std::optional<Error>> errors(static_cast<size_t>(num_ranks));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < num_ranks; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(rank);
      } catch (const Error& e) {
        errors[static_cast<size_t>(rank)] = e;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

// What the errors say, one line for each rank that had one.
inline std::string messages_of(const std::vector<std::optional<Error>>& errors) {
  std::string text;
  for (size_t rank = 0; rank < errors.size(); ++rank) {
    if (errors[rank]) text += fmt::format("on rank {}: {}\n", rank, errors[rank]->what());
  }
  return text;
}

// The same on ranks that have a communicator.
inline std::vector<std::optional<Error>> on_ranks(int num_ranks,
                                                  const std::function<void(Communicator& ranks)>& body) {
  std::vector<std::optional<Error>> errors(static_cast<size_t>(num_ranks));
  ThreadRanks(num_ranks).run([&](Communicator& ranks) {
    try {
      body(ranks);
    } catch (const Error& e) {
      errors[static_cast<size_t>(ranks.rank())] = e;
    }
  });
  return errors;
}

// Cuts every tensor into `num_ranks` pieces, at random places: some ranks have none of it, some all.
inline std::vector<CheckpointContents> split_contents(const CheckpointContents& whole, int num_ranks) {
  std::vector<CheckpointContents> parts(static_cast<size_t>(num_ranks));
  std::mt19937_64 random(static_cast<uint64_t>(num_ranks));
  for (CheckpointContents& part : parts) part.step = whole.step;
  parts[0].state = whole.state;
  for (const HostTensor& tensor : whole.tensors) {
    const int64_t numel = num_elements_of(tensor.shape), size = size_of(tensor.dtype);
    std::vector<int64_t> cuts{0, numel};
    for (int i = 1; i < num_ranks; ++i) {
      cuts.push_back(static_cast<int64_t>(random() % static_cast<uint64_t>(numel + 1)));
    }
    std::sort(cuts.begin(), cuts.end());
    for (size_t rank = 0; rank < parts.size(); ++rank) {
      const ElementRange range{cuts[rank], cuts[rank + 1]};
      parts[rank].tensors.push_back(
          {tensor.name,
           tensor.dtype,
           tensor.shape,
           {tensor.bytes.begin() + range.begin * size, tensor.bytes.begin() + range.end * size},
           ElementBox::flat(range, numel)});
    }
  }
  return parts;
}

inline SaveOptions options_of_rank(int rank, int num_ranks, const std::string& id) {
  SaveOptions options{.keep = 2, .max_shard_bytes = 100};
  options.group = {.rank = rank, .size = num_ranks, .id = id, .poll_interval = std::chrono::milliseconds(1)};
  return options;
}

using Adjust = std::function<void(int rank, SaveOptions& options)>;

// Saves `whole` from `num_ranks` threads that have a piece each; what each threw.
inline std::vector<std::optional<Error>> save_by_ranks(const std::string& run, const CheckpointContents& whole,
                                                       int num_ranks, const Adjust& adjust = {}) {
  const std::vector<CheckpointContents> parts = split_contents(whole, num_ranks);
  const std::string id = make_save_id();
  return on_ranks(num_ranks, [&](int rank) {
    SaveOptions options = options_of_rank(rank, num_ranks, id);
    if (adjust) adjust(rank, options);
    save_checkpoint(run, parts[static_cast<size_t>(rank)], options);
  });
}

}  // namespace parka::test
