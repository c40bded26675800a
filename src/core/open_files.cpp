#include "core/open_files.h"

#include <sys/resource.h>

namespace parka {

void raise_open_file_limit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);  // where that fails the limit stays, and whoever meets it says so
}

}  // namespace parka
