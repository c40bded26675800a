#pragma once
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

namespace parka {

// What a config file gives, with overrides as load_config() takes them and nothing else, in the order of
// docs/config.md: written to a file, it is the same config. Comments are lost.
nlohmann::ordered_json given_keys(const std::string& path, const std::vector<std::string>& overrides);

}  // namespace parka
