#include "data/batch_loader.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "core/error.h"
#include "core/ignored_target.h"
#include "core/parallel.h"

namespace parka {
namespace {

void check_options(const BatchLoaderOptions& o, const TokenFiles& files) {
  PARKA_REQUIRE(o.world_size > 0 && o.rank >= 0 && o.rank < o.world_size);
  // Refused with the config, too. Divided step by step, because the product of two large numbers may overflow.
  PARKA_REQUIRE(o.global_batch > 0 && o.micro_batch > 0 && o.global_batch % o.world_size == 0 &&
                o.global_batch / o.world_size % o.micro_batch == 0);
  PARKA_REQUIRE(o.num_slices > 0 && o.slice_rank >= 0 && o.slice_rank < o.num_slices);
  PARKA_REQUIRE(files.sequence_length() % o.num_slices == 0);  // refused with the config
  const int64_t most = files.most_images();
  if (most > o.images_per_sequence) {
    throw_bad_input(
        "a sequence of the data has {} images, but there is room for {}; make room for them, or prepare the data with a "
        "shorter --sequence-length",
        most, o.images_per_sequence);
  }
  PARKA_REQUIRE(o.prefetch > 0);
}

}  // namespace

std::vector<int32_t> slices_of(const std::vector<int32_t>& rows, int64_t row_length, int64_t slice,
                               int64_t num_slices) {
  PARKA_REQUIRE(row_length % num_slices == 0);
  const int64_t length = row_length / num_slices, num_rows = static_cast<int64_t>(rows.size()) / row_length;
  std::vector<int32_t> result;
  result.reserve(static_cast<size_t>(num_rows * length));
  for (int64_t row = 0; row < num_rows; ++row) {
    const auto begin = rows.begin() + row * row_length + slice * length;
    result.insert(result.end(), begin, begin + length);
  }
  return result;
}

int64_t count_targets(const std::vector<int32_t>& targets) {
  return static_cast<int64_t>(targets.size()) - std::count(targets.begin(), targets.end(), kIgnoreTarget);
}

BatchLoader::BatchLoader(const TokenFiles& files, const BatchLoaderOptions& options)
    : files_(files),
      options_(options),
      order_(files.source_sequences(), options.seed, options.shuffle, options.weights) {
  check_options(options_, files);
  order_.batch_start(options_.start, options_.global_batch);  // throws here rather than in the thread
  thread_ = start_thread("reads the data", [this] { read_ahead(); });
}

BatchLoader::~BatchLoader() { stop_thread(thread_, mutex_, changed_, stopping_); }

void BatchLoader::wait_for(size_t count, std::unique_lock<std::mutex>& lock) {
  const auto available = [&] { return ready_.size() >= count || error_; };
  if (available()) return;
  const auto begin = std::chrono::steady_clock::now();
  changed_.wait(lock, available);
  wait_seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

std::exception_ptr BatchLoader::failure_within(int64_t count) {
  PARKA_REQUIRE(count <= options_.prefetch);
  std::unique_lock lock(mutex_);
  wait_for(static_cast<size_t>(count), lock);
  return static_cast<int64_t>(ready_.size()) < count ? error_ : nullptr;
}

MicroBatch BatchLoader::next() {
  std::unique_lock lock(mutex_);
  wait_for(1, lock);
  if (ready_.empty()) std::rethrow_exception(error_);
  MicroBatch batch = std::move(ready_.front());
  ready_.pop_front();
  lock.unlock();
  changed_.notify_all();
  return batch;
}

void BatchLoader::read_ahead() {
  try {
    read_batches();
  } catch (...) {
    const std::lock_guard lock(mutex_);
    error_ = std::current_exception();
    changed_.notify_all();
  }
}

void BatchLoader::read_batches() {
  const int64_t num_micro_batches = options_.global_batch / (options_.micro_batch * options_.world_size);
  // The last token of a sequence, which the last slice has, predicts none.
  const int64_t of_slice =
      files_.sequence_length() / options_.num_slices - (options_.slice_rank + 1 == options_.num_slices ? 1 : 0);
  const int64_t targets_of_full = num_micro_batches * options_.micro_batch * of_slice;
  DataPosition position = options_.start;
  while (true) {
    position = order_.batch_start(position, options_.global_batch);
    const DataPosition start = position;
    position.consumed += options_.global_batch;
    std::vector<Rows> counted;  // held back until all targets of the step are
    int64_t step_targets = 0;
    for (int64_t i = 0; i < num_micro_batches; ++i) {
      Rows rows = read_rows(start, i);
      rows.batch.start = start;
      rows.batch.after = i + 1 == num_micro_batches ? position : start;
      if (files_.targets_vary()) {
        step_targets += rows.batch.num_targets;
        counted.push_back(std::move(rows));
      } else {
        rows.batch.step_targets = targets_of_full;
        if (!push(std::move(rows.batch))) return;
      }
    }
    for (Rows& rows : counted) {
      rows.batch.step_targets = step_targets;
      if (files_.rules().images.any()) {
        rows.batch.images =
            read_image_batch(files_, rows.sequences, options_.micro_batch * options_.images_per_sequence);
      }
      if (!push(std::move(rows.batch))) return;
    }
  }
}

BatchLoader::Rows BatchLoader::read_rows(DataPosition batch_start, int64_t index) {
  const int64_t S = files_.sequence_length();
  Rows rows;
  MicroBatch& batch = rows.batch;
  batch.tokens.resize(static_cast<size_t>(options_.micro_batch * S));
  batch.targets.resize(batch.tokens.size());
  if (files_.rules().separate_documents) batch.first_keys.resize(batch.tokens.size());
  for (int64_t row = 0; row < options_.micro_batch; ++row) {
    const int64_t nth_of_rank = index * options_.micro_batch + row;
    const int64_t entry = options_.rank + nth_of_rank * options_.world_size;
    rows.sequences.push_back(order_.sequence(batch_start, entry));
    batch.num_targets += files_.read_example(
        rows.sequences.back(), {batch.tokens.data() + row * S, batch.targets.data() + row * S,
                                batch.first_keys.empty() ? nullptr : batch.first_keys.data() + row * S});
  }
  if (options_.num_slices == 1) return rows;
  batch.tokens = slices_of(batch.tokens, S, options_.slice_rank, options_.num_slices);
  batch.targets = slices_of(batch.targets, S, options_.slice_rank, options_.num_slices);
  batch.num_targets = count_targets(batch.targets);
  return rows;
}

bool BatchLoader::push(MicroBatch batch) {
  std::unique_lock lock(mutex_);
  const auto has_room = [this] { return static_cast<int64_t>(ready_.size()) < options_.prefetch || stopping_; };
  changed_.wait(lock, has_room);
  if (stopping_) return false;
  ready_.push_back(std::move(batch));
  lock.unlock();
  changed_.notify_all();
  return true;
}

ImageBatch read_image_batch(const TokenFiles& files, const std::vector<int64_t>& sequences, int64_t max_images) {
  const ImageRules& rules = files.rules().images;
  PARKA_REQUIRE(rules.any() && max_images >= 0);
  const int64_t S = files.sequence_length(), bytes = 3 * rules.size * rules.size;
  ImageBatch batch;
  batch.pixels.resize(static_cast<size_t>(max_images * bytes));
  batch.positions.assign(static_cast<size_t>(max_images * rules.slots), -1);
  for (size_t row = 0; row < sequences.size(); ++row) {
    for (const ImagePlace& place : files.images_of(sequences[row])) {
      PARKA_REQUIRE(batch.num_images < max_images);
      files.read_pixels(place, batch.pixels.data() + batch.num_images * bytes);
      int32_t* positions = batch.positions.data() + batch.num_images * rules.slots;
      for (int64_t k = std::max<int64_t>(0, -place.first); k < place.slots && place.first + k < S; ++k) {
        positions[k] = static_cast<int32_t>(static_cast<int64_t>(row) * S + place.first + k);
      }
      ++batch.num_images;
    }
  }
  return batch;
}

}  // namespace parka
