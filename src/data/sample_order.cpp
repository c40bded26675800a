#include "data/sample_order.h"

#include <numeric>

#include "core/error.h"
#include "data/numpy_generator.h"

namespace parka {

SampleOrder::SampleOrder(int64_t num_sequences, int64_t seed, bool shuffle)
    : num_sequences_(num_sequences), seed_(seed), shuffle_(shuffle) {
  if (seed < 0) throw_bad_input("data.seed is {}; give a non-negative number", seed);
  if (num_sequences > int64_t{1} << 32) {
    throw_bad_input("the data has {} sequences, more than the 2^32 that an epoch can hold; list fewer token files",
                    num_sequences);
  }
}

std::vector<uint32_t> SampleOrder::epoch(int64_t epoch) const {
  PARKA_REQUIRE(epoch >= 0);
  std::vector<uint32_t> order(static_cast<size_t>(num_sequences_));
  std::iota(order.begin(), order.end(), 0u);
  if (shuffle_) NumpyGenerator(static_cast<uint64_t>(seed_) + static_cast<uint64_t>(epoch)).shuffle(order);
  return order;
}

DataPosition SampleOrder::batch_start(DataPosition position, int64_t global_batch) const {
  PARKA_REQUIRE(global_batch > 0);
  if (num_sequences_ < global_batch) {
    throw_bad_input(
        "the data has {} sequences, fewer than one global batch of {}; give more data or lower "
        "training.global_batch_size",
        num_sequences_, global_batch);
  }
  if (position.epoch < 0 || position.consumed < 0 || position.consumed > num_sequences_) {
    throw_bad_input(
        "cannot continue at sequence {} of epoch {}: the data has {} sequences; resume with the data that "
        "the checkpoint was trained on",
        position.consumed, position.epoch, num_sequences_);
  }
  if (num_sequences_ - position.consumed >= global_batch) return position;
  return {.epoch = position.epoch + 1, .consumed = 0};
}

}  // namespace parka
