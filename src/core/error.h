#pragma once
#include <stdexcept>
#include <string>
#include <utility>

#ifndef __CUDACC__
#include <fmt/format.h>
#endif

namespace parka {

// The exit codes of `parka`. Documented in README.md; scripts rely on these values.
enum class ExitCode : int {
  kOk = 0,
  kInternal = 1,   // a bug in Parka
  kBadInput = 2,   // config, command line, token file, checkpoint, folder: the user can fix it
  kNonFinite = 3,  // NaN or Inf in loss or gradients and the policy says stop, or in what is to be saved
  kIo = 4,         // writing failed: disk full, quota, permission lost during the run
  kRankLost = 5,   // another rank of the run died or hung, or the ranks can no longer reach each other
  kCorrupted = 6,  // silent data corruption: bits that must be equal differ, so a GPU or a memory is faulty
  kStopped = 75,   // EX_TEMPFAIL: a signal asked to save and stop, and the same command continues the run
};

// The only exception type of Parka. `what()` is a single line: what is wrong, where, and what to do.
class Error : public std::runtime_error {
 public:
  Error(ExitCode code, const std::string& message) : std::runtime_error(message), code_(code) {}
  ExitCode code() const { return code_; }

 private:
  ExitCode code_;
};

// Throws Error(kInternal) with the condition that does not hold, and where.
[[noreturn]] void throw_unmet(const char* file, int line, const char* condition);

#ifndef __CUDACC__  // nvcc cannot compile fmt

// Throws Error(kBadInput): the user's input is wrong.
template <typename... Args>
[[noreturn]] void throw_bad_input(fmt::format_string<Args...> format, Args&&... args) {
  throw Error(ExitCode::kBadInput, fmt::format(format, std::forward<Args>(args)...));
}

// Throws Error(kIo): a read or write failed during the run.
template <typename... Args>
[[noreturn]] void throw_io(fmt::format_string<Args...> format, Args&&... args) {
  throw Error(ExitCode::kIo, fmt::format(format, std::forward<Args>(args)...));
}

// Throws Error(kInternal): a caller inside Parka broke a contract.
template <typename... Args>
[[noreturn]] void throw_internal(fmt::format_string<Args...> format, Args&&... args) {
  throw Error(ExitCode::kInternal, fmt::format(format, std::forward<Args>(args)...));
}

#endif

}  // namespace parka

// Contract check that stays on in release builds. A macro only to capture the text.
#define PARKA_REQUIRE(condition)                                            \
  do {                                                                      \
    if (!(condition)) ::parka::throw_unmet(__FILE__, __LINE__, #condition); \
  } while (false)
