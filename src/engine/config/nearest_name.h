#pragma once
#include <string>
#include <string_view>
#include <vector>

namespace parka {

// How many letters must be inserted, deleted, replaced or swapped with their neighbour to turn `a` into `b`. Only
// the first 64 letters of each are looked at.
int edit_distance(std::string_view a, std::string_view b);

// How far `given` is from a name that may have been meant: the edit distance, but 1 when it is a part of the name.
int name_distance(std::string_view given, std::string_view name);

// The largest name_distance at which it is likely that the name was meant.
int plausible_distance(std::string_view given);

// The first of the names nearest to `given`, or an empty string when none is plausible.
std::string nearest_name(std::string_view given, const std::vector<std::string>& names);

}  // namespace parka
