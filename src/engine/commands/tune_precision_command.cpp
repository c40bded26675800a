#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>
#include <set>

#include <fmt/ranges.h>

#include "core/error.h"
#include "engine/commands/commands.h"
#include "engine/commands/device_setup.h"
#include "engine/config/config_checks.h"
#include "engine/config/config_io.h"
#include "engine/evaluation/precision_losses.h"
#include "engine/files/json.h"
#include "engine/planning/memory_advice.h"
#include "engine/planning/step_model.h"
#include "kernels/ops/attention/rope.h"
#include "kernels/ops/swiglu/swiglu.h"
#include "model/formats.h"
#include "model/parameter_table.h"
#include "model/precision_recipe.h"

namespace parka {
namespace {

// What stays in FP8 or leaves it as one: products of one kind in consecutive blocks, or what all blocks keep.
struct Choice {
  std::string name;
  std::vector<std::string> weights = {};     // of products
  std::vector<std::string> overrides = {};   // of what is kept
  void (*keep)(PrecisionConfig&) = nullptr;  // does what these say
  double cost = 0;      // seconds that a step takes longer with this alone in the compute format
  double rise = 0;      // in loss, nats, with this alone in FP8
  bool leaves = false;  // FP8
};

// The time of a step, by its operations and bytes, at the rates that an H200 reaches in steps of Llama-2-7B.
double step_seconds(const Config& config) {
  constexpr double k8BitRate = 1.25e15, kRate = 6.8e14, kAttentionRate = 3.8e14, kBandwidth = 3.6e12;
  const auto of_op = [](const RecordedOp& op) {
    const OpCost& cost = op.cost;
    if (cost.products == Products::kNone) return cost.bytes / kBandwidth;
    if (cost.products != Products::kGemm) return cost.flop / kAttentionRate;
    const bool is_8bit = cost.shape.find("e4m3") != std::string::npos ||
                         cost.shape.find("e5m2") != std::string::npos ||
                         cost.shape.find("int8") != std::string::npos;
    return cost.flop / (is_8bit ? k8BitRate : kRate);
  };
  const std::set<std::string> one_kernel = {std::string(RopeProjection::kName),
                                            std::string(SwigluProjection::kName)};
  return compute_seconds(record_step(config, 1, one_kernel), {of_op, kBandwidth});
}

// A run that has nothing in FP8, not even what no choice takes out of it: experts and vision towers.
Config without_fp8(Config config) {
  config.precision = without_fp8(config.precision);
  if (config.finetune.base == BaseFormat::kFp8) config.finetune.base = BaseFormat::kCompute;
  return config;
}

// The first and the last block are like no others; those between are in equal parts.
int64_t part_of(int64_t block, int64_t num_blocks) {
  constexpr int64_t kParts = 8;
  if (num_blocks <= kParts || block == 0) return block;
  return block + 1 == num_blocks ? kParts - 1 : 1 + (block - 1) * (kParts - 2) / (num_blocks - 2);
}

void add_products(const Config& config, std::vector<Choice>& choices) {
  const ParameterTable table = make_parameter_table(config.model, false, config.parameter_rules());
  const Formats formats(config.precision);
  std::map<std::pair<std::string, int64_t>, size_t> known;
  for (size_t i = 0; i < table.all.size(); ++i) {
    const ParameterInfo& p = table.all[i];
    const bool is_head = static_cast<int>(i) == table.head, is_of_block = p.unit > 0 && !is_head;
    const std::string name = is_head ? "head" : p.name;
    if (!(p.quantized_forward || p.int8_forward) || !is_unquantized({name}, p)) continue;
    if (!(is_head ? formats.fp8_head : is_of_block && formats.fp8_gemm)) continue;
    const int64_t block = is_head ? 0 : p.unit - 1;
    const std::string kind = is_head ? "head" : p.name.substr(block_prefix(kDecoder, block).size());
    const auto [place, is_new] = known.try_emplace({kind, part_of(block, table.num_blocks)}, choices.size());
    if (is_new) choices.push_back({.name = is_head ? kind : fmt::format("{} of block {}", kind, block)});
    Choice& choice = choices[place->second];
    if (!is_new) choice.name = fmt::format("{} to {}", choice.name.substr(0, choice.name.find(" to ")), block);
    // The loss is that of forward: where this product can leave FP8 alone, those of backward stay.
    const std::string forward = p.name + ".forward";
    const bool leaves_alone = config.distributed.zero_stage < 3 && is_forward_unquantized({forward}, p);
    choice.weights.push_back(leaves_alone ? forward : name);
  }
}

void add_kept(const PrecisionConfig& p, std::vector<Choice>& choices) {
  if (p.qkv == Storage::kFp8) {
    choices.push_back({.name = "q, k and v, kept",
                       .overrides = {"precision.qkv=compute"},
                       .keep = [](PrecisionConfig& c) { c.qkv = Storage::kCompute; }});
  }
  if (p.up_gate == Storage::kFp8) {
    choices.push_back({.name = "up and gate, kept",
                       .overrides = {"precision.up_gate=compute", "precision.save_silu=false"},
                       .keep = [](PrecisionConfig& c) {
                         c.up_gate = Storage::kCompute;
                         c.save_silu = false;
                       }});
  }
  if (p.norm_input == Storage::kFp8) {
    choices.push_back({.name = "inputs of norms, kept",
                       .overrides = {"precision.norm_input=compute"},
                       .keep = [](PrecisionConfig& c) { c.norm_input = Storage::kCompute; }});
  }
}

class Tuning {
 public:
  Tuning(const TunePrecisionOptions& options, const Config& config, const PrecisionLosses& losses)
      : sequences_(options.sequences), config_(config), losses_(losses) {
    add_products(config, choices_);
    add_kept(config.precision, choices_);
    const double all = seconds([](size_t) { return false; });
    for (size_t i = 0; i < choices_.size(); ++i) {
      choices_[i].cost = seconds([&](size_t other) { return other == i; }) - all;
    }
  }

  const std::vector<Choice>& choices() const { return choices_; }
  // The loss, and the seconds of a step, with the choices for which leaves(i) is true in the compute format.
  template <typename Leaves>
  double loss(const Leaves& leaves) const {
    return losses_.of(with(leaves).precision, sequences_);
  }
  template <typename Leaves>
  double seconds(const Leaves& leaves) const {
    return step_seconds(with(leaves));
  }

  // Orders them by what they cost the loss for what they save in time.
  void measure(double plain) {
    for (size_t i = 0; i < choices_.size(); ++i) {
      choices_[i].rise = loss([&](size_t other) { return other != i; }) - plain;
      fmt::print("{:<32} {:+.5f}\n", choices_[i].name, choices_[i].rise);
      std::fflush(stdout);
    }
    // A choice that costs no time comes first, or last if it does not help.
    std::ranges::stable_sort(choices_, std::ranges::greater(),
                             [](const Choice& c) { return c.rise / std::max(c.cost, 1e-9); });
  }

  // Has the fewest of the first leave FP8 with which the loss is at most this. Then those of them return that can,
  // the ones that gain least by leaving first. Returns the loss; where that of all is more, nothing leaves.
  double choose(double most) {
    size_t low = 0, high = choices_.size();
    double reached = loss([](size_t) { return true; });
    if (reached > most) return reached;
    const auto try_loss = [&](const auto& leaves) {
      const double now = loss(leaves);
      if (now <= most) reached = now;
      return now <= most;
    };
    while (low < high) {
      const size_t count = (low + high) / 2;
      if (try_loss([&](size_t i) { return i < count; })) {
        high = count;
      } else {
        low = count + 1;
      }
    }
    for (size_t i = 0; i < high; ++i) choices_[i].leaves = true;
    for (size_t i = high; i-- > 0;) {
      // Together they cost less than alone.
      if (choices_[i].cost <= 0 || reached + choices_[i].rise / 2 > most) continue;
      choices_[i].leaves = !try_loss([&](size_t j) { return j != i && choices_[j].leaves; });
    }
    return reached;
  }

 private:
  template <typename Leaves>
  Config with(const Leaves& leaves) const {
    Config config = config_;
    for (size_t i = 0; i < choices_.size(); ++i) {
      if (!leaves(i)) continue;
      const Choice& choice = choices_[i];
      std::vector<std::string>& names = config.precision.unquantized;
      names.insert(names.end(), choice.weights.begin(), choice.weights.end());
      if (choice.keep != nullptr) choice.keep(config.precision);
    }
    return config;
  }

  int64_t sequences_;
  Config config_;
  const PrecisionLosses& losses_;
  std::vector<Choice> choices_;
};

// True if a run with this config may have INT8 products where it has those of E4M3 in forward.
bool may_have_int8(const Config& config, const Device& device) {
  if (config.precision.gemm == GemmPrecision::kCompute || config.distributed.zero_stage == 3) return false;
  const ParameterTable table = make_parameter_table(config.model, false, config.parameter_rules());
  return device.has_int8_products() && std::ranges::any_of(table.all, [](const ParameterInfo& p) {
           return p.quantized_forward && has_own_forward(p);
         });
}

double percent(double loss, double plain) { return 100 * std::expm1(loss - plain); }

std::vector<std::string> overrides_of(const Config& config, const std::vector<Choice>& choices) {
  std::vector<std::string> names = config.precision.unquantized, overrides;
  for (const Choice& choice : choices) {
    if (!choice.leaves) continue;
    names.insert(names.end(), choice.weights.begin(), choice.weights.end());
    overrides.insert(overrides.end(), choice.overrides.begin(), choice.overrides.end());
  }
  if (!names.empty()) overrides.push_back("precision.unquantized=" + json(names).dump());
  return overrides;
}

void check(const TunePrecisionOptions& options, const Config& config) {
  require_config_writable(options.write_path, options.config_path);
  if (!config.precision.has_fp8()) {
    throw_bad_input("{}: precision.recipe = {} has no FP8 to tune; set one that has, coat for example",
                    options.config_path, name_of(config.precision.recipe));
  }
  require_whole_micro_batches(config, 1);
  if (config.checkpoint.init_from.empty()) {
    throw_bad_input("{}: checkpoint.init_from: nothing to measure; name the weights that the run begins with",
                    options.config_path);
  }
  if (config.data.eval.empty() && config.data.train.empty()) {
    throw_bad_input("{}: data.eval: no token files to measure on; list some, or give --data", options.config_path);
  }
}

}  // namespace

int run_tune_precision(const TunePrecisionOptions& options) {
  const Config config = load_config(options.config_path, options.overrides);
  check(options, config);
  const std::unique_ptr<Device> device = make_untuned_device(config);
  const PrecisionLosses losses(*device, config);
  const Config bf16 = without_fp8(config);
  const double plain = losses.of(bf16.precision, options.sequences);
  double reached = losses.of(config.precision, options.sequences);
  const double most = plain + std::log1p(options.rise_percent / 100);
  fmt::print("loss {:.5f} without FP8, {:.5f} with all of it: perplexity {:+.2f} %\n", plain, reached,
             percent(reached, plain));
  Config start = config;
  // INT8 costs little time, so nothing leaves FP8 for what it mends.
  if (reached > most && may_have_int8(config, *device)) {
    start.precision.forward_format = DType::kI8;
    const double int8 = losses.of(start.precision, options.sequences);
    fmt::print("loss {:.5f} with forward's products in int8: perplexity {:+.2f} %\n", int8, percent(int8, plain));
    if (int8 >= reached) start = config;
    reached = std::min(reached, int8);
  }
  Tuning tuning(options, start, losses);
  if (reached > most) {
    fmt::print("\n{:<32} rise of the loss, alone in FP8\n", "");
    tuning.measure(plain);
    reached = tuning.choose(most);
    if (reached > most) {
      throw_bad_input(
          "{}: --rise {} %: the perplexity rises by {:.2f} % even with all in {} that can leave FP8, because experts and "
          "vision towers stay in it; allow that much, or set precision.recipe = bf16",
          options.config_path, options.rise_percent, percent(reached, plain), name_of(config.precision.compute));
    }
  }
  const std::vector<Choice>& choices = tuning.choices();
  std::vector<std::string> overrides = options.overrides, own = overrides_of(config, choices);
  if (start.precision.forward_format == DType::kI8) own.push_back("precision.forward_format=int8");
  std::vector<std::string> leaving;
  for (const Choice& choice : choices) {
    if (choice.leaves) leaving.push_back(choice.name);
  }
  overrides.insert(overrides.end(), own.begin(), own.end());
  write_given_keys(options.write_path, options.config_path, overrides);
  const Config tuned = GivenConfig::read(options.config_path, options.overrides).with(own);
  const double most_seconds = step_seconds(bf16), least_seconds = step_seconds(config);
  fmt::print("\nleave FP8: {}\n", leaving.empty() ? "nothing" : fmt::format("{}", fmt::join(leaving, "; ")));
  fmt::print("loss {:.5f}: perplexity {:+.2f} %\n", reached, percent(reached, plain));
  const double tuned_seconds = step_seconds(tuned);
  if (tuned_seconds >= most_seconds) {
    fmt::print(
        "by operations and bytes a step is no faster than without FP8: precision.recipe=bf16 costs memory alone\n");
  } else if (most_seconds > least_seconds) {
    fmt::print("{:.0f} % of the time that FP8 saves is kept, by operations and bytes\n",
               100 * (most_seconds - tuned_seconds) / (most_seconds - least_seconds));
  }
  fmt::print("memory {:+.2f} GB\n", 1e-9 * static_cast<double>(planned_bytes(tuned, 1) - planned_bytes(config, 1)));
  fmt::print("wrote {}; next: parka train {}\n", options.write_path, options.write_path);
  return 0;
}

}  // namespace parka
