#pragma once
#include <string>

namespace parka {

std::string parka_version();  // "0.2.0"
// The commit it was built from: "ea1fda1234ab", or with changes "ea1fda1234ab-dirty"; else "unknown".
std::string parka_commit();

// The text of `parka version`: the version, and with `verbose` a line for everything else that a bug report needs.
std::string version_text(bool verbose);

}  // namespace parka
