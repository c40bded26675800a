#include <filesystem>
#include <map>
#include <set>
#include <span>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "engine/config/config_io.h"
#include "engine/config/config_table.h"
#include "model/parameter_table.h"
#include "tests/support/catch.h"

using namespace parka;
using nlohmann::json;

namespace {

std::vector<std::string> shipped_configs() {
  std::vector<std::string> paths;
  for (const auto& entry : std::filesystem::directory_iterator(PARKA_SOURCE_DIR "/configs")) {
    const std::string name = entry.path().filename().string();
    if (name.ends_with(".json") && name != "parka.schema.json") paths.push_back(entry.path().string());
  }
  return paths;
}

// Whether some recipe gives the key another value than another.
bool differs_by_recipe(const std::string& path) {
  std::set<std::string> values;
  for (const auto& recipe : EnumNames<Recipe>::kAll) {
    Config config;
    apply_recipe(recipe.value, config);
    values.insert(get_field(*make_config_table(config).find(path)).dump());
  }
  return values.size() > 1 && path != "precision.recipe";
}

std::string shipped(const std::string& name) { return PARKA_SOURCE_DIR "/configs/" + name + ".json"; }

}  // namespace

TEST_CASE("what a file and overrides give can be written and read again", "[engine][config]") {
  for (const std::string& path : shipped_configs()) {
    CAPTURE(path);
    const std::vector<std::string> overrides = {"precision.recipe=coat", "data.train=[\"a.npy\",\"b.npy\"]",
                                                "optimizer.schedule.warmup_steps=7"};
    const std::string written = given_keys(path, overrides).dump(2);
    CHECK(to_json(parse_config(json::parse(written), "written")) == to_json(load_config(path, overrides)));
  }
  const nlohmann::ordered_json given = given_keys(shipped("tiny-llama"), {"training.steps=3"});
  CHECK(given["training"]["steps"] == 3);
  CHECK_FALSE(given.contains("telemetry"));  // as the file
  CHECK_THROWS(given_keys(shipped("tiny-llama"), {"training.stepz=3"}));
}

TEST_CASE("the hash covers what decides the numbers and nothing else", "[engine][config]") {
  Config base;
  base.data.train = {"folder/a.npy", "folder/b.npy"};
  const std::string hash = config_hash(base);
  CHECK(hash.size() == 32);

  Config same = base;
  same.data.train = {"elsewhere/a.npy", "b.npy"};
  same.data.eval = {"other.npy"};
  same.model.num_kv_heads = 16;            // what 0 stands for
  same.model.given_head_dim = 128;         // likewise
  same.model.query_pre_attn_scalar = 128;  // likewise
  same.model.rope_scaling.factor = 2;      // unused with kind = none
  same.model.init_std = 0.5;               // unused with init = mitchell
  same.precision.sampled_amax = true;      // unused with gemm = compute
  same.precision.weight_copies = WeightCopies::kBoth;
  same.precision.recompute = Recompute::kBlock;
  same.precision.offload_blocks = 14;
  same.precision.save_product = false;
  same.precision.recipe = Recipe::kFp8Block;  // the name alone
  same.training.steps = 5;
  same.training.eval_interval = 5;
  same.training.log_interval = 5;
  same.checkpoint = {
      .folder = "x", .interval = 1, .keep = 1, .async = false, .save_final = false, .on_saved = "cp {path} x"};
  same.evaluation = {.sets = {"a=b.npy"}, .tasks = {"t.jsonl"}, .task_documents = 3, .prompts = {"a"}};
  same.distributed.zero_stage = 2;
  CHECK(config_hash(same) == hash);
  Config unclipped = base, released = base;
  unclipped.optimizer.clip_norm = released.optimizer.clip_norm = 0;
  released.optimizer.release_gradients = true;  // where nothing is clipped it is a matter of memory
  CHECK(config_hash(released) == config_hash(unclipped));

  using Change = void (*)(Config&);
  const Change changes[] = {
      [](Config& c) { c.model.d_model = 64; },
      [](Config& c) { c.model.rope_theta = 500000; },
      [](Config& c) { c.model.num_kv_heads = 2; },
      [](Config& c) { c.model.given_head_dim = 64; },
      [](Config& c) { c.model.norm_unit_offset = true; },
      [](Config& c) { c.model.activation = GateActivation::kGeluTanh; },
      [](Config& c) { c.model.embedding_scale = EmbeddingScale::kSqrtDModel; },
      [](Config& c) { c.model.query_pre_attn_scalar = 64; },
      [](Config& c) { c.model.rope_scaling.kind = RopeScalingKind::kLlama3; },
      [](Config& c) { c.model.rope_scaling.kind = RopeScalingKind::kYarn; },
      [](Config& c) { c.model.sliding_window = 8; },
      [](Config& c) { c.model.sliding_window = 8, c.model.full_attention_every = 2; },
      [](Config& c) { c.model.sliding_window = 8, c.model.local_rope_theta = 100; },
      [](Config& c) { c.checkpoint.init_from = "runs/other/"; },
      [](Config& c) { c.precision.gemm = GemmPrecision::kFp8Tensor; },
      [](Config& c) { c.precision.gemm = GemmPrecision::kFp8Tensor, c.precision.sampled_amax = true; },
      [](Config& c) { c.precision.norm_input = Storage::kFp8; },
      [](Config& c) { c.optimizer.lr = 1e-3; },
      [](Config& c) { c.optimizer.clip_norm = 0; },
      [](Config& c) { c.optimizer.release_gradients = true; },
      [](Config& c) { c.optimizer.states = StateFormat::kBf16; },
      [](Config& c) { c.optimizer.schedule.kind = ScheduleKind::kLinear; },
      [](Config& c) { std::swap(c.data.train[0], c.data.train[1]); },
      [](Config& c) { c.data.seed = 1; },
      [](Config& c) { c.data.shuffle = false; },
      [](Config& c) { c.data.sequence_length = 32; },
      [](Config& c) { c.training.seed = 1; },
      [](Config& c) { c.training.global_batch_size = 64; },
      [](Config& c) { c.training.micro_batch_size = 2; },
      [](Config& c) { c.training.z_loss = 1e-4; },
  };
  std::set<std::string> hashes = {hash};
  for (const Change change : changes) {
    Config c = base;
    change(c);
    hashes.insert(config_hash(c));
  }
  CHECK(hashes.size() == 1 + std::size(changes));
}

TEST_CASE("resuming tells what must not and what may differ", "[engine][config]") {
  Config saved;
  saved.data.train = {"folder/a.npy"};
  saved.precision.weight_copies = WeightCopies::kBoth;  // the default before there was `auto`
  CHECK(resume_differences(saved, saved).refused.empty());
  CHECK(resume_differences(saved, saved).allowed.empty());

  Config now = saved;
  now.training.steps = 2000;
  now.optimizer.lr = 1e-3;
  now.training.micro_batch_size = 2;
  now.checkpoint.folder = "elsewhere";
  now.data.train = {"moved/a.npy"};
  now.model.num_kv_heads = 16;  // what 0 stands for
  now.model.init = InitKind::kNormal;
  now.precision.gemm = GemmPrecision::kFp8Tensor;
  now.precision.weight_copies = WeightCopies::kAuto;
  now.precision.offload_blocks = 3;
  const ResumeDifferences allowed = resume_differences(saved, now);
  CHECK(allowed.refused.empty());
  CHECK(allowed.allowed == std::vector<std::string>{
                               "model.num_kv_heads: 0 in the checkpoint, 16 now",
                               "model.init: \"mitchell\" in the checkpoint, \"normal\" now",
                               "precision.gemm: \"compute\" in the checkpoint, \"fp8_tensor\" now",
                               "precision.weight_copies: \"both\" in the checkpoint, \"auto\" now",
                               "precision.offload_blocks: 0 in the checkpoint, 3 now",
                               "optimizer.lr: 0.0004 in the checkpoint, 0.001 now",
                               "data.train: [\"folder/a.npy\"] in the checkpoint, [\"moved/a.npy\"] now",
                               "training.steps: 1000 in the checkpoint, 2000 now",
                               "training.micro_batch_size: 4 in the checkpoint, 2 now",
                               "checkpoint.folder: \"runs/run\" in the checkpoint, \"elsewhere\" now",
                           });

  now = saved;
  now.model.d_model = 64;
  now.precision.compute = DType::kF32;
  now.optimizer.states = StateFormat::kFp8Expanded;
  now.optimizer.master = MasterForm::kNone;
  now.data.train = {"folder/a.npy", "folder/b.npy"};
  now.data.seed = 1;
  now.data.shuffle = false;
  now.data.sequence_length = 32;
  now.training.global_batch_size = 64;
  const ResumeDifferences refused = resume_differences(saved, now);
  CHECK(refused.allowed.empty());
  CHECK(refused.refused.size() == 7);
  CHECK(refused.converted.size() == 2);
  CHECK(refused.refused.front() == "model.d_model: 2048 in the checkpoint, 64 now");
}

TEST_CASE("each key on which a checkpoint depends is refused alone", "[engine][config]") {
  Config saved;
  saved.data.train = {"a.npy", "b.npy"};
  saved.data.weights = {1, 2};
  saved.optimizer.states = StateFormat::kFp8Expanded;
  saved.model.rope_scaling.kind = RopeScalingKind::kYarn;
  saved.finetune.method = FinetuneMethod::kQst;
  saved.finetune.downsample = Downsampling::kAdapter;
  using Change = void (*)(Config&);
  const Change changes[] = {
      [](Config& c) { c.model.d_ffn = 64; },
      [](Config& c) { c.model.rope_scaling.attention_factor = 2; },
      [](Config& c) { c.precision.compute = DType::kF32; },
      [](Config& c) { c.optimizer.frozen = {"embedding"}; },
      [](Config& c) { c.finetune.rank = 3; },
      [](Config& c) { c.finetune.reduction = 4; },
      [](Config& c) {
        c.data.train = {"b.npy", "a.npy"};
      },
      [](Config& c) {
        c.data.weights = {2, 1};
      },
      [](Config& c) { c.data.token_dtype = TokenType::kUint32; },
      [](Config& c) { c.data.sequence_length = 32; },
      [](Config& c) { c.data.seed = 1; },
      [](Config& c) { c.data.shuffle = false; },
      [](Config& c) { c.data.loss_mask = true; },
      [](Config& c) { c.data.documents = DocumentMode::kSeparate; },
      [](Config& c) { c.data.document_start = 5; },
      [](Config& c) { c.data.document_end = 5; },
      [](Config& c) { c.training.global_batch_size = 64; },
  };
  const Change conversions[] = {
      [](Config& c) { c.optimizer.states = StateFormat::kFp8; },
      [](Config& c) { c.optimizer.master = MasterForm::kFp24Split; },
  };
  const auto check_alone = [&](std::span<const Change> of_kind, std::vector<std::string> ResumeDifferences::*kind) {
    for (size_t i = 0; i < of_kind.size(); ++i) {
      CAPTURE(i);
      Config now = saved;
      of_kind[i](now);
      const ResumeDifferences differences = resume_differences(saved, now);
      CHECK((differences.*kind).size() == 1);
      CHECK(differences.refused.size() + differences.converted.size() + differences.allowed.size() == 1);
    }
  };
  check_alone(changes, &ResumeDifferences::refused);
  check_alone(conversions, &ResumeDifferences::converted);
}

TEST_CASE("each key that decides how fast a GPU is counts alone", "[engine][config]") {
  const Config measured;
  using Change = void (*)(Config&);
  struct Key {
    const char* name;
    Change change;
  };
  const Key keys[] = {
      {"model.d_ffn", [](Config& c) { c.model.d_ffn = 48; }},
      {"precision.group_size", [](Config& c) { c.precision.group_size = 128; }},
      {"optimizer.states", [](Config& c) { c.optimizer.states = StateFormat::kBf16; }},
      {"optimizer.master", [](Config& c) { c.optimizer.master = MasterForm::kNone; }},
      {"optimizer.gradient", [](Config& c) { c.optimizer.gradient = DType::kBF16; }},
      {"optimizer.release_gradients", [](Config& c) { c.optimizer.release_gradients = true; }},
      {"optimizer.frozen", [](Config& c) { c.optimizer.frozen = {"embedding"}; }},
      {"finetune.method", [](Config& c) { c.finetune.method = FinetuneMethod::kLora; }},
      {"data.sequence_length", [](Config& c) { c.data.sequence_length = 32; }},
      {"data.documents", [](Config& c) { c.data.documents = DocumentMode::kSeparate; }},
      {"data.document_start", [](Config& c) { c.data.document_start = 5; }},
      {"data.document_end", [](Config& c) { c.data.document_end = 5; }},
      {"data.images_per_sequence", [](Config& c) { c.data.images_per_sequence = 2; }},
      {"training.micro_batch_size", [](Config& c) { c.training.micro_batch_size = 2; }},
      {"training.logits_chunk_tokens", [](Config& c) { c.training.logits_chunk_tokens = 64; }},
  };
  for (const Key& key : keys) {
    CAPTURE(key.name);
    Config wanted = measured;
    key.change(wanted);
    const std::vector<std::string> differences = speed_differences(measured, wanted, SpeedOf::kOneGpu);
    REQUIRE(differences.size() == 1);
    CHECK(differences.front().starts_with(std::string(key.name) + ": "));
  }
  Config unlike = measured;
  unlike.optimizer.lr = 1;
  unlike.model.rope_theta = 5;
  unlike.distributed.zero_stage = 1;
  CHECK(speed_differences(measured, unlike, SpeedOf::kOneGpu).empty());
  CHECK(speed_differences(measured, unlike, SpeedOf::kRun).size() == 1);
  // A deeper model has more of the same blocks.
  unlike.model.num_layers = 3;
  CHECK(speed_differences(measured, unlike, SpeedOf::kOneGpu).empty());
  CHECK(speed_differences(measured, unlike, SpeedOf::kRun).size() == 2);
}

TEST_CASE("a run resumes with the same targets and weights written in another way", "[engine][config]") {
  Config saved;
  saved.data.train = {"a.npy", "b.npy", "c.npy"};
  saved.data.weights = {1, 1, 2};
  saved.finetune.method = FinetuneMethod::kLora;
  saved.finetune.targets = {"q_proj", "v_proj"};
  const auto refused = [&](auto change) {
    Config now = saved;
    change(now);
    const ResumeDifferences differences = resume_differences(saved, now);
    CHECK(differences.refused.size() + differences.allowed.size() == 1);
    CHECK((config_hash(now) == config_hash(saved)) == differences.refused.empty());
    return !differences.refused.empty();
  };
  CHECK_FALSE(refused([](Config& c) { c.finetune.targets = {"v_proj", "q_proj"}; }));
  CHECK_FALSE(refused([](Config& c) { c.finetune.targets = {"q_proj", "v_proj", "q_proj"}; }));
  CHECK(refused([](Config& c) { c.finetune.targets = {"q_proj"}; }));
  CHECK(refused([](Config& c) { c.finetune.targets = {"q_proj", "k_proj"}; }));
  CHECK(refused([](Config& c) { c.finetune.targets = {"q_proj", "v_proj", "k_proj"}; }));

  CHECK_FALSE(refused([](Config& c) { c.data.weights = {2, 2, 4}; }));
  CHECK_FALSE(refused([](Config& c) { c.data.weights = {0.25, 0.25, 0.5}; }));
  CHECK(refused([](Config& c) { c.data.weights = {1, 2, 1}; }));
  CHECK(refused([](Config& c) { c.data.weights = {1, 1, 2 + 1e-15}; }));
  CHECK(refused([](Config& c) { c.data.weights = {}; }));
  saved.data.weights = {1, 1, 1};
  CHECK(refused([](Config& c) { c.data.weights = {}; }));  // one source, whose files are shuffled together
}

TEST_CASE("the schema covers every key and closes every object, with defaults that no recipe changes",
          "[engine][config]") {
  const json schema = config_schema();
  CHECK(schema["$schema"] == "https://json-schema.org/draft/2020-12/schema");
  Config defaults;
  const ConfigTable table = make_config_table(defaults);
  std::string wrong;
  size_t num_leaves = 0;
  const auto visit = [&](const auto& self, const json& node, const std::string& path) -> void {
    if (node.at("type") == "object") {
      if (node.at("additionalProperties") != false) wrong += path + " is open; ";
      for (const auto& [key, child] : node.at("properties").items()) {
        if (key == "$schema") continue;
        self(self, child, path.empty() ? key : path + "." + key);
      }
      return;
    }
    ++num_leaves;
    const ConfigField* field = table.find(path);
    const bool by_recipe = differs_by_recipe(path);
    if (field == nullptr || node.contains("default") == by_recipe) {
      wrong += path + " has a default against its recipe, or none; ";
    } else if (!by_recipe && node.at("default") != json(get_field(*field))) {
      wrong += path + " has a wrong default; ";
    }
    if (node.at("description").get<std::string>().size() < 10) wrong += path + " is not described; ";
  };
  visit(visit, schema, "");
  CHECK(wrong == "");
  CHECK(num_leaves == table.fields.size());

  CHECK(schema.at("properties").at("$schema").at("type") == "string");
  CHECK(differs_by_recipe("precision.gemm"));
  CHECK_FALSE(differs_by_recipe("optimizer.lr"));
  const auto at = [&](const std::string& pointer) { return schema.at(json::json_pointer(pointer)); };
  const std::string optimizer = "/properties/optimizer/properties/";
  CHECK(at(optimizer + "beta1/exclusiveMaximum") == 1.0);
  CHECK(at(optimizer + "eps/minimum") == 1e-30);
  CHECK(at(optimizer + "schedule/properties/kind/enum") == json({"cosine", "linear", "wsd", "constant"}));
  CHECK(at("/properties/precision/properties/group_size/enum") == json({16, 32, 64, 128}));
  CHECK(at("/properties/precision/properties/compute/enum") == json({"fp32", "bf16"}));
  CHECK(at("/properties/data/properties/train/items/type") == "string");
  CHECK(at("/properties/data/properties/token_dtype/enum") == json({"uint16", "uint32"}));
}

TEST_CASE("the reference describes every key and recipe", "[engine][config]") {
  const std::string text = config_reference_markdown();
  Config defaults;
  std::string missing;
  for (const ConfigField& field : make_config_table(defaults).fields) {
    if (text.find(fmt::format("| `{}` |", field.path)) == std::string::npos) missing += field.path + " ";
  }
  CHECK(missing == "");
  const std::string row = "| `optimizer.master` | none | fp32 | fp32 | fp32 | fp32 | fp32 | fp32 | fp32 |";
  CHECK(text.find(row) != std::string::npos);
}

TEST_CASE("shipped configs are valid and have the published sizes", "[engine][config]") {
  for (const std::string& path : shipped_configs()) {
    CAPTURE(path);
    CHECK_NOTHROW(load_config(path, {}));
    CHECK_FALSE(load_config(path, {}).data.train.empty());
  }
  const std::map<std::string, int64_t> published = {
      {"olmo-1b", 1176764416},      {"olmo-1b-coat", 1176764416}, {"olmo-7b", 6888095744},
      {"olmo-7b-coat", 6888095744}, {"llama2-7b", 6738415616},    {"llama2-7b-parka", 6738415616},
      {"llama2-13b", 13015864320},  {"llama-30b", 32528943616},   {"olmo2-1b", 1484916736},
      {"olmo2-7b", 7298617344},     {"llama3-8b", 8030261248},    {"llama3.2-1b", 1235814400},
      {"qwen3-0.6b", 596049920},    {"qwen3-8b", 8190735360},     {"mistral-7b", 7241732096},
      {"gemma3-1b", 999885952},     {"olmoe-1b-7b", 6919161856},  {"qwen3-30b-a3b", 30532122624}};
  for (const auto& [name, count] : published) {
    CAPTURE(name);
    CHECK(make_parameter_table(load_config(shipped(name), {}).model, false).num_parameters() == count);
  }
}

TEST_CASE("shipped variants differ in recipe and folder only", "[engine][config]") {
  const auto [name, variant, recipe] = GENERATE(table<std::string, std::string, Recipe>({
      {"olmo-1b", "olmo-1b-coat", Recipe::kCoat},
      {"olmo-7b", "olmo-7b-coat", Recipe::kCoat},
      {"llama2-7b", "llama2-7b-parka", Recipe::kParka},
  }));
  Config base = load_config(shipped(name), {});
  base.checkpoint.folder = "runs/" + variant;
  apply_recipe(recipe, base);
  CHECK(load_config(shipped(variant), {}) == base);
}

TEST_CASE("a small model works with every recipe", "[engine][config]") {
  const std::string name = GENERATE("tiny-olmo", "tiny-llama", "quickstart");
  for (const auto& [recipe, recipe_name] : EnumNames<Recipe>::kAll) {
    CAPTURE(name, recipe_name);
    CHECK_NOTHROW(load_config(shipped(name), {fmt::format("precision.recipe={}", recipe_name)}));
  }
}
