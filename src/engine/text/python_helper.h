#pragma once
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "engine/text/helper_process.h"

namespace parka {

// A process of one of the Python files in scripts/ that answers lines of JSON. All functions throw Error(kBadInput)
// for what the user can fix, and Error(kIo) if the process dies.
class PythonHelper {
 public:
  // `script` is the name in scripts/. Throws Error(kBadInput) also if Python is missing.
  PythonHelper(const std::string& script, const std::vector<std::string>& arguments);

  // The next answer, an object.
  nlohmann::json receive();
  nlohmann::json ask(const nlohmann::json& request);

 private:
  std::string script_;
  HelperProcess process_;
};

}  // namespace parka
