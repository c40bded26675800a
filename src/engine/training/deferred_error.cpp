#include "engine/training/deferred_error.h"

#include <vector>

#include <fmt/format.h>

#include "engine/files/json.h"

namespace parka {

void DeferredError::keep(const std::exception_ptr& error) {
  if (!error_) error_ = error;
}

void DeferredError::throw_on_all_ranks(Communicator& communicator,
                                       const std::function<std::string(ExitCode)>& advice) const {
  json own;
  if (error_) {
    try {
      rethrow();
    } catch (const Error& e) {
      own = {{"code", static_cast<int>(e.code())}, {"message", e.what()}};
    }
  }
  constexpr auto kReplaceBadText = json::error_handler_t::replace;
  const std::vector<std::string> all = communicator.gather_text(own.dump(-1, ' ', false, kReplaceBadText));
  for (size_t rank = 0; rank < all.size(); ++rank) {
    const json error = json::parse(all[rank]);
    if (!error.is_object()) continue;
    const std::string who = all.size() == 1 ? "" : fmt::format("rank {}: ", rank);
    const auto code = static_cast<ExitCode>(error.at("code").get<int>());
    throw Error(code, fmt::format("{}{}{}", who, error.at("message").get<std::string>(), advice(code)));
  }
  throw_internal("ranks agreed on a failure that none of them has");
}

}  // namespace parka
