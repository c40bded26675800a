#include <algorithm>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "core/error.h"
#include "engine/config/config_io.h"
#include "engine/planning/memory_advice.h"
#include "tests/support/catch.h"

using namespace parka;
using nlohmann::json;

namespace {

using Results = MemoryChange::Results;

// Of a recipe whose FP8 weights, activations and states all count.
json fp8_config() {
  return {{"model",
           {{"vocab_size", 512},
            {"d_model", 128},
            {"num_layers", 6},
            {"num_heads", 4},
            {"d_ffn", 256},
            {"norm", "rmsnorm"},
            {"tie_embeddings", false}}},
          {"precision", {{"recipe", "parka"}}},
          {"data", {{"train", {"train.npy"}}, {"sequence_length", 64}}},
          {"training", {{"global_batch_size", 8}, {"micro_batch_size", 2}}}};
}

std::optional<MemoryAdvice> fit(const json& config, const MemoryBytes& limit) {
  return cheapest_changes(config, 1, limit, ChangeOrder::kSameBitsFirst);
}

MemoryBytes planned_with(const json& config, const std::vector<std::string>& overrides) {
  return planned_memory(override_config(config, overrides, "test"), 1);
}

// Not what the config refuses: one change may need another.
bool fits(const json& config, const std::vector<std::string>& overrides, const MemoryBytes& limit) {
  try {
    return planned_with(config, overrides).within(limit);
  } catch (const Error&) {
    return false;
  }
}

// Within the limits, and not without any one of the changes.
void check_fit(const json& config, const MemoryBytes& limit, const MemoryAdvice& advice) {
  const std::vector<std::string> overrides = advice.overrides();
  CAPTURE(overrides);
  const MemoryBytes planned = planned_with(config, overrides);
  CHECK(planned.within(limit));
  CHECK(planned.gpu == advice.planned.gpu);
  CHECK(planned.host == advice.planned.host);
  for (size_t left_out = 0; left_out < overrides.size(); ++left_out) {
    std::vector<std::string> others = overrides;
    others.erase(others.begin() + static_cast<std::ptrdiff_t>(left_out));
    CHECK_FALSE(fits(config, others, limit));
  }
}

bool has_other_results(const MemoryAdvice& advice) {
  return std::any_of(advice.changes.begin(), advice.changes.end(),
                     [](const MemoryChange& change) { return change.results != Results::kSameBits; });
}

int64_t needed(const json& config) { return planned_with(config, {}).gpu; }

}  // namespace

TEST_CASE("a fit is within its limits, and not without any one change", "[engine][memory fit]") {
  const json config = fp8_config();
  const int64_t all = needed(config);
  for (const int64_t percent : {100, 90, 80, 70}) {
    CAPTURE(percent);
    const MemoryBytes limit = {.gpu = all / 100 * percent + (percent == 100 ? 100 : 0)};
    const auto advice = fit(config, limit);
    REQUIRE(advice);
    CHECK(advice->changes.empty() == (percent == 100));
    check_fit(config, limit, *advice);
  }
  CHECK_FALSE(fit(config, {.gpu = all / 100}));
}

TEST_CASE("a fit changes results only where the same bits are not enough", "[engine][memory fit]") {
  const json config = fp8_config();
  const int64_t all = needed(config);
  std::vector<bool> other;  // with less and less memory
  std::vector<std::string> seen;
  for (int64_t percent = 96; percent >= 40; percent -= 8) {
    const auto advice = fit(config, {.gpu = all / 100 * percent});
    if (!advice) break;
    other.push_back(has_other_results(*advice));
    seen.push_back(advice->arguments());
  }
  CAPTURE(seen);
  CHECK(std::is_sorted(other.begin(), other.end()));
  CHECK_FALSE(other.front());
  CHECK(other.back());
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
      const MemoryBytes limit = {.gpu = all / 100 * percent, .host = 0};
      const auto advice = fit(config, limit);
      if (!advice) break;
      check_fit(config, limit, *advice);
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
  REQUIRE(planned_with(config, {"optimizer.offload=true"}).gpu >= needed(config));
  const MemoryBytes limit = {
      .gpu = planned_with(config, {"optimizer.gradient=bf16", "precision.weight_copies=none"}).gpu};
  const auto advice = fit(config, limit);
  REQUIRE(advice);
  check_fit(config, limit, *advice);
}

TEST_CASE("a fit takes no more host memory than there is", "[engine][memory fit]") {
  const json config = fp8_config();
  MemoryBytes limit = {.gpu = needed(config) / 100 * 80};
  const MemoryAdvice offloads = fit(config, limit).value();
  CHECK(offloads.planned.host > 0);
  limit.host = 0;
  const MemoryAdvice without = fit(config, limit).value();
  CHECK(without.planned.host == 0);
  check_fit(config, limit, without);
}
