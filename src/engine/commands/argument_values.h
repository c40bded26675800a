#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

// Parsers of command-line values. Functions that name an option throw Error(kBadInput) for any other text.
namespace parka {

// A command line (without the program) with abbreviations written out: `--optimizer.lr=1` and `--optimizer.lr 1` as
// `--set optimizer.lr=1`, `help train` as `train --help`. Everything after `--` stays.
std::vector<std::string> expand_arguments(const std::vector<std::string>& arguments);

// The whole text as a finite number; nullopt if it is not one.
std::optional<double> parse_finite(const std::string& text);

// --prompt-tokens: "1,2,3".
std::vector<int32_t> parse_token_list(const std::string& text);

// --shard-size: "5GB", "500MB", "1GiB", "300000", as transformers reads max_shard_size.
int64_t parse_byte_size(const std::string& text);

// --memory-limit: "80", "80GB" (1e9 bytes each), "80GiB" or another unit, in GB. Other text comes back unchanged.
std::string without_gigabytes(const std::string& text);

}  // namespace parka
