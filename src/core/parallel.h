#pragma once
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string_view>
#include <thread>

namespace parka {

// Calls body(begin, end) over chunks of [0, count) on all worker threads, and returns when all are done. Chunks are
// `grain` long (the last may be shorter) for any number of threads, so results do not depend on that. An exception
// in a chunk is rethrown here; of several, that of the first chunk. Chunks after it may or may not have run. A
// nested call, from inside a body that runs in parallel, runs inline.
void parallel_for(int64_t count, int64_t grain, const std::function<void(int64_t, int64_t)>& body);

// Number of threads that parallel_for uses: the option --threads, else the number of cores this process may use. If
// the system does not allow as many threads, parallel_for warns once and uses fewer.
int num_threads();
// Sets the number of threads, limited to 4 per core; 0 means the default. Call it before the first parallel_for.
void set_num_threads(int count);

// Starts a thread. `task` says in messages what it does: "reads the data". Throws Error(kBadInput), which names the
// limits, if the system allows no further thread.
std::thread start_thread(std::string_view task, std::function<void()> body);

// Sets `stopping`, a bool or std::atomic<bool> that `mutex` guards and that the thread waits for with `changed`,
// and waits until the thread has ended. One that was never started has.
template <typename Flag>
void stop_thread(std::thread& thread, std::mutex& mutex, std::condition_variable& changed, Flag& stopping) {
  {
    const std::lock_guard lock(mutex);
    stopping = true;
  }
  changed.notify_all();
  if (thread.joinable()) thread.join();
}

}  // namespace parka
