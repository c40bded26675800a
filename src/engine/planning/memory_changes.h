#pragma once
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/config/given_keys.h"
#include "engine/planning/gpu_plan.h"

namespace parka {

// A change of a config that makes a run take less memory.
struct MemoryChange {
  // What becomes of a run's results: the same bits; the same but for the order of sums; fewer bits of a number.
  enum class Results : uint8_t { kSameBits, kOtherSums, kOtherPrecision };

  std::string override;  // "section.key=value", as --set takes it
  Results results = Results::kSameBits;
  std::string cost;  // in words

  std::string_view key() const { return std::string_view(override).substr(0, override.find('=')); }
  // Among which changes it is taken, where those with the same bits come first: ZeRO's stages among these, because
  // nothing saves as much for as little, and the number of GPUs decides on the order of sums anyway.
  Results taken_among() const;
};

inline constexpr std::string_view kZeroStageKey = "distributed.zero_stage";
// The key of which a change may be made for some blocks only.
inline constexpr std::string_view kWeightCopiesKey = "precision.weight_copies";

// Those that `config` does not have yet, from the cheapest to the dearest (docs/troubleshooting.md). Of changes of
// one key the later saves more, and replaces the earlier.
std::vector<MemoryChange> memory_changes(const Config& config, int64_t num_gpus);

// "--set section.key=value --set ...", for a shell.
std::string arguments_of(const std::vector<MemoryChange>& changes);

// Some of the possible changes of a config, of each key at most one.
class ChosenChanges {
 public:
  ChosenChanges(GivenConfig config, std::vector<MemoryChange> possible, int64_t num_gpus);

  const std::vector<MemoryChange>& possible() const { return possible_; }
  // A change of weight copies that some blocks are left out of is one or two, of other keys and values.
  std::vector<MemoryChange> changes() const;
  bool has(size_t i) const { return chosen_[i]; }
  int64_t num_blocks() const { return num_layers_; }

  // Adds possible()[i], in the place of another of its key.
  void choose(size_t i);
  void clear();

  // The config with them; nullopt where they contradict each other or the config.
  std::optional<Config> config() const;
  std::optional<MemoryBytes> planned() const;
  bool fit(const MemoryBytes& limit) const;

  // Adds possible changes from the first on until they fit; false where all are not enough. What contradicts
  // those before it, or takes more host memory than they leave, takes the place of one of them if that saves
  // memory. Otherwise it is left out until later ones make way, and in the end so is what takes more GPU memory
  // than it saves, as buffers of offload in a small model.
  bool add_until(const MemoryBytes& limit);
  // Takes changes back, or replaces them by earlier ones of the same key, from the last on while the others fit.
  void take_back(const MemoryBytes& limit);

  // Chooses of `changes` what brings the plan within the GPU's limit, with what is chosen; false where nothing is
  // found that does. True also where all of them contradict each other. Small models have changes that take more
  // memory than they save, as buffers of offload: so what adds is taken back from all, and from none what saves is
  // added.
  bool come_within(const MemoryBytes& limit, const std::vector<size_t>& changes);

  // Leaves the first `num_blocks` blocks out of a chosen change of weight copies: they keep one layout more than it
  // leaves them. 0: none.
  void keep_copies(int64_t num_blocks) { kept_blocks_ = num_blocks; }
  // Leaves out as many as still fit, and returns their number.
  int64_t keep_copies_within(const MemoryBytes& limit);

 private:
  std::vector<MemoryChange> copy_changes(const MemoryChange& whole) const;
  bool others_keep(WeightCopies copies) const;
  std::vector<size_t> all() const;
  void take_back_what_adds(const std::vector<size_t>& changes, int64_t gpu_limit);
  void add_what_saves(const std::vector<size_t>& changes, const MemoryBytes& limit);
  bool add(size_t i, const MemoryBytes& limit);
  void make_way_for(size_t i, const std::vector<bool>& before, const MemoryBytes& limit);
  bool same_key(size_t i, size_t j) const { return possible_[i].key() == possible_[j].key(); }
  bool take_back(size_t i, const MemoryBytes& limit);

  GivenConfig config_;
  std::vector<MemoryChange> possible_;
  std::vector<bool> chosen_;
  int64_t kept_blocks_ = 0;
  int64_t num_gpus_;
  int64_t num_layers_, given_blocks_;  // of the config without changes: model.num_layers, weight_copies_blocks
  // A plan takes milliseconds.
  mutable std::map<std::pair<std::vector<bool>, int64_t>, std::optional<MemoryBytes>> planned_;
};

}  // namespace parka
