#include "engine/planning/memory_fit.h"

#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "core/error.h"
#include "engine/config/config_io.h"
#include "engine/config/given_keys.h"
#include "tests/support/catch.h"

using namespace parka;
using nlohmann::json;

namespace {

using Results = MemoryChange::Results;

constexpr int64_t kBlocks = 6;

// Of a recipe whose FP8 weights, activations and states all count.
json fp8_config() {
  return {{"model",
           {{"vocab_size", 512},
            {"d_model", 128},
            {"num_layers", kBlocks},
            {"num_heads", 4},
            {"d_ffn", 256},
            {"norm", "rmsnorm"},
            {"tie_embeddings", false}}},
          {"precision", {{"recipe", "parka"}}},
          {"data", {{"train", {"train.npy"}}, {"sequence_length", 64}}},
          {"training", {{"global_batch_size", 8}, {"micro_batch_size", 2}}}};
}

// What a step takes longer with rows or no copies of all blocks; in between it is in proportion.
double of_copies(const PrecisionConfig& precision, double rows, double none) {
  const bool some = precision.weight_copies_blocks > 0;
  const double without = some ? 1 - static_cast<double>(precision.weight_copies_blocks) / kBlocks : 0;
  if (precision.weight_copies == WeightCopies::kNone) return none;
  if (precision.weight_copies == WeightCopies::kRows) return rows + (none - rows) * without;
  return rows * without;
}

// A step of one second, and what each change adds to it.
using Prices = std::map<std::string, double>;
StepSeconds seconds_by(const Prices& prices) {
  return [prices](const Config& config) -> std::optional<double> {
    const auto of = [&](const std::string& change) {
      const auto price = prices.find(change);
      return price == prices.end() ? 0 : price->second;
    };
    double sum = 1 + of_copies(config.precision, of("rows"), of("none"));
    if (config.precision.recompute == Recompute::kBlock) sum += of("recompute");
    if (config.optimizer.gradient == DType::kBF16) sum += of("gradient");
    if (config.optimizer.master == MasterForm::kBf16Sr) sum += of("bf16_sr");
    if (config.training.micro_batch_size == 1) sum += of("micro");
    if (config.optimizer.offload) sum += of("offload");
    return sum + of("block") * static_cast<double>(config.precision.offload_blocks);
  };
}

// Every set of changes of different keys that plans something, with every number of blocks that keep copies.
struct PlannedSet {
  MemoryBytes planned;
  Config config;
  Results results = Results::kSameBits;  // the most that one of its changes does
};
std::vector<PlannedSet> all_sets(const json& config) {
  const std::vector<MemoryChange> changes = memory_changes(parse_config(config, "test"), 1);
  std::vector<ChosenChanges> sets = {ChosenChanges(config, changes, 1)};
  for (size_t i = 0; i < changes.size(); ++i) {
    for (size_t set = sets.size(); set-- > 0;) {
      ChosenChanges with = sets[set];
      with.choose(i);
      if (with.changes().size() > sets[set].changes().size()) sets.push_back(std::move(with));
    }
  }
  std::vector<PlannedSet> result;
  for (ChosenChanges& set : sets) {
    const bool changes_copies = set.config() && set.config()->precision.weight_copies != WeightCopies::kAuto;
    for (int64_t blocks = 0; blocks < (changes_copies ? kBlocks : 1); ++blocks) {
      set.keep_copies(blocks);
      const auto planned = set.planned();
      if (!planned) continue;
      result.push_back({*planned, *set.config()});
      for (const MemoryChange& change : set.changes()) {
        result.back().results = std::max(result.back().results, change.results);
      }
    }
  }
  return result;
}

double least_seconds(const std::vector<PlannedSet>& sets, const FitRequest& request, Results most) {
  double least = 1e9;
  for (const PlannedSet& set : sets) {
    if (set.results > most || !set.planned.within(request.limit)) continue;
    least = std::min(least, request.seconds(set.config).value());
  }
  return least;
}

Config changed(const FitRequest& request, const MemoryAdvice& advice) {
  return request.config.with(advice.overrides());
}

// Not what the config refuses: one change may need another.
bool fits(const FitRequest& request, const MemoryAdvice& advice) {
  try {
    return planned_memory(changed(request, advice), request.num_gpus).within(request.limit);
  } catch (const Error&) {
    return false;
  }
}

// Within the limits, and not without any one of the changes.
void check_fit(const FitRequest& request, const MemoryAdvice& advice) {
  const std::vector<std::string> overrides = advice.overrides();
  CAPTURE(overrides);
  const MemoryBytes planned = planned_memory(changed(request, advice), request.num_gpus);
  CHECK(planned.within(request.limit));
  CHECK(planned.gpu == advice.planned.gpu);
  CHECK(planned.host == advice.planned.host);
  for (size_t left_out = 0; left_out < advice.changes.size(); ++left_out) {
    MemoryAdvice others = advice;
    others.changes.erase(others.changes.begin() + static_cast<std::ptrdiff_t>(left_out));
    CHECK_FALSE(fits(request, others));
  }
}

bool has_other_results(const MemoryAdvice& advice) {
  return std::any_of(advice.changes.begin(), advice.changes.end(),
                     [](const MemoryChange& change) { return change.results != Results::kSameBits; });
}

int64_t needed(const json& config) { return planned_memory(parse_config(config, "test"), 1).gpu; }

}  // namespace

TEST_CASE("a fit is within its limits, and not without any one change", "[engine][memory fit][slow]") {
  const json config = fp8_config();
  const int64_t all = needed(config);
  const Prices prices = {{"rows", 0.2}, {"none", 0.3}, {"block", 0.1}, {"recompute", 0.4}, {"micro", 0.1}};
  size_t fits = 0;
  for (const bool any_results : {false, true}) {
    for (const StepSeconds& seconds : {StepSeconds(), seconds_by(prices)}) {
      for (const int64_t percent : {100, 80, 60}) {
        const FitRequest request{.config = config,
                                 .limit = {.gpu = all / 100 * percent + (percent == 100 ? 100 : 0)},
                                 .any_results = any_results,
                                 .seconds = seconds};
        CAPTURE(any_results, percent, static_cast<bool>(seconds));
        const auto advice = cheapest_fit(request);
        if (!advice) continue;
        ++fits;
        CHECK(advice->changes.empty() == (percent == 100));
        check_fit(request, *advice);
      }
    }
  }
  CHECK(fits >= 8);
  CHECK_FALSE(cheapest_fit({.config = config, .limit = {.gpu = all / 100}}));
}

TEST_CASE("a fit is the cheapest by the expected seconds", "[engine][memory fit][slow]") {
  json config = fp8_config();
  config["optimizer"]["offload"] = config["precision"]["offload_weights"] = true;  // a quarter of the sets
  const int64_t all = needed(config);
  const std::vector<PlannedSet> sets = all_sets(config);
  CHECK(sets.size() > 100);
  const Prices all_prices[] = {
      {{"rows", 0.2}, {"none", 0.25}, {"block", 0.01}, {"recompute", 0.4}, {"micro", 0.3}, {"gradient", 0.5}},
      {{"rows", 0.4}, {"none", 0.01}, {"block", 0.2}, {"recompute", 0.02}, {"gradient", 0.1}},
      {{"rows", 0.1}, {"none", 0.5}, {"block", 0.03}, {"recompute", 0.2}, {"gradient", 0.01}, {"bf16_sr", 0.7}},
  };
  size_t compared = 0;
  for (const Prices& prices : all_prices) {
    for (const int64_t percent : {97, 95, 88}) {
      CAPTURE(percent, prices);
      FitRequest request{.config = config, .limit = {.gpu = all / 100 * percent}, .seconds = seconds_by(prices)};
      for (const Results most : {Results::kSameBits, Results::kOtherPrecision}) {
        request.any_results = most != Results::kSameBits;
        const double least = least_seconds(sets, request, most);
        if (least == 1e9) continue;
        ++compared;
        const auto advice = cheapest_fit(request);
        REQUIRE(advice);
        check_fit(request, *advice);
        CHECK((request.any_results || !has_other_results(*advice)));
        CHECK(request.seconds(changed(request, *advice)).value() == Approx(least));
      }
    }
  }
  CHECK(compared >= 9);
}

TEST_CASE("a fit makes no change that is not needed, even if it is faster", "[engine][memory fit]") {
  const json config = fp8_config();
  const FitRequest request{.config = config,
                           .limit = {.gpu = needed(config) / 100 * 95},
                           .any_results = true,
                           .seconds = seconds_by({{"gradient", -0.5}, {"bf16_sr", -0.1}, {"recompute", 0.1}})};
  const auto advice = cheapest_fit(request);
  REQUIRE(advice);
  check_fit(request, *advice);
  CHECK(advice->changes.size() == 1);
}

TEST_CASE("a fit gives up copies of weights of no more blocks than it takes", "[engine][memory fit]") {
  // From both copies of all blocks to none of any; the number is that of the copies given up.
  std::vector<std::vector<std::string>> steps = {{}};
  for (const char* copies : {"both", "rows"}) {
    for (int64_t blocks = kBlocks - 1; blocks > 0; --blocks) {
      steps.push_back({"precision.weight_copies_blocks=" + std::to_string(blocks)});
      if (copies == std::string("rows")) steps.back().insert(steps.back().begin(), "precision.weight_copies=rows");
    }
    steps.push_back({std::string("precision.weight_copies=") + (copies == std::string("both") ? "rows" : "none")});
  }
  json config = fp8_config();
  config["precision"].update(json{{"save_product", false}, {"save_norm_output", false}});
  config["optimizer"]["master"] = "fp32_split";  // nothing else comes before the copies
  const auto planned = [&](const std::vector<std::string>& step) {
    return planned_memory(override_config(config, step, "test"), 1).gpu;
  };
  const Prices prices = {{"rows", 0.1},    {"none", 0.3}, {"block", 1},
                         {"recompute", 1}, {"micro", 1},  {"offload", 1}};
  size_t compared = 0;
  for (size_t step = 1; step < steps.size(); ++step) {
    const int64_t limit = planned(steps[step]);
    const auto first = std::find_if(steps.begin(), steps.end(), [&](const auto& s) { return planned(s) <= limit; });
    for (const StepSeconds& seconds : {StepSeconds(), seconds_by(prices)}) {
      const FitRequest request{.config = config, .limit = {.gpu = limit}, .seconds = seconds};
      const MemoryAdvice advice = cheapest_fit(request).value();
      CAPTURE(step, limit, static_cast<bool>(seconds), advice.arguments());
      CHECK(advice.overrides() == *first);
      check_fit(request, advice);
      compared += first == steps.begin() + static_cast<std::ptrdiff_t>(step) ? 1 : 0;
    }
  }
  CHECK(compared == 2 * (steps.size() - 1));
}

TEST_CASE("a fit gives up all copies of weights where some would cost more", "[engine][memory fit]") {
  json config = fp8_config();
  const Prices prices = {{"rows", 0.5},    {"none", 0.01}, {"block", 1},
                         {"recompute", 1}, {"micro", 1},   {"offload", 1}};
  config["precision"].update(json{{"save_product", false}, {"save_norm_output", false}});
  config["optimizer"]["master"] = "fp32_split";
  const FitRequest request{
      .config = config, .limit = {.gpu = needed(config) / 100 * 97}, .seconds = seconds_by(prices)};
  CHECK(cheapest_fit(request).value().arguments() == "--set precision.weight_copies=none");
}

TEST_CASE("a fit goes on from copies of some blocks", "[engine][memory fit]") {
  json config = fp8_config();
  config["precision"].update(json{{"save_product", false},
                                  {"save_norm_output", false},
                                  {"weight_copies", "both"},
                                  {"weight_copies_blocks", 4}});
  config["optimizer"]["master"] = "fp32_split";
  const auto advice_for = [&](const std::vector<std::string>& step) {
    const int64_t limit = planned_memory(override_config(config, step, "test"), 1).gpu;
    const FitRequest request{.config = config, .limit = {.gpu = limit}};
    const MemoryAdvice advice = cheapest_fit(request).value();
    check_fit(request, advice);
    return advice.overrides();
  };
  using Overrides = std::vector<std::string>;
  const Overrides fewer = {"precision.weight_copies_blocks=2"};
  CHECK(advice_for(fewer) == fewer);
  const Overrides rows = {"precision.weight_copies=rows", "precision.weight_copies_blocks=1"};
  CHECK(advice_for(rows) == rows);
  const Overrides none = {"precision.weight_copies=none", "precision.weight_copies_blocks=0"};
  CHECK(advice_for(none) == none);
}

TEST_CASE("a fit changes results only where the same bits are not enough", "[engine][memory fit]") {
  const json config = fp8_config();
  const int64_t all = needed(config);
  const Prices dear = {{"rows", 1}, {"none", 1}, {"block", 1}, {"recompute", 1}, {"offload", 1}};
  for (const StepSeconds& seconds : {StepSeconds(), seconds_by(dear)}) {
    std::vector<bool> other;  // with less and less memory
    std::vector<std::string> seen;
    for (int64_t percent = 96; percent >= 40; percent -= 8) {
      const FitRequest request{.config = config, .limit = {.gpu = all / 100 * percent}, .seconds = seconds};
      const auto advice = cheapest_fit(request);
      if (!advice) break;
      other.push_back(has_other_results(*advice));
      seen.push_back(advice->arguments());
    }
    CAPTURE(seen);
    CHECK(std::is_sorted(other.begin(), other.end()));
    CHECK_FALSE(other.front());
    CHECK(other.back());
  }
  // Where they are allowed, what costs nothing is made first.
  const FitRequest any{
      .config = config, .limit = {.gpu = all / 100 * 98}, .any_results = true, .seconds = seconds_by(dear)};
  const MemoryAdvice allowed = cheapest_fit(any).value();
  CAPTURE(allowed.arguments());
  CHECK(has_other_results(allowed));
}

TEST_CASE("gradients are released only in steps of one micro-batch that cannot be smaller",
          "[engine][memory fit]") {
  const auto chosen = [](int64_t batch, int64_t micro_batch, double clip_norm, int64_t sequence_length = 64) {
    json config = fp8_config();
    config["data"]["sequence_length"] = sequence_length;
    config["training"] = {{"global_batch_size", batch}, {"micro_batch_size", micro_batch}};
    config["optimizer"] = {{"clip_norm", clip_norm}, {"gradient", "bf16"}, {"master", "bf16_sr"}};
    config["precision"]["recompute"] = "block";
    const int64_t all = needed(config);
    std::vector<std::string> seen;
    for (int64_t percent = 98; percent >= 20; percent -= 6) {
      const FitRequest request{.config = config, .limit = {.gpu = all / 100 * percent, .host = 0}};
      const auto advice = cheapest_fit(request);
      if (!advice) break;
      check_fit(request, *advice);
      seen.push_back(advice->arguments());
    }
    return seen;
  };
  const auto releases = [](const std::vector<std::string>& seen) {
    return std::any_of(seen.begin(), seen.end(),
                       [](const std::string& set) { return set.find("release_gradients") != std::string::npos; });
  };
  CHECK(releases(chosen(1, 1, 0)));
  CHECK(releases(chosen(1, 1, 1)));
  CHECK_FALSE(releases(chosen(8, 1, 0)));
  const std::vector<std::string> of_one = chosen(8, 8, 0, 1024);
  CAPTURE(of_one);
  CHECK(std::any_of(of_one.begin(), of_one.end(),
                    [](const std::string& set) { return set.find("micro_batch_size=1") != std::string::npos; }));
}

TEST_CASE("a fit is found where buffers of offload take more than they save", "[engine][memory fit]") {
  json config = fp8_config();
  const auto [vocabulary, width, num_layers] = GENERATE(std::tuple(32000, 256, 6), std::tuple(256, 256, 1));
  CAPTURE(vocabulary, num_layers);
  config["model"].update(
      {{"vocab_size", vocabulary}, {"d_model", width}, {"d_ffn", 2 * width}, {"num_layers", num_layers}});
  config["optimizer"] = {{"master", "bf16_sr"}};
  config["data"]["sequence_length"] = 256;
  config["training"] = {{"global_batch_size", 1}, {"micro_batch_size", 1}};
  const auto planned_with = [&](const std::vector<std::string>& overrides) {
    return planned_memory(override_config(config, overrides, "test"), 1).gpu;
  };
  REQUIRE(planned_with({"optimizer.offload=true"}) >= planned_with({}));
  const std::vector<std::string> enough = {"optimizer.gradient=bf16", "precision.weight_copies=none"};
  for (const StepSeconds& seconds :
       {StepSeconds(), seconds_by({{"gradient", 0.1}, {"rows", 0.1}, {"none", 0.2}})}) {
    const FitRequest request{
        .config = config, .limit = {.gpu = planned_with(enough)}, .any_results = true, .seconds = seconds};
    const auto advice = cheapest_fit(request);
    REQUIRE(advice);
    check_fit(request, *advice);
  }
}

TEST_CASE("a fit takes no more host memory than there is", "[engine][memory fit]") {
  const json config = fp8_config();
  const Prices prices = {{"rows", 0.5}, {"none", 0.6}, {"recompute", 0.7}};
  for (const StepSeconds& seconds : {StepSeconds(), seconds_by(prices)}) {
    FitRequest request{.config = config, .limit = {.gpu = needed(config) / 100 * 94}, .seconds = seconds};
    const MemoryAdvice offloads = cheapest_fit(request).value();
    if (seconds) CHECK(offloads.planned.host > 0);
    request.limit.host = 0;
    const MemoryAdvice without = cheapest_fit(request).value();
    CHECK(without.planned.host == 0);
    check_fit(request, without);
  }
}

TEST_CASE("changes that nothing is expected of are made only where others are not enough", "[engine][memory fit]") {
  json config = fp8_config();
  config["precision"]["recipe"] = "bf16";
  const StepSeconds of_bf16 = [&](const Config& changed) -> std::optional<double> {
    if (changed.precision.recipe != Recipe::kBf16) return std::nullopt;
    return seconds_by({{"recompute", 0.5}, {"bf16_sr", 2}})(changed);
  };
  const int64_t all = needed(config);
  bool with_recipe = false;
  for (int64_t percent = 90; percent >= 30; percent -= 10) {
    const FitRequest request{
        .config = config, .limit = {.gpu = all / 100 * percent, .host = 0}, .seconds = of_bf16};
    const auto advice = cheapest_fit(request);
    if (!advice) break;
    check_fit(request, *advice);
    const bool has_recipe = advice->arguments().find("precision.recipe=parka") != std::string::npos;
    CHECK((has_recipe || !with_recipe));
    with_recipe = with_recipe || has_recipe;
  }
  CHECK(with_recipe);
}
