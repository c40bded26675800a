#pragma once
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "engine/config/config.h"

namespace parka {

// A config file with overrides, to which others can be added. One tree of all keys would not do: where a change
// names another recipe, keys that the overrides give stay, and those of a file that gives all that recipes set do
// not.
class GivenConfig {
 public:
  // From a file's JSON.
  GivenConfig(nlohmann::json file, std::vector<std::string> overrides = {}, std::string source = "config");
  static GivenConfig read(const std::string& path, const std::vector<std::string>& overrides);

  // The result of load_config() with more overrides. Throws Error(kBadInput) if these are not valid.
  Config with(const std::vector<std::string>& more) const;

 private:
  nlohmann::json file_;
  std::vector<std::string> overrides_;
  std::string source_;
};

// The keys that a config file gives, with overrides as load_config() takes them and nothing else, in the order of
// docs/config.md: written to a file, it is the same config. Comments are lost.
nlohmann::ordered_json given_keys(const std::string& path, const std::vector<std::string>& overrides);

// True if one of the overrides gives this key.
bool is_overridden(const std::vector<std::string>& overrides, const std::string& key);

// Writes them to a file.
void write_given_keys(const std::string& written, const std::string& path,
                      const std::vector<std::string>& overrides);
// Throws Error if write_given_keys() would, or would replace the config that it reads, with its comments. An empty
// name of a file is fine.
void require_config_writable(const std::string& written, const std::string& path);

}  // namespace parka
