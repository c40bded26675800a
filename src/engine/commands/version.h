#pragma once
#include <string>

namespace parka {

std::string parka_version();  // "0.2.0"
// The commit it was built from: "ea1fda1234ab", followed by "-dirty" with changes; "unknown" outside a Git
// checkout.
std::string parka_commit();

// The text of `parka version`: the version, and with `verbose` a line for everything else that a bug report needs.
std::string version_text(bool verbose);

}  // namespace parka
