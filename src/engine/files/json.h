#pragma once
#include <nlohmann/json.hpp>

namespace parka {

using nlohmann::json;
using nlohmann::ordered_json;

}  // namespace parka
