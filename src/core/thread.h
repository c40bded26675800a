#pragma once
#include <functional>
#include <string_view>
#include <thread>

namespace parka {

// Starts a thread. `task` says in messages what it does: "reads the data". Throws Error(kBadInput), which names the
// limits, if the system allows no further thread.
std::thread start_thread(std::string_view task, std::function<void()> body);

}  // namespace parka
