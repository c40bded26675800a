#pragma once
#include <exception>
#include <stdexcept>

#include <sys/resource.h>
#include <unistd.h>

namespace parka::test {

// While it lives the system allows this process no further thread, as with `ulimit -u` used up. The limit does not
// bind root, which therefore is the user "nobody" for that time.
class NoThreads {
 public:
  NoThreads() {
    ::getrlimit(RLIMIT_NPROC, &before_);
    rlimit none = before_;
    none.rlim_cur = 0;
    ::setrlimit(RLIMIT_NPROC, &none);
    constexpr uid_t kNobody = 65534;
    if (is_root_ && ::setresuid(kNobody, kNobody, 0) != 0) throw std::runtime_error("cannot become nobody");
  }
  ~NoThreads() {
    if (is_root_ && ::setresuid(0, 0, 0) != 0) std::terminate();
    ::setrlimit(RLIMIT_NPROC, &before_);
  }
  NoThreads(const NoThreads&) = delete;
  NoThreads& operator=(const NoThreads&) = delete;

 private:
  const bool is_root_ = ::getuid() == 0;
  rlimit before_{};
};

}  // namespace parka::test
