#pragma once
#include <exception>
#include <functional>
#include <string>

#include "comm/communicator.h"
#include "core/error.h"

namespace parka {

// An error that ends a run though its state is sound, as of data that cannot be read or metrics that cannot be
// written: it waits here until that state is saved. Each rank has its own, or none.
class DeferredError {
 public:
  // The first counts: null, and an error after it, change nothing.
  void keep(const std::exception_ptr& error);
  explicit operator bool() const { return error_ != nullptr; }

  // On this rank alone. There must be one.
  [[noreturn]] void rethrow() const { std::rethrow_exception(error_); }
  // For all ranks at once, of which one at least must have an error: all throw an Error with the code and the
  // message of the lowest such rank, which it names among several. The text that `advice` has for the code ends it.
  [[noreturn]] void throw_on_all_ranks(Communicator& communicator,
                                       const std::function<std::string(ExitCode)>& advice) const;

 private:
  std::exception_ptr error_;
};

}  // namespace parka
