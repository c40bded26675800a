#pragma once
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "data/data_order.h"
#include "data/token_files.h"

namespace parka {

// The images of a micro-batch of sequences, in the order of their slots, padded to a fixed number, so that plans
// and graphs of a step stay as they are.
struct ImageBatch {
  int64_t num_images = 0;       // that are there; the others are padding
  std::vector<uint8_t> pixels;  // [max_images, 3, size, size]; 0 in padding
  // [max_images, slots]: which token of the micro-batch [rows, S], counted through all rows, is the slot of each of
  // an image's tokens; -1 for those without one: beyond the end of a cut conversation, and in padding.
  std::vector<int32_t> positions;
};

// The images of these sequences, one for each row of a micro-batch; they have no more than `max_images`. Throws
// Error(kBadInput), naming the file, if the pixels of one are damaged, Error(kIo) if reading fails.
ImageBatch read_image_batch(const TokenFiles& files, const std::vector<int64_t>& sequences, int64_t max_images);

struct BatchLoaderOptions {
  int64_t seed = 0;  // of the data order
  bool shuffle = true;
  std::vector<double> weights = {};  // of a mixture: one for each source of the files
  int64_t global_batch = 1;          // sequences per step over all ranks: a multiple of world_size * micro_batch
  int64_t micro_batch = 1;           // sequences per MicroBatch
  int64_t rank = 0;
  int64_t world_size = 1;
  // A rank may take only a slice of each sequence: the one at place slice_rank of num_slices, which divides the
  // sequence length. Ranks with the same `rank` then share its sequences, and world_size counts their groups.
  int64_t slice_rank = 0;
  int64_t num_slices = 1;
  int64_t prefetch = 1;  // micro-batches kept ready
  // The room for images of each sequence, in data with images. MicroBatch::images is padded to micro_batch
  // times as many.
  int64_t images_per_sequence = 0;
  // Any position, also one that is not a multiple of global_batch: a run may change its batch size on resuming.
  DataPosition start = {};
};

struct MicroBatch {
  // [micro_batch, S / num_slices] each, see TokenFiles::Example.
  std::vector<int32_t> tokens, targets;
  // [micro_batch, S], of whole sequences; empty unless documents are separate
  std::vector<int32_t> first_keys;
  ImageBatch images;  // empty unless the data has images
  int64_t num_targets = 0;
  int64_t step_targets = 0;  // of all micro-batches of this rank in the same global batch
  DataPosition start;        // of the global batch that it is part of
  // The position to resume at if the run stops after this micro-batch: for the last one of a global batch the one
  // past that batch, for the others the position at which the batch starts (an unfinished step is done again).
  DataPosition after;
};

// Cuts rows of `row_length` into `num_slices` equal slices, and returns one slice of each row, one after the other.
std::vector<int32_t> slices_of(const std::vector<int32_t>& rows, int64_t row_length, int64_t slice,
                               int64_t num_slices);
// How many are not kIgnoreTarget.
int64_t count_targets(const std::vector<int32_t>& targets);

// Prefetches one rank's micro-batches in its own thread, in a fixed order: this rank's sequences of each global
// batch of DataOrder, cut into consecutive micro-batches. If sequences differ in their number of targets, the
// thread reads the tokens of all micro-batches of a step before it hands out the first; pixels it reads only for
// those that are kept ready. Only one thread may use a loader; `files` must outlive it.
class BatchLoader {
 public:
  // Throws Error(kBadInput) if the batch sizes do not divide, the data is smaller than one global batch,
  // `start` lies outside the data, a sequence has more images than there is room for, or the system allows no
  // further thread.
  BatchLoader(const TokenFiles& files, const BatchLoaderOptions& options);
  // Stops the thread: it ends after its current micro-batch or shuffle.
  ~BatchLoader();
  BatchLoader(const BatchLoader&) = delete;
  BatchLoader& operator=(const BatchLoader&) = delete;

  // The next micro-batch; waits for it if necessary. A failed read is thrown by the call that would have returned
  // that micro-batch, and by every later call.
  MicroBatch next();

  // Why one of the next `count` micro-batches, at most options.prefetch, cannot be read; null if all can. Waits
  // until that is known, which counts as waiting.
  std::exception_ptr failure_within(int64_t count);

  // Seconds that all calls of the two have spent waiting: the cost of reading data for the training loop.
  double wait_seconds() const { return wait_seconds_; }

 private:
  void wait_for(size_t count, std::unique_lock<std::mutex>& lock);
  void read_ahead();
  void read_batches();
  // For the micro-batch with this index, everything but the images, and the sequences of its rows.
  struct Rows {
    MicroBatch batch;
    std::vector<int64_t> sequences;
  };
  Rows read_rows(DataPosition batch_start, int64_t index);
  // Waits until the queue is not full. Returns false if the loader is being destroyed.
  bool push(MicroBatch batch);

  const TokenFiles& files_;
  const BatchLoaderOptions options_;
  DataOrder order_;  // of the thread, once it runs
  double wait_seconds_ = 0;

  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::deque<MicroBatch> ready_;
  std::exception_ptr error_;  // set once, when the thread has ended because of it
  bool stopping_ = false;

  std::thread thread_;
};

}  // namespace parka
