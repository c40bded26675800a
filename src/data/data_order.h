#pragma once
#include <cstddef>
#include <cstdint>
#include <future>
#include <optional>
#include <span>
#include <vector>

namespace parka {

// Which source each sequence of a run comes from. At every moment the share of each source is exact to within half
// a sequence for each split that leads to it: less than half the number of sources, and less than one sequence for
// three sources or fewer.
//
// The first source takes round(share * n) of the first n sequences. The second takes its share of the rest in the
// same way, and so on. That is a function of n alone, in integers: a run may be resumed anywhere, on any number of
// ranks, and the same weights give the same sequence on any machine.
class Mixture {
 public:
  // Only the ratios of the weights count. Throws Error(kBadInput) if there are none, or one is not positive.
  explicit Mixture(const std::vector<double>& weights);

  // Each source's part of what the sources before it leave, exactly as it is used: mixtures of the same parts
  // draw the same sequence. They are no weights.
  std::vector<double> parts() const;

  // Sequence n of the run: the `index`-th one, from 0, that `source` gives.
  struct Draw {
    size_t source;
    int64_t index;
    bool operator==(const Draw&) const = default;
  };
  Draw at(int64_t n) const;

  // How many of the first n sequences each source gives.
  std::vector<int64_t> counts(int64_t n) const;

 private:
  std::vector<uint64_t> takes_;  // of what the sources before leave, in units of 2^-62; the last takes all
};

// The position of a run in its data.
struct DataPosition {
  int64_t epoch = 0;
  int64_t consumed = 0;  // sequences of this epoch's order that all ranks together have trained on
  bool operator==(const DataPosition&) const = default;
};

// The order in which a run reads its sequences: exactly OLMo's.
//
// Epoch e reads numpy's Generator(PCG64(seed + e)).shuffle(arange(num_sequences, dtype=uint32)), or file order
// without shuffling. A global batch is the next `global_batch` entries of it; rank r of W trains on entries
// r, r + W, r + 2W, ... of the batch, so the number of ranks changes who computes a sequence, never which step
// does.
class SampleOrder {
 public:
  // Throws Error(kBadInput) if the seed is negative or there are more than 2^32 sequences (OLMo's own limit).
  SampleOrder(int64_t num_sequences, int64_t seed, bool shuffle);

  // The sequence numbers of an epoch in order: 4 bytes for every sequence of the data.
  std::vector<uint32_t> epoch(int64_t epoch) const;

  // The start of the next whole global batch: at `position`, or at the next epoch if fewer than `global_batch`
  // sequences are left in this one (they are dropped, as OLMo's drop_last does). Throws Error(kBadInput) if the
  // data is smaller than one global batch or `position` lies outside of it.
  DataPosition batch_start(DataPosition position, int64_t global_batch) const;

 private:
  int64_t num_sequences_;
  int64_t seed_;
  bool shuffle_;
};

// The part of numpy.random.Generator(PCG64(seed)) that shuffling needs, with the same stream of numbers. So a run
// reads its data in the same order as OLMo's trainer.
//
// PCG64 is pcg_setseq_128_xsl_rr_64 of O'Neill, "PCG: A family of simple fast space-efficient statistically good
// algorithms for random number generation" (2014). Its state is seeded from numpy's SeedSequence.
class NumpyGenerator {
 public:
  explicit NumpyGenerator(uint64_t seed);

  // A uniform number in [0, max]: 32-bit draws, masked to the bits of max, until one is not above it. (numpy's
  // random_interval(), which shuffle() uses; integers() uses Lemire's method and gives other numbers.)
  uint32_t interval(uint32_t max);

  // Generator.shuffle() of a one-dimensional array: Fisher-Yates from the last element down.
  // Throws Error(kInternal) for more than 2^32 values.
  void shuffle(std::span<uint32_t> values);

 private:
  __extension__ using Uint128 = unsigned __int128;  // not ISO C++, but known to every compiler of 64-bit targets

  uint64_t next_uint64();
  uint32_t next_uint32();
  void advance();

  Uint128 state_ = 0;
  Uint128 increment_ = 0;
  uint32_t spare_ = 0;  // upper half of the last 64-bit draw
  bool has_spare_ = false;
};

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

  // The start of the next whole global batch, see SampleOrder::batch_start; in a mixture always `position`.
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
