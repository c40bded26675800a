#pragma once
#include <cstdint>
#include <vector>

namespace parka {

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

  // Where the next whole global batch starts: at `position`, or at the next epoch if fewer than `global_batch`
  // sequences are left in this one (they are dropped, as OLMo's drop_last does). Throws Error(kBadInput) if the
  // data is smaller than one global batch or `position` lies outside of it.
  DataPosition batch_start(DataPosition position, int64_t global_batch) const;

 private:
  int64_t num_sequences_;
  int64_t seed_;
  bool shuffle_;
};

}  // namespace parka
