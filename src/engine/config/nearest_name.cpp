#include "engine/config/nearest_name.h"

#include <algorithm>

namespace parka {

// Optimal string alignment: cost[i][j] is the distance between the first i letters of a and the first j of b.
int edit_distance(std::string_view a, std::string_view b) {
  constexpr size_t kLongest = 64;
  a = a.substr(0, kLongest);
  b = b.substr(0, kLongest);
  std::vector<std::vector<int>> cost(a.size() + 1, std::vector<int>(b.size() + 1));
  for (size_t i = 0; i <= a.size(); ++i) cost[i][0] = static_cast<int>(i);
  for (size_t j = 0; j <= b.size(); ++j) cost[0][j] = static_cast<int>(j);
  for (size_t i = 1; i <= a.size(); ++i) {
    for (size_t j = 1; j <= b.size(); ++j) {
      const int replaced = cost[i - 1][j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1);
      cost[i][j] = std::min({replaced, cost[i - 1][j] + 1, cost[i][j - 1] + 1});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
        cost[i][j] = std::min(cost[i][j], cost[i - 2][j - 2] + 1);
      }
    }
  }
  return cost[a.size()][b.size()];
}

int name_distance(std::string_view given, std::string_view name) {
  const bool is_part = given.size() >= 2 && name.find(given) != std::string_view::npos;
  return is_part && given != name ? 1 : edit_distance(given, name);
}

int plausible_distance(std::string_view given) {
  return 1 + static_cast<int>(std::min<size_t>(given.size(), 64) / 4);
}

std::string nearest_name(std::string_view given, const std::vector<std::string>& names) {
  std::string nearest;
  int smallest = plausible_distance(given) + 1;
  for (const std::string& name : names) {
    const int distance = name_distance(given, name);
    if (distance >= smallest) continue;
    smallest = distance;
    nearest = name;
  }
  return nearest;
}

}  // namespace parka
