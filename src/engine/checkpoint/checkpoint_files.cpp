#include "engine/checkpoint/checkpoint_files.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <set>
#include <system_error>
#include <thread>

#include "core/error.h"
#include "core/heartbeat.h"
#include "engine/checkpoint/checkpoint_index.h"
#include "engine/files/json_text.h"

namespace parka {
namespace {

constexpr size_t kWritePieceBytes = 256 << 10;

// Cuts the list where the next tensor would make a file larger than `max_bytes`.
std::vector<std::vector<const HostTensor*>> split_into_shards(const std::vector<HostTensor>& tensors,
                                                              int64_t max_bytes) {
  std::vector<std::vector<const HostTensor*>> shards;
  int64_t filled = 0;
  for (const HostTensor& tensor : tensors) {
    const int64_t bytes = tensor.num_bytes();
    if (bytes == 0 && is_partial(tensor)) continue;
    if (shards.empty() || (bytes > max_bytes - filled && !shards.back().empty())) {
      shards.emplace_back();
      filled = 0;
    }
    shards.back().push_back(&tensor);
    filled += bytes;
  }
  return shards;
}

// Threads of their own, which write files while the pool of parallel_for computes. If the system grants no more
// threads, those that there are write them all.
class Writers {
 public:
  Writers(int num_threads, size_t num_files) : num_threads_(num_threads), num_files_(num_files) {}

  // Calls write(i) of each file; throws the first error when all calls have ended.
  void run(const std::function<void(size_t)>& write) {
    const auto draw = [&] {
      for (size_t i = next_++; i < num_files_ && !failed_; i = next_++) {
        try {
          write(i);
        } catch (...) {
          const std::lock_guard lock(mutex_);
          if (!failed_.exchange(true)) failure_ = std::current_exception();
        }
      }
    };
    std::vector<std::thread> threads;
    try {
      for (size_t n = 1; n < std::min(static_cast<size_t>(num_threads_), num_files_); ++n)
        threads.emplace_back(draw);
    } catch (const std::system_error&) {
      num_threads_ = static_cast<int>(threads.size()) + 1;
    }
    draw();
    for (std::thread& thread : threads) thread.join();
    if (failure_) std::rethrow_exception(failure_);
  }

  // For a file that is being written while another one has failed.
  void stop_if_failed() const {
    if (failed_) throw_io("not written, because another file of the checkpoint could not be written");
  }

 private:
  int num_threads_;
  size_t num_files_;
  std::atomic<size_t> next_{0};
  std::atomic<bool> failed_{false};
  std::mutex mutex_;
  std::exception_ptr failure_;
};

}  // namespace

void ObservedFiles::announce(std::string_view action, const std::string& path) {
  if (!in_background_) heartbeat();
  if (!observer_) return;
  const std::lock_guard lock(mutex_);
  observer_(fmt::format("{} {}", action, path));
}

void ObservedFiles::make_directory(const std::string& path) {
  announce("make", path);
  parka::make_directory(path);
}

void ObservedFiles::sync_directory(const std::string& path) {
  announce("sync", path);
  parka::sync_directory(path);
}

void ObservedFiles::rename(const std::string& from, const std::string& to) {
  announce("rename", from);
  rename_path(from, to);
}

void ObservedFiles::remove(const std::string& path) {
  announce("remove", path);
  remove_tree(path);
}

Manifest::File ObservedFiles::write_file(const std::string& path,
                                         const std::function<void(const ByteSink&)>& produce) {
  announce("create", path);
  OutputFile file(path);
  produce([&](ByteSpan bytes) {
    while (!bytes.empty()) {
      const ByteSpan piece = bytes.first(std::min(kWritePieceBytes, bytes.size()));
      announce("write", path);
      file.write(piece);
      bytes = bytes.subspan(piece.size());
    }
  });
  announce("sync", path);
  file.sync_and_close();
  return {fs::path(path).filename().string(), file.num_bytes(), file.checksum()};
}

Manifest::File ObservedFiles::write_text(const std::string& path, std::string_view text) {
  return write_file(path, [&](const ByteSink& sink) { sink(as_bytes(text)); });
}

void check_names_unique(const std::vector<HostTensor>& tensors) {
  std::set<std::string_view> names;
  for (const HostTensor& tensor : tensors) {
    if (!names.insert(tensor.name).second)
      throw_internal("two tensors have the name \"{}\"", printable(tensor.name));
  }
}

std::vector<Manifest::File> write_shards(ObservedFiles& files, const std::string& folder,
                                         const std::vector<HostTensor>& tensors, const SaveOptions& options,
                                         const std::function<std::string(size_t index)>& name_of,
                                         const std::function<void()>& before_file) {
  const auto shards = split_into_shards(tensors, options.max_shard_bytes);
  std::vector<Manifest::File> written(shards.size());
  Writers writers(options.writers, shards.size());
  std::mutex one_at_a_time;
  writers.run([&](size_t i) {
    if (before_file) {
      const std::lock_guard lock(one_at_a_time);
      before_file();
    }
    written[i] = files.write_file((fs::path(folder) / name_of(i)).string(), [&](const ByteSink& sink) {
      write_safetensors(shards[i], describe_pieces(shards[i]), [&](ByteSpan bytes) {
        writers.stop_if_failed();
        sink(bytes);
      });
    });
  });
  return written;
}

}  // namespace parka
