#include "engine/planning/memory_advice.h"

#include <algorithm>
#include <filesystem>
#include <limits>
#include <set>
#include <string>
#include <vector>

#include "core/error.h"
#include "engine/config/config_io.h"
#include "kernels/op/workspace.h"
#include "tests/engine/step_config.h"
#include "tests/support/catch.h"
#include "tests/support/temporary_folder.h"

using namespace parka;
using namespace parka::test;
using nlohmann::json;

namespace {

json shipped_config(const std::string& name, const std::vector<std::string>& overrides = {}) {
  return given_keys(PARKA_SOURCE_DIR "/configs/" + name + ".json", overrides);
}

// What is planned with overrides; more than any limit where the config refuses them.
int64_t planned_with(const json& config, const std::vector<std::string>& overrides, int64_t num_gpus) {
  try {
    return planned_bytes(override_config(config, overrides, "test"), num_gpus);
  } catch (const Error&) {
    return std::numeric_limits<int64_t>::max();
  }
}

// Fits with all changes, and without any one of them does not.
void check_advice(const json& config, const MemoryAdvice& advice, int64_t limit_bytes) {
  const std::vector<std::string> overrides = advice.overrides();
  CAPTURE(advice.num_gpus, limit_bytes, overrides);
  CHECK(planned_with(config, overrides, advice.num_gpus) == advice.planned.gpu);
  CHECK(advice.planned.gpu <= limit_bytes);
  std::set<std::string> keys;
  for (const std::string& override : overrides) keys.insert(override.substr(0, override.find('=')));
  CHECK(keys.size() == overrides.size());
  for (size_t left_out = 0; left_out < overrides.size(); ++left_out) {
    std::vector<std::string> others = overrides;
    others.erase(others.begin() + static_cast<std::ptrdiff_t>(left_out));
    CHECK(planned_with(config, others, advice.num_gpus) > limit_bytes);
  }
}

}  // namespace

TEST_CASE("what a plan proposes fits, and does not without any one change", "[engine][memory advice][slow]") {
  size_t advised = 0;
  for (const auto& entry : std::filesystem::directory_iterator(PARKA_SOURCE_DIR "/configs")) {
    if (entry.path().extension() != ".json") continue;
    const json config = given_keys(entry.path().string(), {});
    for (const int64_t num_gpus : {1, 8}) {
      const int64_t needed = planned_with(config, {}, num_gpus);
      for (const int64_t percent : num_gpus == 1 ? std::vector<int64_t>{90, 50} : std::vector<int64_t>{65}) {
        CAPTURE(entry.path().filename().string(), percent);
        const auto advice = cheapest_changes(config, num_gpus, {.gpu = needed / 100 * percent});
        if (!advice) continue;
        ++advised;
        CHECK(!advice->changes.empty());
        check_advice(config, *advice, needed / 100 * percent);
      }
    }
  }
  CHECK(advised > 30);
}

TEST_CASE("a plan proposes nothing for a run that fits", "[engine][memory advice]") {
  const json config = shipped_config("tiny-llama");
  const int64_t needed = planned_with(config, {}, 1);
  const auto fits = cheapest_changes(config, 1, {.gpu = needed});
  REQUIRE(fits);
  CHECK(fits->changes.empty());
  CHECK(fits->arguments().empty());
  CHECK(fits->planned.gpu == needed);
  CHECK_FALSE(cheapest_changes(config, 1, {.gpu = needed / 1000}));
}

TEST_CASE("a plan proposes the cheap changes before the dear ones", "[engine][memory advice][slow]") {
  constexpr int64_t kLimit = 80'000'000'000 - kContextBytes;
  const json config = shipped_config("llama3-8b", {"precision.recipe=parka"});
  const auto advice = cheapest_changes(config, 1, {.gpu = kLimit});
  REQUIRE(advice);
  CHECK(advice->overrides() == std::vector<std::string>{"precision.weight_copies=none", "precision.head=compute",
                                                        "precision.offload_blocks=7", "optimizer.gradient=bf16"});
  CHECK(advice->arguments() ==
        "--set precision.weight_copies=none --set precision.head=compute --set precision.offload_blocks=7 --set "
        "optimizer.gradient=bf16");
  check_advice(config, *advice, kLimit);
  // A key that the file gives is not undone by a recipe that is proposed.
  const json kept = shipped_config("llama2-7b", {"precision.qkv=compute"});
  const auto recipe = cheapest_changes(kept, 1, {.gpu = 46'000'000'000});
  REQUIRE(recipe);
  check_advice(kept, *recipe, 46'000'000'000);
}

TEST_CASE("a plan proposes that GPUs share each sequence, if it is long", "[engine][memory advice][slow]") {
  constexpr int64_t kLimit = 68'500'000'000;
  const auto shares = [&](int64_t length, int64_t num_gpus, int64_t limit) {
    const json config = shipped_config(
        "llama3-8b", {"precision.recipe=parka", "training.micro_batch_size=1", "training.global_batch_size=8",
                      "data.sequence_length=" + std::to_string(length)});
    const auto advice = cheapest_changes(config, num_gpus, {.gpu = limit});
    REQUIRE(advice);
    check_advice(config, *advice, limit);
    const std::string arguments = advice->arguments(), key = "distributed.context_parallel=";
    const size_t at = arguments.find(key);
    return at == std::string::npos ? 1 : std::stoll(arguments.substr(at + key.size()));
  };
  CHECK(shares(131'072, 2, kLimit) == 2);
  CHECK(shares(131'072, 8, kLimit) > 1);
  CHECK(shares(8192, 8, kLimit / 4) == 1);
}

TEST_CASE("a plan says which stages of ZeRO add in another order, and takes all as early",
          "[engine][memory advice]") {
  const TemporaryFolder folder;
  const auto other_sums = [&](int64_t stage, int64_t micro_batches) {
    Config config = step_config(folder.path().string(), "bf16", stage, true, micro_batches, 2);
    std::vector<bool> others;
    for (const MemoryChange& change : memory_changes(config, 2)) {
      if (change.key() != kZeroStageKey) continue;
      CHECK(change.taken_among() == MemoryChange::Results::kSameBits);
      others.push_back(change.results == MemoryChange::Results::kOtherSums);
    }
    return others;
  };
  CHECK(other_sums(0, 1) == std::vector{true, true, true});
  CHECK(other_sums(1, 1) == std::vector{false, false});
  CHECK(other_sums(1, 2) == std::vector{true, true});
  CHECK(other_sums(2, 2) == std::vector{false});
}

TEST_CASE("a plan proposes no change that a config refuses", "[engine][memory advice]") {
  const TemporaryFolder folder;
  Config config = step_config(folder.path().string(), "bf16", 0, true, 2, 2);
  config.telemetry.interval = 1;  // which looks at whole weights, so that stage 3 is refused
  const json given = to_json(config);
  const int64_t divisible = planned_bytes(config, 2) - cuda::kGemmWorkspaceBytes;
  bool proposed_stage = false;
  for (int64_t part = 1; part < 20; ++part) {
    const int64_t limit = cuda::kGemmWorkspaceBytes + divisible * part / 20;
    const auto advice = cheapest_changes(given, 2, {.gpu = limit});
    if (!advice) continue;
    check_advice(given, *advice, limit);
    CHECK(advice->arguments().find("zero_stage=3") == std::string::npos);
    proposed_stage = proposed_stage || advice->arguments().find("zero_stage=2") != std::string::npos;
  }
  CHECK(proposed_stage);
}

TEST_CASE("a plan counts what NCCL takes for groups of GPUs", "[engine][memory advice]") {
  const auto of_groups = [](const std::string& shard_size, const std::string& context, int64_t num_gpus) {
    const Config config = override_config(
        shipped_config("llama2-7b-parka"),
        {"distributed.shard_size=" + shard_size, "distributed.context_parallel=" + context}, "test");
    const GpuPlan plan = plan_for_gpus(config, num_gpus);
    const auto line = std::ranges::find(plan.lines, "NCCL of groups of GPUs", &GpuPlan::Line::category);
    const int64_t bytes = line == plan.lines.end() ? 0 : line->bytes;
    CHECK(plan.total_bytes == planned_bytes(config, num_gpus));
    CHECK(bytes == group_bytes(config, num_gpus));
    return bytes;
  };
  CHECK(of_groups("0", "1", 1) == 0);
  CHECK(of_groups("0", "1", 4) == 0);
  CHECK(of_groups("4", "4", 4) == 0);
  CHECK(of_groups("2", "1", 4) == 2 * kNcclGroupBytes);  // two shards, and two ranks across them
  CHECK(of_groups("0", "2", 4) == kNcclGroupBytes);
  CHECK(of_groups("4", "2", 8) == 3 * kNcclGroupBytes);
}

TEST_CASE("a plan divides weights before it divides experts", "[engine][memory advice][moe]") {
  const auto with = [](std::vector<std::string> overrides, const std::string& stage) {
    overrides.push_back("distributed.zero_stage=" + stage);
    return override_config(shipped_config("qwen3-30b-a3b-2gpu"), overrides, "test");
  };
  const std::vector<std::string> by_two = {"distributed.expert_parallel=2"};
  const Config whole = with({}, "1"), divided = with(by_two, "1");
  CHECK(group_bytes(divided, 2) == 0);
  // Ranks that divide experts are a group, and so are those with the same experts.
  CHECK(group_bytes(with(by_two, "2"), 4) == 2 * kNcclGroupBytes);
  const std::vector<MemoryChange> changes = memory_changes(whole, 4);
  const auto place_of = [&](const char* override) {
    return std::ranges::find(changes, override, &MemoryChange::override) - changes.begin();
  };
  CHECK(place_of("distributed.zero_stage=3") < place_of("distributed.expert_parallel=2"));
  CHECK(place_of("distributed.expert_parallel=4") < std::ssize(changes));
  CHECK(planned_bytes(divided, 2) < planned_bytes(whole, 2));
}

TEST_CASE("a plan names the fewest GPUs that a run fits on", "[engine][memory advice][slow]") {
  constexpr int64_t kGpu = 40'000'000'000;
  const auto of_gpu = [](int64_t bytes) {
    return [bytes](int64_t gpus) { return MemoryBytes{.gpu = bytes - context_bytes(gpus)}; };
  };
  const json config = shipped_config("llama2-7b-parka", {"distributed.zero_stage=0"});
  const auto advice = fewest_gpus(config, 1, of_gpu(kGpu), MoreGpus::kWithStages);
  REQUIRE(advice);
  CHECK(advice->num_gpus == 4);  // 3 do not divide the batch
  check_advice(config, *advice, kGpu - context_bytes(4));
  CHECK(advice->overrides() == std::vector<std::string>{"distributed.zero_stage=3"});
  for (const char* stage : {"1", "2", "3"}) {
    CHECK(planned_with(config, {std::string("distributed.zero_stage=") + stage}, 2) > kGpu - context_bytes(2));
  }
  // Two are enough with other changes; where no number is enough without, the changes are named.
  const auto changed = fewest_gpus(config, 1, of_gpu(kGpu), MoreGpus::kWithChanges);
  REQUIRE(changed);
  CHECK(changed->num_gpus == 2);
  check_advice(config, *changed, kGpu - context_bytes(2));
  CHECK_FALSE(fewest_gpus(config, 1, of_gpu(2'000'000'000), MoreGpus::kWithChanges));
  // Two need host memory, which the GPUs of a host share.
  CHECK(changed->planned.host > 0);
  const auto with_host = [&](int64_t gpus) {
    return MemoryBytes{.gpu = kGpu - context_bytes(gpus), .host = changed->planned.host / gpus};
  };
  CHECK_FALSE(changed->planned.within(with_host(2)));
  const auto shared = fewest_gpus(config, 1, with_host, MoreGpus::kWithChanges);
  REQUIRE(shared);
  CHECK(shared->planned.within(with_host(shared->num_gpus)));
}
