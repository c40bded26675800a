// Models that transformers wrote (tests/fixtures/make_huggingface_fixtures.py): imported, computed with, trained
// from and exported again.
#include <cmath>
#include <cstring>
#include <map>

#include "core/philox.h"
#include "engine/checkpoint/checkpoint_weights.h"
#include "engine/checkpoint/saved_state.h"
#include "engine/commands/commands.h"
#include "engine/config/config_io.h"
#include "engine/evaluation/inference_run.h"
#include "engine/huggingface/huggingface_config.h"
#include "engine/huggingface/huggingface_weights.h"
#include "engine/training/training_run.h"
#include "kernels/ops/elementwise/cross_entropy.h"
#include "tests/engine/huggingface_fixture.h"
#include "tests/support/alone.h"
#include "tests/support/catch.h"
#include "tests/support/temporary_folder.h"

using namespace parka;
using namespace parka::test;

namespace {

namespace fs = std::filesystem;

const char* const kNames[] = {"llama_mha",      "llama3_gqa",    "llama_tied",    "olmo_untied",    "olmo_tied",
                              "mistral_window", "mistral_full",  "llama_yarn",    "llama_linear",   "qwen3_tied",
                              "olmo2_gqa",      "qwen2_tied",    "olmo3_windows", "gemma3_windows", "gemma3_untied",
                              "olmoe_mha",      "qwen3_moe_gqa", "mixtral_gqa",   "dots1_groups"};

struct Expected {
  BatchShape shape;
  int64_t vocab_size = 0;
  std::vector<int32_t> tokens;
  std::vector<float> logits;
};

Expected load_expected(const std::string& name) {
  const InputFile file(kFixtures + name + ".safetensors");
  Expected expected;
  for (const SafetensorsEntry& entry : read_safetensors_header(file).tensors) {
    if (entry.name == "tokens") {
      expected.shape = {entry.shape[0], entry.shape[1]};
      expected.tokens.resize(static_cast<size_t>(entry.num_bytes / 4));
      file.read(entry.offset, std::as_writable_bytes(std::span(expected.tokens)));
    } else {
      expected.vocab_size = entry.shape[2];
      expected.logits.resize(static_cast<size_t>(entry.num_bytes / 4));
      file.read(entry.offset, std::as_writable_bytes(std::span(expected.logits)));
    }
  }
  return expected;
}

std::vector<float> logits_of(const std::string& imported, const Expected& expected,
                             std::vector<std::string> overrides) {
  const LoadedCheckpoint checkpoint = open_checkpoint(imported);
  overrides.push_back("training.micro_batch_size=2");
  const Config config = inference_config_of(checkpoint, overrides);
  const auto device = make_cpu_device();
  InferenceRun run(*device, checkpoint, config);
  const std::vector<int32_t> targets(expected.tokens.size(), kIgnoreTarget);
  return run.model().logits(*device, {expected.tokens.data(), targets.data(), expected.shape}, 0,
                            expected.shape.num_tokens());
}

std::string import_fixture(const std::string& name, const TemporaryFolder& folder) {
  const std::string imported = folder / ("imported_" + name);
  REQUIRE(run_import({.folder = kFixtures + name, .output = imported}) == 0);
  return imported;
}

// Of the files of a fixture, as --shard-size.
std::string file_size_of(const std::string& name) {
  return fs::exists(kFixtures + name + "/model.safetensors.index.json") ? "9KB" : "";
}

// Trains `steps` from the imported model and saves; the run's folder.
std::string train_from(const std::string& imported, const TemporaryFolder& folder, const nlohmann::json& precision,
                       const nlohmann::json& optimizer, int64_t steps, std::vector<double>* losses = nullptr) {
  const LoadedCheckpoint checkpoint = open_checkpoint(imported);
  const std::string tokens = folder / "train.npy", run_folder = folder / "run";
  std::vector<uint16_t> ids(40 * 16);
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<uint16_t>(philox4x32(1, 2, i)[0] % 60);
  write_file(tokens, {reinterpret_cast<const char*>(ids.data()), ids.size() * sizeof(uint16_t)});
  nlohmann::json config = checkpoint.state().at("config");
  config["precision"] = precision;
  config["optimizer"] = optimizer;
  config["data"] = {{"train", {tokens}}, {"sequence_length", 16}};
  config["training"] = {{"steps", 100}, {"global_batch_size", 4}, {"micro_batch_size", 2}};
  config["checkpoint"] = {{"folder", run_folder}, {"init_from", imported}};
  const Config parsed = parse_config(config, "test");
  const auto device = make_cpu_device();
  TrainingRun run(parsed, *device, alone());
  CHECK(run.initialize_from(checkpoint).empty());
  for (int64_t i = 0; i < steps; ++i) {
    const double loss = run.step()->loss;
    if (losses != nullptr) losses->push_back(loss);
  }
  fs::remove_all(run_folder);
  save_checkpoint(run_folder, run.snapshot(), {});
  return run_folder;
}

}  // namespace

TEST_CASE("the tiny models to copy can be exported", "[engine][huggingface]") {
  for (const char* name : {"quickstart", "tiny-moe", "tiny-olmo", "tiny-llama"}) {
    CAPTURE(name);
    CHECK(has_family(load_config(std::string(PARKA_SOURCE_DIR "/configs/") + name + ".json", {}).model));
  }
  CHECK_FALSE(has_family({.norm = NormKind::kLayerNorm, .qk_norm = QkNormKind::kFull}));
}

TEST_CASE("an imported model has transformers' logits", "[engine][huggingface]") {
  const std::string name = GENERATE(from_range(std::begin(kNames), std::end(kNames)));
  CAPTURE(name);
  const TemporaryFolder folder;
  const std::string imported = import_fixture(name, folder);
  const Expected expected = load_expected(name);
  CHECK(largest_difference(logits_of(imported, expected, {"precision.recipe=fp32"}), expected.logits) < 1e-4);

  // In bf16 a logit is a sum of tens of products, each rounded by up to 2^-8 several times on its way.
  const std::vector<float> bf16 = logits_of(imported, expected, {"precision.recipe=bf16"});
  double error = 0, norm = 0;
  for (size_t i = 0; i < bf16.size(); ++i) {
    error += std::pow(double{bf16[i]} - expected.logits[i], 2);
    norm += std::pow(expected.logits[i], 2);
  }
  // Where it has experts, some tokens go to others than in fp32.
  const bool has_experts = config_of(open_checkpoint(imported)).model.moe.exists();
  CHECK(std::sqrt(error / norm) < (has_experts ? 0.2 : 0.03));
  CHECK(error > 0);
}

TEST_CASE("an imported model's angles are scaled as its config says", "[engine][huggingface]") {
  const TemporaryFolder folder;
  const std::string imported = import_fixture("llama3_gqa", folder);
  const Expected expected = load_expected("llama3_gqa");
  for (const char* change : {"model.rope_scaling.kind=none", "model.rope_scaling.factor=5",
                             "model.rope_scaling.original_length=16", "model.rope_theta=20000"}) {
    CAPTURE(change);
    const auto logits = logits_of(imported, expected, {"precision.recipe=fp32", change});
    CHECK(largest_difference(logits, expected.logits) > 1e-3);
  }
}

TEST_CASE("an imported model is exported as it was, byte for byte", "[engine][huggingface]") {
  const std::string name = GENERATE(from_range(std::begin(kNames), std::end(kNames)));
  CAPTURE(name);
  const TemporaryFolder folder;
  const std::string imported = import_fixture(name, folder);
  REQUIRE(run_export({.checkpoint = imported, .output = folder / "exported", .shard_size = file_size_of(name)}) ==
          0);
  CHECK(differing(kFixtures + name, folder / "exported") == std::vector<std::string>{});
}

TEST_CASE("a run starts from exactly the imported weights in every form of them", "[engine][huggingface]") {
  const struct {
    const char *name, *recipe, *master;
    bool exact;
  } cases[] = {{"llama_mha", "fp32", "none", true},
               {"llama_mha", "bf16", "fp32", true},
               {"olmo_untied", "bf16", "fp32", true},
               {"olmo_untied", "bf16", "fp24_split", false},
               {"olmo_untied", "bf16", "bf16_sr", false},
               {"llama3_gqa", "fp32", "none", true},
               {"llama3_gqa", "bf16", "fp32", true},
               {"olmo_tied", "bf16", "bf16_sr", true},
               {"olmo_tied", "bf16", "fp24_split", true},
               {"llama_tied", "bf16", "fp32", true},
               {"olmo_untied", "coat_optimizer", "fp32", true}};
  for (const auto& c : cases) {
    CAPTURE(c.name, c.recipe, c.master);
    const TemporaryFolder folder;
    const std::string imported = import_fixture(c.name, folder);
    const std::string run =
        train_from(imported, folder, {{"recipe", c.recipe}}, {{"master", c.master}}, /*steps=*/0);
    REQUIRE(run_export({.checkpoint = run, .output = folder / "exported", .shard_size = file_size_of(c.name)}) ==
            0);
    const std::vector<std::string> names = differing(kFixtures + c.name, folder / "exported");
    CHECK(names == (c.exact ? std::vector<std::string>{} : std::vector<std::string>{"model.safetensors"}));
  }
}

TEST_CASE("masters of 24 and of 32 bits start from each other's checkpoints", "[engine][huggingface]") {
  const TemporaryFolder folder;
  std::string checkpoint = import_fixture("olmo_untied", folder);
  const auto go_on = [&](const char* master, int64_t steps, const char* exported) {
    checkpoint = train_from(checkpoint, folder, {{"recipe", "coat_optimizer"}}, {{"master", master}}, steps);
    REQUIRE(run_export({.checkpoint = checkpoint, .output = folder / exported}) == 0);
  };
  go_on("fp32", 2, "exact");
  go_on("fp24_split", 0, "rounded");
  go_on("fp24_split", 2, "trained");
  go_on("fp32", 0, "same");
  // The first run alone was given the files that came with the weights.
  CHECK(differing(folder / "exact", folder / "rounded") ==
        std::vector<std::string>{"config.json", "generation_config.json", "model.safetensors"});
  CHECK(differing(folder / "rounded", folder / "trained") == std::vector<std::string>{"model.safetensors"});
  CHECK(differing(folder / "trained", folder / "same") == std::vector<std::string>{});
}

TEST_CASE("training from an imported model begins at its loss and lowers it", "[engine][huggingface]") {
  const TemporaryFolder folder;
  const std::string imported = import_fixture("llama3_gqa", folder);
  std::vector<double> fp32, lean;
  const nlohmann::json optimizer = {{"lr", 3e-3}, {"schedule", {{"kind", "constant"}}}};
  train_from(imported, folder, {{"recipe", "fp32"}}, optimizer, 30, &fp32);
  const std::string run = train_from(imported, folder, {{"recipe", "bf16"}}, optimizer, 30, &lean);
  CHECK(std::abs(lean[0] - fp32[0]) < 0.02 * fp32[0]);
  CHECK(fp32.back() < 0.9 * fp32.front());
  CHECK(lean.back() < 0.9 * lean.front());

  // The trained model has other weights in the same files, and the tokenizer's files of the model it began with.
  REQUIRE(run_export({.checkpoint = run, .output = folder / "exported", .shard_size = "9KB"}) == 0);
  const auto names = differing(kFixtures + "llama3_gqa", folder / "exported");
  CHECK(names.size() == 6);
  for (const std::string& name : names) CHECK(name.ends_with("-of-00006.safetensors"));
}

TEST_CASE("a checkpoint of a version that ignored keys of another fine-tuning method is read",
          "[engine][huggingface]") {
  const TemporaryFolder folder;
  const LoadedCheckpoint imported = open_checkpoint(import_fixture("llama_mha", folder));
  const Config saved = config_of(imported);
  nlohmann::json state = imported.state();
  state["config"]["finetune"] = {{"method", "full"}, {"rank", 3}, {"mix", "paper"}, {"base", "compute"}};
  CHECK_THROWS_AS(parse_config(state["config"], "test"), Error);
  save_checkpoint(folder / "older", {.step = 1, .state = state, .tensors = {}}, {});
  const LoadedCheckpoint older = open_checkpoint(folder / "older");
  CHECK(config_of(older).finetune == saved.finetune);
  CHECK(inference_config_of(older, {"training.micro_batch_size=1"}).finetune == saved.finetune);
  state["config"]["finetune"] = {{"method", "qst"}, {"rank", 3}, {"downsample", "avg_pool"}};
  save_checkpoint(folder / "pooled", {.step = 1, .state = state, .tensors = {}}, {});
  const FinetuneConfig pooled = config_of(open_checkpoint(folder / "pooled")).finetune;
  CHECK((pooled.downsample == Downsampling::kAveragePool && pooled.rank == FinetuneConfig().rank));
}

TEST_CASE("a run does not start from the weights of another model", "[engine][huggingface]") {
  const TemporaryFolder folder;
  const std::string imported = import_fixture("llama_mha", folder);
  const LoadedCheckpoint checkpoint = open_checkpoint(imported);
  const Config saved = config_of(checkpoint);
  ModelConfig other = saved.model;
  other.rope_theta = 5e5;
  other.init = InitKind::kMitchell;
  CHECK(model_differences(saved.model, other).refused.empty());
  CHECK(model_differences(saved.model, other).allowed ==
        std::vector<std::string>{"model.rope_theta: 10000.0 in the checkpoint, 500000.0 now"});
  other.norm_eps = 1e-6;
  other.num_heads = 2;
  CHECK(model_differences(saved.model, other).refused.size() == 2);
  ModelConfig windowed = saved.model, local = windowed;
  windowed.sliding_window = local.sliding_window = 8;
  windowed.full_attention_every = local.full_attention_every = 2;
  local.local_rope_theta = windowed.rope_theta;  // what 0 stands for
  CHECK(model_differences(windowed, local).allowed.empty());
  local.local_rope_theta = 500;
  CHECK(model_differences(windowed, local).allowed.size() == 1);
  CHECK(model_differences(windowed, local).refused.empty());
  CHECK(model_differences(saved.model, local).refused.size() == 2);
  // A parameter that neither config shows, because the checkpoint is damaged, shows in the tensors.
  CHECK_THROWS_AS(CheckpointWeights(checkpoint, make_parameter_table({}, false).all), Error);
}

TEST_CASE("exports in another format hold the rounded weights", "[engine][huggingface]") {
  const TemporaryFolder folder;
  const std::string imported = import_fixture("llama_mha", folder);
  for (const char* format : {"bf16", "fp16"}) {
    const std::string out = folder / format;
    REQUIRE(run_export({.checkpoint = imported, .output = out, .dtype = format}) == 0);
    const nlohmann::json config = nlohmann::json::parse(read_file(out + "/config.json"));
    CHECK(config.at("dtype") == (std::string(format) == "bf16" ? "bfloat16" : "float16"));
    const HuggingFaceWeights wide = open_huggingface_weights(kFixtures + "llama_mha"),
                             narrow = open_huggingface_weights(out);
    REQUIRE(wide.tensors.size() == narrow.tensors.size());
    int wrong = 0;
    for (const auto& [name, place] : wide.tensors) {
      const SafetensorsEntry& entry = narrow.tensors.at(name).entry;
      REQUIRE(entry.shape == place.entry.shape);
      std::vector<float> values(static_cast<size_t>(place.entry.num_bytes / 4));
      std::vector<uint16_t> codes(static_cast<size_t>(entry.num_bytes / 2));
      wide.files[place.file].read(place.entry.offset, std::as_writable_bytes(std::span(values)));
      narrow.files[0].read(entry.offset, std::as_writable_bytes(std::span(codes)));
      for (size_t i = 0; i < values.size(); ++i) {
        const uint16_t want =
            std::string(format) == "bf16" ? encode_bf16(values[i]).bits : encode_fp16(values[i]).bits;
        wrong += codes[i] != want;
      }
    }
    CHECK(wrong == 0);
  }
}

namespace {

// As published with Qwen3 0.6B, but for its size.
const char* const kQwen3Config = R"({
  "architectures": ["Qwen3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 1,
  "eos_token_id": 2, "head_dim": 12, "hidden_act": "silu", "hidden_size": 32, "initializer_range": 0.02,
  "intermediate_size": 40, "max_position_embeddings": 40960, "max_window_layers": 28, "model_type": "qwen3",
  "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
  "rope_scaling": null, "rope_theta": 1000000, "sliding_window": null, "tie_word_embeddings": true,
  "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": true, "use_sliding_window": false,
  "vocab_size": 67})";

// A run of that model with weights of its own, not trained; the run's folder.
std::string save_model(const ModelConfig& model, const TemporaryFolder& folder) {
  const std::string tokens = folder / "tokens.npy", run_folder = folder / "run";
  std::vector<uint16_t> ids(40 * 16, 3);
  write_file(tokens, {reinterpret_cast<const char*>(ids.data()), ids.size() * sizeof(uint16_t)});
  Config config;
  config.model = model;
  nlohmann::json written = {{"model", to_json(config).at("model")}};
  written["precision"] = {{"recipe", "fp32"}};
  written["data"] = {{"train", {tokens}}, {"sequence_length", 16}};
  written["training"] = {{"steps", 5}, {"global_batch_size", 4}, {"micro_batch_size", 2}};
  written["checkpoint"] = {{"folder", run_folder}};
  const auto device = make_cpu_device();
  TrainingRun run(parse_config(written, "test"), *device, alone());
  run.initialize();
  for (int i = 0; i < 3; ++i) run.step();  // so that no norm is all ones
  save_checkpoint(run_folder, run.snapshot(), {});
  return run_folder;
}

}  // namespace

TEST_CASE("a Qwen3 config.json is a model with a norm of each head", "[engine][huggingface]") {
  const nlohmann::json published = nlohmann::json::parse(kQwen3Config);
  const HuggingFaceModel read = parse_huggingface_config(published, "test");
  const ModelConfig want = {.vocab_size = 67,
                            .d_model = 32,
                            .num_layers = 2,
                            .num_heads = 4,
                            .num_kv_heads = 2,
                            .given_head_dim = 12,
                            .d_ffn = 40,
                            .norm = NormKind::kRmsNorm,
                            .norm_eps = 1e-6,
                            .qk_norm = QkNormKind::kPerHead,
                            .rope_theta = 1e6,
                            .tie_embeddings = true,
                            .init = InitKind::kNormal};
  CHECK(read.model == want);
  CHECK(read.family->model_type == "qwen3");
  CHECK(&choose_family(want, "", nullptr, "here") == read.family);
  // Keys for which transformers has defaults that are those of one size.
  for (const char* key : {"head_dim", "num_key_value_heads"}) {
    nlohmann::json lacking = published;
    lacking.erase(key);
    CHECK(message_of([&] { parse_huggingface_config(lacking, "test"); }) == std::string("test: has no ") + key);
  }
  const nlohmann::json of_types = {{"full_attention", {{"rope_theta", 5e6}}}};
  for (const auto& [key, value] : {std::pair<const char*, nlohmann::json>{"use_sliding_window", true},
                                   {"is_causal", false},
                                   {"rope_parameters", of_types},
                                   {"attention_bias", true}}) {
    nlohmann::json other = published;
    other[key] = value;
    CHECK(message_of([&] { parse_huggingface_config(other, "test"); }).find(key) != std::string::npos);
  }
  nlohmann::json unused_window = published;
  unused_window["sliding_window"] = 4096;  // use_sliding_window is false
  CHECK(parse_huggingface_config(unused_window, "test").model == want);

  // A norm of all heads together is no Qwen3.
  ModelConfig full = want;
  full.qk_norm = QkNormKind::kFull;
  CHECK(message_of([&] {
          choose_family(full, "qwen3", nullptr, "here");
        }).find("model.qk_norm = \"per_head\", not \"full\"") != std::string::npos);
}

TEST_CASE("a Qwen2.5 config.json is a model with biases of queries, keys and values", "[engine][huggingface]") {
  // As published with Qwen2.5 7B, but for its size.
  const nlohmann::json published = nlohmann::json::parse(R"({
    "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
    "hidden_act": "silu", "hidden_size": 32, "initializer_range": 0.02, "intermediate_size": 40,
    "max_position_embeddings": 131072, "max_window_layers": 28, "model_type": "qwen2", "num_attention_heads": 4,
    "num_hidden_layers": 2, "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
    "sliding_window": 131072, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
    "transformers_version": "4.40.1", "use_cache": true, "use_mrope": false, "use_sliding_window": false,
    "vocab_size": 67})");
  const HuggingFaceModel read = parse_huggingface_config(published, "test");
  const ModelConfig want = {.vocab_size = 67,
                            .d_model = 32,
                            .num_layers = 2,
                            .num_heads = 4,
                            .num_kv_heads = 2,
                            .d_ffn = 40,
                            .norm = NormKind::kRmsNorm,
                            .norm_eps = 1e-6,
                            .qkv_bias = true,
                            .rope_theta = 1e6,
                            .tie_embeddings = false,
                            .init = InitKind::kNormal};
  CHECK(read.model == want);
  CHECK(&choose_family(want, "", nullptr, "here") == read.family);
  nlohmann::json windowed = published;
  windowed["use_sliding_window"] = true;
  CHECK(message_of([&] { parse_huggingface_config(windowed, "test"); }) ==
        "test: use_sliding_window = true is not supported; false is");
  nlohmann::json lacking = published;
  lacking.erase("num_key_value_heads");
  CHECK(message_of([&] { parse_huggingface_config(lacking, "test"); }) == "test: has no num_key_value_heads");
  // Their transformers class has no key for biases: what others take for one is none of its config.
  const nlohmann::json written =
      nlohmann::json::parse(make_huggingface_config({read.family, want, 2048}, DType::kBF16, nullptr));
  CHECK((!written.contains("attention_bias") && !written.contains("sliding_window")));
  CHECK(written.at("use_sliding_window") == false);
}

TEST_CASE("an OLMo 2 config.json is a model with norms behind its branches", "[engine][huggingface]") {
  // As published with OLMo 2 7B, but for its size.
  const nlohmann::json published = nlohmann::json::parse(R"({
    "architectures": ["Olmo2ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "eos_token_id": 100257,
    "hidden_act": "silu", "hidden_size": 32, "initializer_range": 0.02, "intermediate_size": 40,
    "max_position_embeddings": 4096, "model_type": "olmo2", "num_attention_heads": 4, "num_hidden_layers": 2,
    "num_key_value_heads": 4, "pad_token_id": 100277, "rms_norm_eps": 1e-06, "rope_scaling": null,
    "rope_theta": 500000, "tie_word_embeddings": false, "torch_dtype": "float32", "transformers_version": "4.47.0",
    "use_cache": false, "vocab_size": 67})");
  const HuggingFaceModel read = parse_huggingface_config(published, "test");
  const ModelConfig want = {.vocab_size = 67,
                            .d_model = 32,
                            .num_layers = 2,
                            .num_heads = 4,
                            .num_kv_heads = 4,
                            .d_ffn = 40,
                            .norm = NormKind::kRmsNorm,
                            .norm_eps = 1e-6,
                            .norm_placement = NormPlacement::kAfter,
                            .qk_norm = QkNormKind::kFull,
                            .rope_theta = 5e5,
                            .tie_embeddings = false,
                            .init = InitKind::kNormal};
  CHECK(read.model == want);
  CHECK(read.max_positions == 4096);
  CHECK(&choose_family(want, "", nullptr, "here") == read.family);
  nlohmann::json other = published;
  other["attention_bias"] = true;
  CHECK(message_of([&] { parse_huggingface_config(other, "test"); }).find("attention_bias") != std::string::npos);

  // No family has norms in front and behind but Gemma 3, or one behind alone without norms of queries and keys.
  for (const auto& [placement, qk_norm] : {std::pair{NormPlacement::kBoth, QkNormKind::kFull},
                                           {NormPlacement::kAfter, QkNormKind::kNone},
                                           {NormPlacement::kBefore, QkNormKind::kFull}}) {
    ModelConfig none = want;
    none.norm_placement = placement;
    none.qk_norm = qk_norm;
    CHECK(message_of([&] { choose_family(none, "", nullptr, "here"); }).find("can express this model") !=
          std::string::npos);
  }
}

namespace {

// As published with Gemma 3 1B, but for its size.
const char* const kGemma3Config = R"({
  "architectures": ["Gemma3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
  "attn_logit_softcapping": null, "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": 1,
  "final_logit_softcapping": null, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 32,
  "initializer_range": 0.02, "intermediate_size": 40, "max_position_embeddings": 32768, "model_type": "gemma3_text",
  "num_attention_heads": 4, "num_hidden_layers": 8, "num_key_value_heads": 1, "pad_token_id": 0,
  "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000, "rope_scaling": null,
  "rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6, "torch_dtype": "bfloat16",
  "transformers_version": "4.50.0.dev0", "use_cache": true, "vocab_size": 67})";

}  // namespace

TEST_CASE("a Gemma 3 config.json is a model with all that Gemma 3 has", "[engine][huggingface]") {
  const nlohmann::json published = nlohmann::json::parse(kGemma3Config);
  const HuggingFaceModel read = parse_huggingface_config(published, "test");
  const ModelConfig want = {.vocab_size = 67,
                            .d_model = 32,
                            .num_layers = 8,
                            .num_heads = 4,
                            .num_kv_heads = 1,
                            .given_head_dim = 256,
                            .d_ffn = 40,
                            .norm = NormKind::kRmsNorm,
                            .norm_eps = 1e-6,
                            .norm_placement = NormPlacement::kBoth,
                            .qk_norm = QkNormKind::kPerHead,
                            .norm_unit_offset = true,
                            .activation = GateActivation::kGeluTanh,
                            .embedding_scale = EmbeddingScale::kSqrtDModel,
                            .rope_theta = 1e6,
                            .sliding_window = 512,
                            .full_attention_every = 6,
                            .local_rope_theta = 1e4,
                            .tie_embeddings = true,
                            .init = InitKind::kNormal};
  CHECK(read.model == want);
  CHECK(read.max_positions == 32768);
  CHECK(&choose_family(want, "", nullptr, "here") == read.family);
  const auto with = [&](const char* patch) {
    nlohmann::json changed = published;
    changed.merge_patch(nlohmann::json::parse(patch));
    return changed;
  };
  const auto model_with = [&](const char* patch) { return parse_huggingface_config(with(patch), "test").model; };

  // The key of a number of layers, and what transformers takes where keys of angles and widths are absent.
  CHECK(model_with(R"({"sliding_window_pattern": 4})").full_attention_every == 4);
  CHECK(model_with(R"({"sliding_window_pattern": null})").full_attention_every == 6);
  CHECK(model_with(R"({"rope_local_base_freq": 500})").local_rope_theta == 500);
  const ModelConfig bare = model_with(
      R"({"rope_local_base_freq": null, "rope_theta": null, "head_dim": null, "query_pre_attn_scalar": null,
          "sliding_window": null, "num_key_value_heads": 4, "sliding_window_pattern": 1})");
  CHECK((bare.rope_theta == 1e6 && bare.head_dim() == 256 && bare.pre_attn_scalar() == 256));
  CHECK((bare.sliding_window == 0 && bare.local_rope_theta == 0));
  CHECK(model_with(R"({"rope_local_base_freq": null})").local_rope_theta == 1e4);
  CHECK(model_with(R"({"query_pre_attn_scalar": 168})").query_pre_attn_scalar == 168);
  CHECK(!model_with(R"({"tie_word_embeddings": false})").tie_embeddings);
  // All layers have a window: angles are theirs, and what full attention would have is of no layer.
  const ModelConfig local =
      model_with(R"({"num_hidden_layers": 5, "rope_scaling": {"rope_type": "linear", "factor": 8}})");
  CHECK((local.full_attention_every == 0 && local.rope_theta == 1e4 && local.local_rope_theta == 0));
  CHECK(local.rope_scaling.kind == RopeScalingKind::kNone);
  // As transformers 5 writes it.
  const ModelConfig now = model_with(
      R"({"rope_theta": 5, "rope_local_base_freq": 6, "rope_parameters": {
          "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
          "sliding_attention": {"rope_type": "default", "rope_theta": 20000.0}}})");
  CHECK((now.rope_theta == 1e6 && now.local_rope_theta == 2e4));
  CHECK((now.rope_scaling.kind == RopeScalingKind::kLinear && now.rope_scaling.factor == 8));

  for (const ModelConfig& model : {want, bare, local, now}) {
    const std::string text = make_huggingface_config({read.family, model, 777}, DType::kBF16, nullptr);
    CHECK(parse_huggingface_config(nlohmann::json::parse(text), "again").model == model);
  }
  const nlohmann::json written =
      nlohmann::json::parse(make_huggingface_config({read.family, want, 777}, DType::kBF16, nullptr));
  CHECK(written.at("hidden_activation") == "gelu_pytorch_tanh");
  CHECK((!written.contains("hidden_act") && written.at("rope_local_base_freq") == 1e4));
  CHECK((written.at("query_pre_attn_scalar") == 256 && written.at("final_logit_softcapping").is_null()));

  for (const auto& [patch, says] : {
           std::pair{R"({"final_logit_softcapping": 30.0})",
                     "final_logit_softcapping = 30.0 is not supported; null is"},
           {R"({"attn_logit_softcapping": 50.0})", "attn_logit_softcapping = 50.0 is not supported; null is"},
           {R"({"use_bidirectional_attention": true})", "use_bidirectional_attention = true is not supported"},
           {R"({"hidden_activation": "gelu"})", "hidden_activation = \"gelu\" is not supported"},
           {R"({"attention_bias": true})", "attention_bias = true is not supported"},
           {R"({"model_type": "gemma3"})", "model_type \"gemma3\" is not supported"},
           {R"({"architectures": ["Gemma3ForConditionalGeneration"]})", "Gemma3ForConditionalGeneration"},
           {R"({"rope_parameters": {"rope_type": "default", "rope_theta": 5}})",
            "rope_parameters: has neither full_attention nor sliding_attention"},
       }) {
    CAPTURE(patch);
    CHECK(message_of([&] { parse_huggingface_config(with(patch), "test"); }).find(says) != std::string::npos);
  }
}

TEST_CASE("a model with a norm of each head is exported as Qwen3 and imported again", "[engine][huggingface]") {
  const TemporaryFolder folder;
  const ModelConfig model = parse_huggingface_config(nlohmann::json::parse(kQwen3Config), "test").model;
  const std::string run = save_model(model, folder);
  REQUIRE(run_export({.checkpoint = run, .output = folder / "exported"}) == 0);
  const HuggingFaceWeights weights = open_huggingface_weights(folder / "exported");
  const auto shape_of = [&](const std::string& name) { return weights.tensors.at(name).entry.shape; };
  CHECK(weights.tensors.size() == 1 + 2 * 11 + 1);
  CHECK(shape_of("model.layers.1.self_attn.q_norm.weight") == std::vector<int64_t>{12});
  CHECK(shape_of("model.layers.1.self_attn.k_norm.weight") == std::vector<int64_t>{12});
  CHECK(shape_of("model.layers.0.self_attn.q_proj.weight") == std::vector<int64_t>{48, 32});
  const nlohmann::json config = nlohmann::json::parse(read_file(folder / "exported/config.json"));
  CHECK(config.at("architectures") == nlohmann::json{"Qwen3ForCausalLM"});
  CHECK(config.at("head_dim") == 12);
  CHECK(config.at("use_sliding_window") == false);
  CHECK(config.at("tie_word_embeddings") == true);

  REQUIRE(run_import({.folder = folder / "exported", .output = folder / "imported"}) == 0);
  CHECK(config_of(open_checkpoint(folder / "imported")).model.qk_norm == QkNormKind::kPerHead);
  REQUIRE(run_export({.checkpoint = folder / "imported", .output = folder / "again"}) == 0);
  CHECK(differing(folder / "exported", folder / "again") == std::vector<std::string>{});
  Expected batch{.shape = {2, 16}, .tokens = {}, .logits = {}};
  for (int i = 0; i < 32; ++i) batch.tokens.push_back(i * 7 % 67);
  CHECK(logits_of(folder / "imported", batch, {"precision.recipe=fp32"}) ==
        logits_of(run, batch, {"precision.recipe=fp32"}));
}

TEST_CASE("formats of imported tensors are read as earlier versions recorded them", "[engine][huggingface]") {
  const char* header =
      R"({"__metadata__": {"format": "pt"}, "w": {"dtype": "F16", "shape": [1], "data_offsets": [0, 2]}})";
  const TensorFormats formats =
      parse_formats({{"files", {{{"name", "a"}, {"header", header}}}}, {"index", ""}}, "model");
  CHECK(formats == TensorFormats{{"w", DType::kF16}});
  CHECK(parse_formats(encode_formats(formats), "model") == formats);
  CHECK_THROWS_AS(parse_formats({{"files", {3}}}, "model"), Error);
}
