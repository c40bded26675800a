#pragma once
#include <string>
#include <string_view>
#include <vector>

namespace parka {

// The edit distance of `a` and `b`: insertions, deletions, replacements and swaps of neighbouring letters. Only
// the first 64 letters of each count.
int edit_distance(std::string_view a, std::string_view b);

// The distance of `given` from a name that may be meant: the edit distance, or 1 if `given` is a part of the name.
int name_distance(std::string_view given, std::string_view name);

// The largest name_distance at which the name is likely to be meant.
int plausible_distance(std::string_view given);

// The first of the names nearest to `given`, or an empty string when none is plausible.
std::string nearest_name(std::string_view given, const std::vector<std::string>& names);

}  // namespace parka
