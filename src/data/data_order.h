#pragma once
#include <cstdint>
#include <future>
#include <optional>
#include <vector>

#include "data/mixture.h"
#include "data/sample_order.h"

namespace parka {

// The order in which a run trains on the sequences of a list of sources. Either all sources are shuffled together,
// epoch by epoch (SampleOrder, OLMo's order), or they are a Mixture by weight. In a mixture each source has its own
// order, that of a SampleOrder with the seed plus 2^32 times the number of the source, and begins its next epoch
// when it runs out. DataPosition::epoch is then always 0, and `consumed` counts the sequences of the run.
//
// Only one thread may use it. It keeps the orders of the current epochs, 4 bytes for each sequence. Shuffling takes
// seconds for 10^8 sequences, so another thread prepares the next epoch's order while the last quarter of an epoch
// is read. With more than 2^28 sequences it does not, to save memory, and the order is made when it is needed.
class DataOrder {
 public:
  // `weights`: one for each source, or none. Throws Error(kBadInput) as SampleOrder and Mixture do.
  DataOrder(const std::vector<int64_t>& source_sequences, int64_t seed, bool shuffle,
            const std::vector<double>& weights);

  // Where the next whole global batch starts, see SampleOrder::batch_start; in a mixture always at `position`.
  DataPosition batch_start(DataPosition position, int64_t global_batch) const;

  // The sequence at entry `entry` of the batch at `start`. Fast if the entries of consecutive calls increase.
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
