#include "engine/products/run_gemms.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "engine/config/config_io.h"
#include "engine/products/product_scratch.h"
#include "engine/training/training_run.h"
#include "tests/engine/named_device.h"
#include "tests/engine/step_config.h"
#include "tests/support/alone.h"
#include "tests/support/catch.h"
#include "tests/support/temporary_folder.h"

using namespace parka;
using namespace parka::test;

namespace {

constexpr const char* kAlgorithm = "0123";  // of no library: nothing here runs it

std::vector<GemmChoice> choices_for(const std::vector<RecordedProduct>& products) {
  std::vector<GemmChoice> choices;
  for (const RecordedProduct& product : products) {
    if (suits_cublaslt(product.gemm)) choices.push_back({key_of(product.gemm), kAlgorithm, 3, 4});
  }
  return choices;
}

// A run on a card, with what it tunes and is warned of.
struct Run {
  TemporaryFolder folder;
  Config config = step_config(folder.path().string(), "coat", 0, true, 3, 1);
  NamedDevice device{"Card A"};
  std::vector<RecordedProduct> products = record_products(config, 1);
  int tuned = 0;
  std::vector<std::string> warnings;
  RunGemmsOptions options = {.tuning_folders = {folder / "tuning"},
                             .steps = 1,
                             .tune =
                                 [this](const std::vector<RecordedProduct>& of) {
                                   ++tuned;
                                   return choices_for(of);
                                 },
                             .warn = [this](const std::string& line) { warnings.push_back(line); }};

  Run() {
    config.checkpoint.folder = folder / "run";
    std::filesystem::create_directory(config.checkpoint.folder);
    std::filesystem::create_directory(folder / "tuning");
  }
  RunGemms decide() { return decide_run_gemms(config, device, options); }
  std::string kept() const { return kept_tuning_path(config.checkpoint.folder, device); }
  bool keeps() const { return std::filesystem::exists(kept()); }
  // A file in the folder of those that come with Parka.
  std::string ship(const std::string& name, const std::vector<GemmChoice>& choices, const Device& card) {
    write_gemm_tuning(folder / ("tuning/" + name), choices, card);
    return folder / ("tuning/" + name);
  }
  void begin_long() { options.steps = int64_t{1} << 50; }
};

// Why the run's config is refused; empty: it is not.
std::string refusal(Run& run) {
  try {
    run.decide();
  } catch (const Error& error) {
    CHECK(error.code() == ExitCode::kBadInput);
    return error.what();
  }
  return "";
}

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

}  // namespace

TEST_CASE("the products of a step are those that it queues", "[engine][tuning]") {
  const TemporaryFolder folder;
  for (const char* recipe : {"bf16", "coat", "parka"}) {
    for (const int64_t micro_batches : {1, 2, 5}) {
      CAPTURE(recipe, micro_batches);
      const Config config = step_config(folder.path().string(), recipe, 0, true, micro_batches, 1);
      std::map<std::string, int64_t> queued, recorded;
      for (const RecordedStep::Part& part : record_step(config, 1).parts) {
        for (const RecordedStep::Work& work : part.work) {
          const auto* op = std::get_if<RecordedOp>(&work);
          if (op != nullptr && op->op == "gemm") queued[op->cost.shape] += part.times;
        }
      }
      double before = std::numeric_limits<double>::infinity();
      std::set<std::string> keys;
      for (const RecordedProduct& product : record_products(config, 1)) {
        recorded[cost_of(product.gemm).shape] += product.count;
        CHECK(keys.insert(key_of(product.gemm)).second);
        const double flop = static_cast<double>(product.count) * cost_of(product.gemm).flop;
        CHECK(flop <= before);
        before = flop;
      }
      CHECK(queued.size() > 10);
      CHECK(recorded == queued);
    }
  }
}

TEST_CASE("scratch has room for every tensor of a product, aligned as in the run", "[engine][tuning]") {
  Run run;
  std::vector<Gemm> gemms;
  for (const RecordedProduct& product : run.products) gemms.push_back(product.gemm);
  gemms.front().out.data = static_cast<std::byte*>(gemms.front().out.data) + 16;
  const ProductScratch scratch(run.device, gemms);
  for (const Gemm& a : gemms) {
    const Gemm placed = scratch.place(a);
    CHECK(key_of(placed) == key_of(a));
    std::vector<std::pair<const std::byte*, int64_t>> places;
    for (const TensorView* t : {&placed.a.data, &placed.a.scale, &placed.b.data, &placed.b.scale, &placed.out}) {
      if (!t->empty()) places.emplace_back(static_cast<const std::byte*>(t->data), t->bytes());
    }
    std::sort(places.begin(), places.end());
    for (size_t i = 1; i < places.size(); ++i) CHECK(places[i - 1].first + places[i - 1].second <= places[i].first);
    gemm(run.device, placed);  // AddressSanitizer looks
  }
  CHECK(seconds_of_products(run.device, run.products) > 0);
}

TEST_CASE("a file of configs/tuning has every product of the config that it is for", "[engine][tuning]") {
  const std::string configs = std::string(PARKA_SOURCE_DIR) + "/configs/";
  const std::vector<std::string> bf16 = {"precision.recipe=bf16", "precision.weight_copies=auto",
                                         "training.logits_chunk_tokens=4096"};
  for (const auto& [model, recipe, overrides] : {std::tuple{"llama2-7b", "parka", std::vector<std::string>()},
                                                 {"llama2-7b", "parka.h100", std::vector<std::string>()},
                                                 {"llama2-7b", "bf16", bf16},
                                                 {"olmo-1b", "parka", std::vector<std::string>()},
                                                 {"olmo-1b", "bf16", bf16},
                                                 {"llama3-8b", "parka", std::vector<std::string>()},
                                                 {"llama3-8b", "parka.h100", std::vector<std::string>()}}) {
    CAPTURE(model, recipe);
    const Config config = load_config(fmt::format("{}{}-bench.json", configs, model), overrides);
    std::set<std::string> there;
    for (const GemmChoice& choice :
         load_gemm_tuning(fmt::format("{}tuning/{}.{}.tuning.json", configs, model, recipe)).choices) {
      there.insert(choice.gemm);
    }
    const std::vector<RecordedProduct> products = record_products(config, 1);
    for (const RecordedProduct& product : products) {
      CAPTURE(key_of(product.gemm));
      CHECK(there.contains(key_of(product.gemm)));
    }
    CHECK(products.size() == there.size());
  }
}

TEST_CASE("a new run takes a file for its card that has all of its products, and keeps it", "[engine][tuning]") {
  Run run;
  const std::vector<GemmChoice> all = choices_for(run.products);
  run.ship("a_of_another_card.json", all, NamedDevice("Card B"));
  run.ship("b_with_too_little.json", {all.begin() + 1, all.end()}, run.device);
  write_file(run.folder / "tuning/c_damaged.json", "{");
  write_file(run.folder / "tuning/no_json.txt", "{");
  const std::string fits = run.ship("d_fits.json", all, run.device);
  const RunGemms gemms = run.decide();
  CHECK(gemms.tuning == read_file(fits));
  CHECK(read_file(run.kept()) == gemms.tuning);
  CHECK(gemms.source == run.kept());
  CHECK(gemms.line == fmt::format("GEMM algorithms: those of {}; kept in {}", fits, run.kept()));
  CHECK_FALSE(gemms.ran_products);
  REQUIRE(run.warnings.size() == 1);
  CHECK(has(run.warnings.front(), "c_damaged.json"));
  CHECK(has(run.kept(), "run/gemm_tuning.card-a."));
}

TEST_CASE("a long run without a file tunes once and goes on with what it found", "[engine][tuning]") {
  Run run;
  run.begin_long();
  const RunGemms first = run.decide();
  CHECK(run.tuned == 1);
  CHECK(first.ran_products);
  CHECK(has(first.line, "products take 25.0 % less time"));  // 3 us of 4
  CHECK(read_file(run.kept()) == first.tuning);
  const std::vector<GemmChoice> kept = parse_gemm_tuning(first.tuning, "it").choices;
  CHECK(kept.size() == choices_for(run.products).size());
  run.ship("later.json", choices_for(run.products), run.device);
  for (const bool has_checkpoint : {false, true}) {
    run.options.has_checkpoint = has_checkpoint;
    const RunGemms again = run.decide();
    CHECK(again.tuning == first.tuning);
    CHECK(again.line == fmt::format("GEMM algorithms: those of {}", run.kept()));
    CHECK_FALSE(again.ran_products);
  }
  CHECK(run.tuned == 1);
}

TEST_CASE("a short run does not tune, and does not when it is continued", "[engine][tuning]") {
  Run run;
  const RunGemms first = run.decide();
  CHECK(first.tuning.empty());
  CHECK(has(first.line, "cuBLASLt's first choices; the products of 1 steps take"));
  CHECK_FALSE(run.keeps());
  run.begin_long();
  run.options.has_checkpoint = true;
  run.ship("fits.json", choices_for(run.products), run.device);
  const RunGemms resumed = run.decide();
  CHECK(resumed.tuning.empty());
  CHECK(resumed.line == "GEMM algorithms: cuBLASLt's first choices, as when this run began");
  CHECK(run.tuned == 0);
  // Where it has used others, and its records alone have come back from a copy.
  std::ofstream(run.config.checkpoint.folder + "/metrics.jsonl")
      << R"({"kind": "start", "gemm_tuning": ""})"
      << "\n"
      << R"({"kind": "start", "gemm_tuning": "there/gemm_tuning.json"})"
      << "\n";
  const RunGemms anew = run.decide();
  CHECK(has(anew.line, "fits.json"));
  CHECK(has(anew.line,
            "; there/gemm_tuning.json, which this run used, is gone, so the bits are others from here on"));
}

TEST_CASE("a resumed run keeps its algorithms where its products have changed; a new one chooses anew",
          "[engine][tuning]") {
  Run run;
  const std::vector<GemmChoice> all = choices_for(run.products);
  write_gemm_tuning(run.kept(), {all.begin() + 2, all.end()}, run.device);
  run.options.has_checkpoint = true;
  const RunGemms resumed = run.decide();
  CHECK(resumed.tuning == read_file(run.kept()));
  CHECK(has(resumed.line, fmt::format("; cuBLASLt's first choices for 2 of {} products", run.products.size())));
  run.options.has_checkpoint = false;
  const std::string fits = run.ship("fits.json", all, run.device);
  CHECK(run.decide().tuning == read_file(fits));
  CHECK(read_file(run.kept()) == read_file(fits));
}

TEST_CASE("a run that goes on on another card chooses for that one, and says so", "[engine][tuning]") {
  Run run;
  run.begin_long();
  const std::string on_a = run.decide().tuning;
  Run elsewhere;
  RunGemmsOptions options = elsewhere.options;
  options.has_checkpoint = true;
  options.steps = int64_t{1} << 50;
  NamedDevice b("Card B");
  const RunGemms on_b = decide_run_gemms(run.config, b, options);
  CHECK(elsewhere.tuned == 1);
  CHECK(has(on_b.line, run.kept() + " is for another GPU or cuBLASLt, so the bits are others from here on"));
  CHECK(read_file(kept_tuning_path(run.config.checkpoint.folder, b)) == on_b.tuning);
  run.options.has_checkpoint = true;
  CHECK(run.decide().tuning == on_a);
  CHECK(run.tuned == 1);
}

TEST_CASE("a file that the config names is used and kept", "[engine][tuning]") {
  Run run;
  const std::vector<GemmChoice> all = choices_for(run.products);
  run.config.device.gemm_tuning = run.folder / "given.json";
  write_gemm_tuning(run.config.device.gemm_tuning, {all.front()}, run.device);
  const RunGemms gemms = run.decide();
  CHECK(gemms.tuning == read_file(run.folder / "given.json"));
  CHECK(read_file(run.kept()) == gemms.tuning);
  run.options.has_checkpoint = true;
  CHECK_FALSE(has(run.decide().line, "in place of others"));
  write_gemm_tuning(run.config.device.gemm_tuning, {all.back()}, run.device);
  CHECK(has(run.decide().line, "in place of others, so the bits are others from here on"));
  run.config.device.gemm_tuning = "auto";
  CHECK(run.decide().tuning == read_file(run.folder / "given.json"));
  run.config.device.gemm_tuning = run.folder / "given.json";
  write_gemm_tuning(run.config.device.gemm_tuning, {all.back()}, NamedDevice("Card B"));
  CHECK(has(refusal(run), "made for Card B"));
}

TEST_CASE("a run whose named file is gone goes on with its own copy", "[engine][tuning]") {
  Run run;
  const std::string path = run.config.device.gemm_tuning = run.folder / "given.json";
  CHECK(has(refusal(run), "device.gemm_tuning: " + path + ": no such file"));
  write_gemm_tuning(path, choices_for(run.products), run.device);
  const RunGemms first = run.decide();
  std::filesystem::remove(path);
  CHECK(has(refusal(run), "no such file"));  // without a checkpoint the copy is of a run that has not begun
  run.options.has_checkpoint = true;
  const RunGemms gemms = run.decide();
  CHECK(gemms.tuning == first.tuning);
  CHECK(has(gemms.line, run.kept() + "; " + path + " is gone"));
  std::filesystem::remove(run.kept());
  CHECK(has(refusal(run), "no such file"));
}

TEST_CASE("without tuning nothing is kept, and a damaged file that is kept is refused", "[engine][tuning]") {
  Run run;
  run.begin_long();
  for (const char* value : {"off", ""}) {
    run.config.device.gemm_tuning = value;
    const RunGemms gemms = run.decide();
    CHECK((gemms.tuning.empty() && gemms.line.empty()));
  }
  CHECK(run.tuned == 0);
  CHECK_FALSE(run.keeps());
  run.config.device.gemm_tuning = "auto";
  write_file(run.kept(), "{}");
  CHECK(has(refusal(run), run.kept()));
  CHECK(has(refusal(run), "restore it, or remove it"));
}

TEST_CASE("auto stands for any algorithms where speeds are compared, and nothing else does", "[engine][tuning]") {
  const Run run;
  Config one = run.config, other = run.config;
  const auto differ = [&](const char* measured, const char* wanted) {
    one.device.gemm_tuning = measured;
    other.device.gemm_tuning = wanted;
    return !speed_differences(one, other, SpeedOf::kOneGpu).empty();
  };
  CHECK_FALSE(differ("auto", "x.json"));
  CHECK_FALSE(differ("off", "auto"));
  CHECK_FALSE(differ("off", ""));
  CHECK(differ("off", "x.json"));
  CHECK(differ("y.json", "x.json"));
}

TEST_CASE("a GPU asks for an algorithm for the products that are recorded", "[engine][tuning][gpu]") {
  if (num_cuda_devices() == 0) return;
  const TemporaryFolder folder;
  for (const char* recipe : {"bf16", "fp8_linear", "coat", "parka"}) {
    for (const bool is_llama : {false, true}) {
      CAPTURE(recipe, is_llama);
      const Config config = step_config(folder.path().string(), recipe, 0, is_llama, 2, 1);
      const auto gpu = make_cuda_device();
      std::set<std::string> run_keys, keys;
      {
        TrainingRun run(config, *gpu, alone());
        run.initialize();
        run.step();
        run.finish();
        const GemmTuneOptions quickest = {
            .max_candidates = 1, .warm_seconds = 0, .settle_seconds = 0, .measured_seconds = 0, .rounds = 1};
        for (const GemmChoice& choice : tune_gemms(*gpu, quickest)) run_keys.insert(choice.gemm);
      }
      for (const RecordedProduct& product : record_products(config, 1)) {
        if (suits_cublaslt(product.gemm)) keys.insert(key_of(product.gemm));
      }
      CHECK(run_keys == keys);
    }
  }
}
