#pragma once
#include <cstdint>
#include <future>
#include <optional>
#include <vector>

#include "data/mixture.h"
#include "data/sample_order.h"

namespace parka {

// Which sequences of a list of sources a run trains on, in order: those of all sources shuffled together, epoch by
// epoch (SampleOrder, OLMo's order), or a Mixture of them by weight. In a mixture each source is gone through in an
// order of its own, that of a SampleOrder with the seed plus 2^32 times the number of the source, and begins its
// next epoch wherever it runs out; DataPosition::epoch is 0 for good and `consumed` counts the sequences of the
// run.
//
// Not to be used by several threads: it keeps the orders of the epochs at hand, 4 bytes for each sequence. The next
// epoch's is made in a thread of its own while the last quarter of an epoch is read, as shuffling takes seconds for
// 10^8 sequences; where the sequences are more than 2^28 that memory is not taken, and the order is made when it is
// needed.
class DataOrder {
 public:
  // `weights`: one for each source, or none. Throws Error(kBadInput) as SampleOrder and Mixture do.
  DataOrder(const std::vector<int64_t>& source_sequences, int64_t seed, bool shuffle,
            const std::vector<double>& weights);

  // Where the next whole global batch starts, see SampleOrder::batch_start; in a mixture always at `position`.
  DataPosition batch_start(DataPosition position, int64_t global_batch) const;

  // The sequence that entry `entry` of the batch at `start` is. Quick for entries that follow each other, with gaps
  // or without.
  int64_t sequence(DataPosition start, int64_t entry);

 private:
  struct Source {
    SampleOrder order;
    int64_t first_sequence, num_sequences;
    int64_t epoch = -1;
    std::vector<uint32_t> of_epoch = {};
    std::future<std::vector<uint32_t>> of_next_epoch = {};

    int64_t at(int64_t wanted_epoch, int64_t index);
  };

  std::vector<Source> sources_;  // a single one of everything where there is no mixture
  std::optional<Mixture> mixture_;
};

}  // namespace parka
