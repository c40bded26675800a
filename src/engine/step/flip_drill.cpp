#include "engine/step/flip_drill.h"

#include <array>
#include <charconv>
#include <string_view>
#include <utility>

#include "core/bit_hash.h"
#include "core/error.h"
#include "core/log/log.h"
#include "engine/files/json_text.h"

namespace parka {
namespace {

constexpr std::array<std::pair<std::string_view, FlipDrill::Target>, 4> kTargets{
    {{"weight", FlipDrill::Target::kWeight},
     {"moment", FlipDrill::Target::kMoment},
     {"gradient", FlipDrill::Target::kGradient},
     {"gemm", FlipDrill::Target::kGemm}}};

std::vector<std::string_view> split(std::string_view text) {
  std::vector<std::string_view> parts;
  for (;;) {
    const size_t colon = text.find(':');
    parts.push_back(text.substr(0, colon));
    if (colon == std::string_view::npos) return parts;
    text.remove_prefix(colon + 1);
  }
}

template <typename Number>
bool read_number(std::string_view text, Number& number) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  return error == std::errc() && end == text.data() + text.size();
}

// The n-th number that a drill draws.
uint64_t draw(const FlipDrill& drill, uint64_t n) { return mix_hash(mix_hash(drill.seed + 1) + hash_place(n)); }

}  // namespace

FlipDrill parse_flip_drill(const std::string& text) {
  const std::vector<std::string_view> parts = split(text);
  FlipDrill drill;
  bool good = parts.size() >= 3 && parts.size() <= 5 && parts[0] == "flip";
  bool known = false;
  for (const auto& [name, target] : kTargets) {
    if (!good || parts[1] != name) continue;
    drill.target = target;
    known = true;
  }
  good = good && known && read_number(parts[2], drill.step) && drill.step >= 1;
  if (good && parts.size() >= 4) good = read_number(parts[3], drill.rank) && drill.rank >= 0;
  if (good && parts.size() == 5) good = read_number(parts[4], drill.seed);
  if (good) return drill;
  throw_bad_input(
      "--drill: expected flip:TARGET:STEP[:RANK[:SEED]], TARGET one of weight, moment, gradient, gemm, got \"{}\"",
      printable(text));
}

void flip_one_of(Device& device, const std::vector<NamedTensor>& tensors, const FlipDrill& drill) {
  int64_t total = 0;
  for (const NamedTensor& tensor : tensors) total += tensor.view.bytes();
  PARKA_REQUIRE(total > 0);
  auto at = static_cast<int64_t>(draw(drill, 0) % static_cast<uint64_t>(total));
  for (const NamedTensor& tensor : tensors) {
    if (at >= tensor.view.bytes()) {
      at -= tensor.view.bytes();
      continue;
    }
    const auto bit = static_cast<int64_t>(draw(drill, 1) % 8);
    log_warning("drill: flipping bit {} of byte {} of {}", bit, at, tensor.name);
    flip_bit(device, tensor.view, 8 * at + bit);
    return;
  }
}

std::unique_ptr<BitFlip> make_gemm_flip(const FlipDrill& drill, int64_t num_gemms) {
  const auto n = static_cast<int64_t>(draw(drill, 0) % static_cast<uint64_t>(num_gemms)) + 1;
  const auto bit = static_cast<int64_t>(draw(drill, 1) >> 8);
  log_warning("drill: flipping a bit of the output of matrix product {} of the micro-batch", n);
  return std::make_unique<BitFlip>("gemm", n, bit);
}

}  // namespace parka
