#include "core/parallel.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <system_error>
#include <utility>
#include <vector>

#include <sched.h>

#include "core/error.h"
#include "core/log/log.h"

namespace parka {
namespace {

int default_num_threads() {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (sched_getaffinity(0, sizeof(allowed), &allowed) == 0) return std::max(1, CPU_COUNT(&allowed));
  return std::max(1u, std::thread::hardware_concurrency());
}

// More threads than cores help little, and thousands take long to start.
constexpr int kMostThreadsPerCore = 4;

std::atomic<int> requested_threads{0};
thread_local bool inside_body = false;

// Workers sleep between jobs. A job is a shared counter of chunks that workers and caller draw from.
class WorkerPool {
 public:
  // Continues with fewer workers if the system does not allow as many.
  explicit WorkerPool(int num_workers) {
    threads_.reserve(static_cast<size_t>(num_workers));
    try {
      for (int i = 0; i < num_workers; ++i) threads_.push_back(start_thread("computes", [this] { work(); }));
    } catch (const Error& error) {
      log_warning("continuing with {} of {} CPU threads: {}", threads_.size() + 1, num_workers + 1, error.what());
    }
  }
  ~WorkerPool() {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_all();
    for (auto& thread : threads_) thread.join();
  }

  void run(int64_t count, int64_t grain, const std::function<void(int64_t, int64_t)>& body) {
    std::lock_guard one_job(job_mutex_);
    {
      std::lock_guard lock(mutex_);
      body_ = &body;
      count_ = count;
      grain_ = grain;
      next_.store(0);
      busy_ = static_cast<int>(threads_.size());
      failure_ = nullptr;
      ++generation_;
    }
    wake_.notify_all();
    draw_chunks();
    std::unique_lock lock(mutex_);
    done_.wait(lock, [this] { return busy_ == 0; });
    // The caller's alone from here on: the next job's caller shall not release it.
    const std::exception_ptr failure = std::exchange(failure_, nullptr);
    lock.unlock();
    if (failure) std::rethrow_exception(failure);
  }

 private:
  void work() {
    uint64_t seen = 0;
    for (;;) {
      {
        std::unique_lock lock(mutex_);
        wake_.wait(lock, [&] { return stopping_ || generation_ != seen; });
        if (stopping_) return;
        seen = generation_;
      }
      draw_chunks();
      std::lock_guard lock(mutex_);
      if (--busy_ == 0) done_.notify_one();
    }
  }

  void draw_chunks() {
    inside_body = true;
    for (;;) {
      const int64_t begin = next_.fetch_add(grain_);
      if (begin >= count_) break;
      try {
        (*body_)(begin, std::min(begin + grain_, count_));
      } catch (...) {
        std::lock_guard lock(mutex_);
        if (!failure_ || begin < failed_chunk_) {
          failure_ = std::current_exception();
          failed_chunk_ = begin;
        }
      }
    }
    inside_body = false;
  }

  std::vector<std::thread> threads_;
  std::mutex job_mutex_;  // one parallel_for at a time
  std::mutex mutex_;
  std::condition_variable wake_, done_;
  const std::function<void(int64_t, int64_t)>* body_ = nullptr;
  int64_t count_ = 0, grain_ = 1;
  std::atomic<int64_t> next_{0};
  int busy_ = 0;
  uint64_t generation_ = 0;
  bool stopping_ = false;
  std::exception_ptr failure_;  // of the first chunk, in their order, that failed
  int64_t failed_chunk_ = 0;
};

}  // namespace

int num_threads() {
  const int requested = requested_threads.load();
  return requested > 0 ? requested : default_num_threads();
}

void set_num_threads(int count) {
  requested_threads.store(std::min(count, kMostThreadsPerCore * default_num_threads()));
}

void parallel_for(int64_t count, int64_t grain, const std::function<void(int64_t, int64_t)>& body) {
  if (count <= 0) return;
  grain = std::max<int64_t>(1, grain);
  if (inside_body || count <= grain || num_threads() == 1) {
    // The same chunks as in parallel.
    for (int64_t begin = 0; begin < count; begin += grain) body(begin, std::min(begin + grain, count));
    return;
  }
  static WorkerPool pool(num_threads() - 1);
  pool.run(count, grain, body);
}

std::thread start_thread(std::string_view task, std::function<void()> body) {
  try {
    return std::thread(std::move(body));
  } catch (const std::system_error& error) {
    throw_bad_input(
        "cannot start the thread that {}: {}; raise the limit of threads (ulimit -u, the pids limit of the "
        "container or batch job) or give a smaller --threads",
        task, error.code().message());
  }
}

}  // namespace parka
