#include "core/thread.h"

#include <system_error>
#include <utility>

#include "core/error.h"

namespace parka {

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
