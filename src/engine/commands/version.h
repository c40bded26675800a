#pragma once
#include <string>

namespace parka {

std::string parka_version();  // "0.2.0"
// What it was built from: "ea1fda1234ab", "-dirty" behind it with changes; "unknown" outside a Git checkout.
std::string parka_commit();

// What `parka version` prints: the version, and with `verbose` a line for everything else that a bug report needs.
std::string version_text(bool verbose);

}  // namespace parka
