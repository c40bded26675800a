#pragma once
#include <string>
#include <vector>

#include "engine/config/config.h"

// GPUs by their names on the command line, and how fast they trained what was measured
// (docs/results/figures.jsonl).
namespace parka {

std::vector<std::string> card_names();
double card_memory_gb(const std::string& card);  // 1e9 bytes, as the product is named

// Of one such GPU.
struct CardSpeed {
  double tokens_per_second = 0;  // 0: nothing like it was measured
  std::string source;            // by what it is known, or what is missing
};
CardSpeed card_speed(const std::string& card, const Config& config, double flop_per_token);

}  // namespace parka
