#pragma once
#include <condition_variable>
#include <functional>
#include <mutex>
#include <string_view>
#include <thread>

namespace parka {

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
