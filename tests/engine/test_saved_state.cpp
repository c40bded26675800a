#include "engine/checkpoint/saved_state.h"

#include <functional>

#include "core/error.h"
#include "engine/config/config_io.h"
#include "engine/huggingface/huggingface_origin.h"
#include "tests/support/catch.h"
#include "tests/support/temporary_folder.h"

using namespace parka;
using namespace parka::test;

namespace {

using nlohmann::json;

json state_of_a_run() {
  return {
      {"applied_steps", 3},
      {"config", {{"model", {{"d_model", 64}}}, {"training", {{"global_batch_size", 4}, {"micro_batch_size", 2}}}}},
      {"data",
       {{"epoch", 1},
        {"consumed", 12},
        {"fingerprint", 18446744073709551615u},
        {"files", {{{"name", "a.npy"}, {"bytes", 1}, {"fingerprint", 2}}}}}}};
}

LoadedCheckpoint saved(const TemporaryFolder& folder, const json& state) {
  save_checkpoint(folder.path().string(), {.step = 5, .state = state}, {});
  return load_checkpoint(folder / "step_00000005");
}

// What is said of a state changed like this.
std::string refusal(const std::function<void(json&)>& change,
                    const std::function<void(const LoadedCheckpoint&)>& read) {
  const TemporaryFolder folder;
  json state = state_of_a_run();
  change(state);
  const LoadedCheckpoint checkpoint = saved(folder, state);
  try {
    read(checkpoint);
  } catch (const Error& error) {
    CHECK(error.code() == ExitCode::kBadInput);
    return error.what();
  }
  return "";
}

}  // namespace

TEST_CASE("the state of a run is read back", "[engine][checkpoint]") {
  const TemporaryFolder folder;
  const LoadedCheckpoint checkpoint = saved(folder, state_of_a_run());
  CHECK(inference_config_of(checkpoint, {"training.steps=7"}).model.d_model == 64);
  CHECK(max_positions_of(checkpoint, 2048) == 2048);
  const SavedProgress progress = read_progress(checkpoint);
  CHECK((progress.applied_steps == 3 && progress.position.epoch == 1 && progress.position.consumed == 12));
  CHECK(progress.fingerprint == 18446744073709551615u);
  CHECK(progress.files.size() == 1);
  CHECK(progress.recent_steps.empty());
}

TEST_CASE("inference has all weights on its device, whatever the run divided", "[engine][checkpoint]") {
  const TemporaryFolder folder;
  json state = state_of_a_run();
  const std::vector<std::string> divided = {"precision.recipe=coat", "model.num_heads=2",
                                            "distributed.zero_stage=3", "precision.offload_weights=true",
                                            "optimizer.offload=true"};
  state["config"] = to_json(override_config(state["config"], divided, "test"));
  const LoadedCheckpoint checkpoint = saved(folder, state);
  CHECK(config_of(checkpoint).distributed.zero_stage == 3);
  const Config config = inference_config_of(checkpoint, {"precision.eval=bf16"});
  CHECK(config.precision.eval == EvalNumerics::kBf16);
  CHECK_FALSE(config.precision.offload_weights);
  CHECK(config.distributed.zero_stage == DistributedConfig{}.zero_stage);
}

TEST_CASE("keys that a run's version did not have are as it computed, not as today's recipe has them",
          "[engine][checkpoint]") {
  const auto precision_of = [](const std::vector<std::string>& left_out,
                               const std::vector<std::string>& overrides) {
    const TemporaryFolder folder;
    json state = state_of_a_run();
    state["config"] =
        to_json(override_config(state["config"], {"precision.recipe=parka", "model.num_heads=2"}, "test"));
    for (const std::string& key : left_out) state["config"]["precision"].erase(key);
    return inference_config_of(saved(folder, state), overrides).precision;
  };
  const PrecisionConfig today = precision_of({}, {});
  REQUIRE((today.head == Storage::kFp8 && today.sampled_amax));
  PrecisionConfig then = today;
  then.head = Storage::kCompute;
  then.sampled_amax = false;
  CHECK((precision_of({"head", "sampled_amax"}, {}) == then));
  CHECK((precision_of({"head", "sampled_amax"}, {"precision.head=fp8", "precision.sampled_amax=true"}) == today));
}

TEST_CASE(
    "a removed key without effect on bits is left out of a checkpoint's config, and another is refused by name",
    "[engine][checkpoint]") {
  const TemporaryFolder folder;
  json state = state_of_a_run();
  state["config"]["precision"] = {{"weight_copies_blocks", 3}, {"attention_output", "compute"}};
  state["config"]["distributed"] = {{"zero_stage", 3}, {"gathered_blocks", 5}};
  CHECK(config_of(saved(folder, state)).precision == PrecisionConfig{});
  const std::string message = refusal(
      [](json& changed) {
        changed["config"]["precision"] = {{"attention_output", "fp8"}};
      },
      [](const LoadedCheckpoint& checkpoint) { config_of(checkpoint); });
  CHECK(message.find("precision.attention_output") != std::string::npos);
}

TEST_CASE("recent steps of a run are read back, or refused", "[engine][checkpoint]") {
  const TemporaryFolder folder;
  json state = state_of_a_run();
  state["recent_steps"] = {{2.5, 0.125}, {2, 0.25}};
  const std::vector<SpikeGuard::Step> steps = read_progress(saved(folder, state)).recent_steps;
  REQUIRE(steps.size() == 2);
  CHECK((steps[0].loss == 2.5 && steps[0].grad_norm == 0.125 && steps[1].loss == 2));
  for (const json& bad : {json(3), json{{1.0}}, json{{1.0, "2"}}, json{{1.0, 2.0, 3.0}}}) {
    const std::string message = refusal([&](json& changed) { changed["recent_steps"] = bad; },
                                        [](const LoadedCheckpoint& checkpoint) { read_progress(checkpoint); });
    CHECK(message.find("\"recent_steps\" in its state") != std::string::npos);
  }
}

TEST_CASE("the last norm of a run is read back, or refused", "[engine][checkpoint]") {
  const TemporaryFolder folder;
  json state = state_of_a_run();
  CHECK(read_progress(saved(folder, state)).last_norm == 0);
  state["last_norm"] = 0.1;
  const TemporaryFolder other;
  CHECK(read_progress(saved(other, state)).last_norm == 0.1);
  for (const json& bad : {json("0.1"), json(-1), json(nullptr)}) {
    const std::string message = refusal([&](json& changed) { changed["last_norm"] = bad; },
                                        [](const LoadedCheckpoint& checkpoint) { read_progress(checkpoint); });
    CHECK(message.find("\"last_norm\" in its state is not a norm") != std::string::npos);
  }
}

TEST_CASE("the skipped steps of a run are read back, or refused", "[engine][checkpoint]") {
  const TemporaryFolder folder;
  json state = state_of_a_run();
  CHECK(read_progress(saved(folder, state)).skipped_in_a_row == 0);
  state["skipped_in_a_row"] = 2;  // the other three of the five steps were updates
  const TemporaryFolder other;
  CHECK(read_progress(saved(other, state)).skipped_in_a_row == 2);
  for (const json& bad : {json("2"), json(-1), json(3)}) {
    const std::string message = refusal([&](json& changed) { changed["skipped_in_a_row"] = bad; }, read_progress);
    CAPTURE(message);
    CHECK((message.find("\"skipped_in_a_row\"") != std::string::npos ||
           message.find("3 steps skipped since") != std::string::npos));
  }
}

TEST_CASE("a state that lacks something or has it in another type is refused by name", "[engine][checkpoint]") {
  const auto says = [](const std::string& message, const char* part) {
    CAPTURE(message, part);
    CHECK(message.find(part) != std::string::npos);
  };
  const auto config = [](const LoadedCheckpoint& checkpoint) { config_of(checkpoint); };
  says(refusal([](json& state) { state.erase("config"); }, config), "\"config\"");
  says(refusal([](json& state) { state = nullptr; }, config), "state");
  says(refusal([](json& state) { state["config"] = 3; }, config), "expected an object");
  const auto positions = [](const LoadedCheckpoint& checkpoint) { max_positions_of(checkpoint, 1); };
  says(refusal([](json& state) { state["max_positions"] = "many"; }, positions), "\"max_positions\"");
  const auto progress = [](const LoadedCheckpoint& checkpoint) { read_progress(checkpoint); };
  says(refusal([](json& state) { state.erase("data"); }, progress), "imported model");
  says(refusal([](json& state) { state.erase("applied_steps"); }, progress), "\"applied_steps\"");
  says(refusal([](json& state) { state["data"] = 1; }, progress), "\"data\"");
  says(refusal([](json& state) { state["data"]["epoch"] = -1; }, progress), "\"epoch\"");
  says(refusal([](json& state) { state["data"]["consumed"] = 1e300; }, progress), "\"consumed\"");
  says(refusal([](json& state) { state["data"]["fingerprint"] = "x"; }, progress), "\"fingerprint\"");
  says(refusal([](json& state) { state["data"]["files"] = {1}; }, progress), "\"files\"");
}

TEST_CASE("a progress that no run makes is refused", "[engine][checkpoint]") {
  const auto change = [](int64_t applied, int64_t epoch, int64_t consumed) {
    return refusal(
        [=](json& state) {
          state["applied_steps"] = applied;
          state["data"]["epoch"] = epoch;
          state["data"]["consumed"] = consumed;
        },
        read_progress);
  };
  CHECK(change(5, 0, 20).empty());
  CHECK(change(0, 4, 4).empty());  // of data that is one batch
  const auto [applied, epoch, consumed] = GENERATE(table<int64_t, int64_t, int64_t>({
      {6, 0, 20},         // more updates than steps
      {INT64_MAX, 1, 4},  //
      {5, 6, 0},          // more epochs than steps
      {5, int64_t{1} << 62, 4},
      {5, 0, 24},  // more batches than steps
      {5, 4, 8},   // one for each of the epochs before
      {5, 0, INT64_MAX - 3},
      {5, 0, 18},  // half a batch
  }));
  CAPTURE(applied, epoch, consumed);
  const std::string message = change(applied, epoch, consumed);
  CHECK(message.find("says 5 steps with batches of 4 sequences,") != std::string::npos);
}

TEST_CASE("no origin is looked for where checkpoint.init_from is no text", "[engine][checkpoint]") {
  const auto origin = [](const json& state) { return find_origin("model", state, [](const std::string&) {}); };
  CHECK_FALSE(origin({{"config", {{"checkpoint", {{"init_from", 3}}}}}}));
  CHECK_FALSE(origin({{"config", 3}}));
  CHECK_FALSE(origin(3));
}
