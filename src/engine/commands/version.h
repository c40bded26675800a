#pragma once
#include <string>

namespace parka {

std::string parka_version();  // "0.2.0"
std::string
parka_commit();  // what it was built from: "ea1fda1234ab", "-dirty" behind it with changes; or "unknown"

}  // namespace parka
