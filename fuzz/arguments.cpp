#include <cmath>

#include <fmt/ranges.h>

#include "engine/checkpoint/checkpoint_layout.h"
#include "engine/commands/argument_values.h"
#include "engine/config/data_sources.h"
#include "fuzz/target.h"

using namespace parka;
using namespace parka::fuzz;

// Words of the command line: values of options, and names of folders.
FUZZ_TARGET(arguments) {
  const std::string text(input.substr(0, input.find('\0')));  // as the system passes it
  accepts([&] {
    const std::vector<int32_t> tokens = parse_token_list(text);
    require(!tokens.empty() && parse_token_list(fmt::format("{}", fmt::join(tokens, ","))) == tokens,
            "a list of tokens changes when it is written");
  });
  accepts([&] {
    const int64_t bytes = parse_byte_size(text);
    require(bytes >= 1 && parse_byte_size(fmt::format("{}", bytes)) == bytes, "a size changes when it is written");
  });
  accepts([&] { require(expand_arguments({text, text}).size() >= 2, "an argument is lost"); });
  require(without_gigabytes(text).empty() == text.empty(), "a size is lost");
  if (const std::optional<double> number = parse_finite(text)) require(std::isfinite(*number), "not finite");
  accepts([&] {
    for (const NamedFiles& set : parse_sets({text, text}, "--sets")) {
      require(!set.name.empty() && set.files.size() == 2, "a set without files");
    }
  });
  if (const auto folder_of_step = parse_step_folder_name(text)) {
    require(step_folder_name(*folder_of_step) == text, "a step folder's name changes when it is written");
  }
}
