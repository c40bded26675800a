#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "core/error.h"
#include "core/philox.h"
#include "engine/config/config_io.h"
#include "engine/config/config_table.h"
#include "tests/support/catch.h"
#include "tests/support/refusal.h"
#include "tests/support/temporary_folder.h"

using namespace parka;
using nlohmann::json;
using parka::test::refusal;

namespace {

Config parse(const std::string& text) { return parse_config(json::parse(text), "test.json"); }

std::string parse_error(const std::string& text) {
  return refusal([&] { parse(text); });
}

class ConfigFile {
 public:
  explicit ConfigFile(const std::string& text) : path_(folder_ / "run.json") { test::write_file(path_, text); }
  const std::string& path() const { return path_; }

 private:
  test::TemporaryFolder folder_;
  std::string path_;
};

// What load_config says about a file with this text, the path of the file cut off.
std::string load_error(const std::string& text, const std::vector<std::string>& overrides = {}) {
  const ConfigFile file(text);
  const std::string message = refusal([&] { load_config(file.path(), overrides); });
  return message.starts_with(file.path()) ? message.substr(file.path().size()) : message;
}

}  // namespace

TEST_CASE("an empty config is the defaults", "[engine][config]") {
  CHECK(parse("{}") == Config{});
  CHECK(parse(R"({"model": {}, "optimizer": {"schedule": {}}})") == Config{});
}

TEST_CASE("every kind of value is read", "[engine][config]") {
  const Config c = parse(R"({
    "model": {"d_model": 1e3, "num_heads": 10, "norm": "rmsnorm", "tie_embeddings": false, "rope_theta": 500000},
    "precision": {"backward_format": "e4m3", "group_size": 64},
    "optimizer": {"lr": 1e-3, "gradient": "bf16", "schedule": {"kind": "wsd", "decay_steps": 7}},
    "data": {"train": ["a", "b"], "token_dtype": "uint32"},
    "checkpoint": {"folder": "x/y"}})");
  CHECK(c.model.d_model == 1000);
  CHECK(c.model.norm == NormKind::kRmsNorm);
  CHECK(c.model.tie_embeddings == false);
  CHECK(c.model.rope_theta == 500000.0);
  CHECK(c.precision.backward_format == DType::kE4M3);
  CHECK(c.precision.group_size == 64);
  CHECK(c.optimizer.lr == 1e-3);
  CHECK(c.optimizer.gradient == DType::kBF16);
  CHECK(c.optimizer.schedule.kind == ScheduleKind::kWsd);
  CHECK(c.optimizer.schedule.decay_steps == 7);
  CHECK(c.data.train == std::vector<std::string>{"a", "b"});
  CHECK(c.data.token_dtype == TokenType::kUint32);
  CHECK(c.checkpoint.folder == "x/y");
  CHECK(c.model.num_layers == Config{}.model.num_layers);
}

TEST_CASE("an unknown key names the nearest one", "[engine][config]") {
  const auto [text, want] = GENERATE(table<std::string, std::string>({
      {R"({"optimizer": {"lrr": 1}})", "optimizer.lrr: unknown key; did you mean optimizer.lr?"},
      {R"({"optimizer": {"shcedule": {}}})", "optimizer.shcedule: unknown key; did you mean optimizer.schedule?"},
      {R"({"optimizer": {"schedule": {"warmup": 1}}})",
       "optimizer.schedule.warmup: unknown key; did you mean optimizer.schedule.warmup_steps?"},
      {R"({"optimizer": {"warmup_steps": 9}})",
       "optimizer.warmup_steps: unknown key; did you mean optimizer.schedule.warmup_steps?"},
      {R"({"checkpoint": {"save_interval": 9}})",
       "checkpoint.save_interval: unknown key; did you mean checkpoint.interval?"},
      {R"({"lr": 1})", "lr: unknown key; did you mean optimizer.lr?"},
      {R"({"distributed": {"seed": 1}})", "distributed.seed: unknown key; did you mean data.seed?"},
      {R"({"distributed": {"name": 1}})",
       "distributed.name: unknown key; the keys are: zero_stage shard_size context_parallel "
       "expert_parallel"},
      {R"({"training": {"lr": 1}})", "training.lr: unknown key; did you mean optimizer.lr?"},
      {R"({"zqxw": 1})",
       "zqxw: unknown key; the keys are: model precision optimizer data training finetune checkpoint telemetry "
       "evaluation distributed reliability device"},
      {R"({"distributed": {"": 1}})",
       "distributed.: unknown key; the keys are: zero_stage shard_size context_parallel "
       "expert_parallel"},
      {R"({"optimizer.lr": 1})",
       R"("optimizer.lr": a key has no dots; write sections as objects, {"optimizer": {"lr": ...}})"},
      {R"({"model": {"d_modle": 1, "zz": 2}, "x\ny": 1})",
       R"(model.d_modle: unknown key; did you mean model.d_model? Also unknown: model.zz, x\x0ay)"},
  }));
  CHECK(parse_error(text) == "test.json: " + want);
}

TEST_CASE("a removed key is ignored with the value that is meant always, and refused by name with another",
          "[engine][config]") {
  struct Removed {
    std::string key, value, other;
  };
  const Removed keys[] = {
      {"distributed.gathered_blocks", "2", "3"},
      {"precision.attention_output", R"("compute")", R"("fp8")"},
      {"precision.attention_scores", R"("compute")", R"("fp8")"},
      {"precision.fast_forward", "true", "false"},
      {"precision.fast_input_gradient", "true", "false"},
      {"precision.weight_copies_blocks", "0", "2"},
  };
  for (const auto& [key, value, other] : keys) {
    CAPTURE(key);
    const auto config = [&](const std::string& text) {
      const size_t dot = key.find('.');
      return fmt::format(R"({{"{}": {{"{}": {}}}}})", key.substr(0, dot), key.substr(dot + 1), text);
    };
    CHECK(parse(config(value)) == Config{});
    for (const std::string& text : {other, std::string("null"), std::string(R"("")")}) {
      CHECK(parse_error(config(text)).find(key + " = " + text) != std::string::npos);
    }
    const ConfigFile file("{}");
    CHECK(load_config(file.path(), {key + "=" + value}) == Config{});
    CHECK(load_error("{}", {key + "=" + other}).find(key) != std::string::npos);
  }
}

TEST_CASE("a value of the wrong type or out of range is refused", "[engine][config]") {
  const auto [text, want] = GENERATE(table<std::string, std::string>({
      {R"([])", "expected an object of sections, got an array"},
      {R"({"optimizer": 3})", "optimizer: expected an object, got 3"},
      {R"({"optimizer": {"lr": "abc"}})", R"(optimizer.lr: expected a number, got a string "abc")"},
      {R"({"optimizer": {"lr": null}})", "optimizer.lr: expected a number, got null"},
      {R"({"optimizer": {"lr": true}})", "optimizer.lr: expected a number, got true"},
      {R"({"optimizer": {"lr": {"a": 1}}})", "optimizer.lr: expected a number, got an object"},
      {R"({"optimizer": {"lr": -1e-9}})", "optimizer.lr: -1e-09 is out of range; allowed: 0 to 1e+30"},
      {R"({"optimizer": {"beta1": 1}})", "optimizer.beta1: 1 is out of range; allowed: 0 to below 1"},
      {R"({"optimizer": {"eps": 0}})", "optimizer.eps: 0 is out of range; allowed: 1e-30 to 1"},
      {R"({"optimizer": {"clip_norm": 5e-324}})",
       "optimizer.clip_norm: 5e-324 is too close to 0 for a 32-bit float; give 0 or at least 1.18e-38"},
      {R"({"training": {"z_loss": 1e-39}})",
       "training.z_loss: 1e-39 is too close to 0 for a 32-bit float; give 0 or at least 1.18e-38"},
      {R"({"model": {"num_layers": 1.5}})", "model.num_layers: expected an integer, got 1.5"},
      {R"({"model": {"num_layers": 0}})", "model.num_layers: 0 is out of range; allowed: 1 to 10000"},
      {R"({"model": {"num_layers": "4"}})", R"(model.num_layers: expected an integer, got a string "4")"},
      {R"({"data": {"seed": 18446744073709551615}})", "data.seed: expected an integer, got 18446744073709551615"},
      {R"({"data": {"seed": 1e30}})", "data.seed: expected an integer, got 1e+30"},
      {R"({"data": {"seed": -1}})", "data.seed: -1 is out of range; allowed: 0 to 9007199254740992"},
      {R"({"data": {"shuffle": 1}})", "data.shuffle: expected true or false, got 1"},
      {R"({"data": {"train": "a"}})",
       R"(data.train: expected an array of strings, got a string "a"; write it in square brackets)"},
      {R"({"data": {"train": {}}})", "data.train: expected an array of strings, got an object"},
      {R"({"data": {"train": ["a", 1]}})", "data.train: entry 1: expected a string, got 1"},
      {R"({"data": {"train": ["a", ""]}})", "data.train: entry 1: must not be empty"},
      {R"({"checkpoint": {"folder": ""}})", "checkpoint.folder: must not be empty"},
      {R"({"checkpoint": {"folder": "a\nb"}})",
       R"(checkpoint.folder: control characters are not allowed: "a\x0ab")"},
      {R"({"precision": {"group_size": 17}})", "precision.group_size: 17 is not valid; allowed: 16, 32, 64, 128"},
      {R"({"precision": {"gemm": "fp8"}})",
       R"(precision.gemm: "fp8" is not valid; did you mean "fp8_tensor"? Allowed: "compute", "fp8_tensor", "fp8_block")"},
      {R"({"optimizer": {"states": "expand"}})",
       R"(optimizer.states: "expand" is not valid; did you mean "fp8_expanded"? Allowed: "fp32", "bf16", "fp8", "fp8_expanded")"},
      {R"({"precision": {"compute": "e4m3"}})",
       R"(precision.compute: "e4m3" is not valid; allowed: "fp32", "bf16")"},
      {R"({"model": {"norm": 1}})", R"(model.norm: expected a string, got 1; allowed: "layernorm", "rmsnorm")"},
      {R"({"distributed": {"zero_stage": 4}})", "distributed.zero_stage: 4 is out of range; allowed: 0 to 3"},
      {R"({"distributed": {"context_parallel": 0}})",
       "distributed.context_parallel: 0 is out of range; allowed: 1 to 1024"},
      {R"({"data": {"sequence_length": 1}})", "data.sequence_length: 1 is out of range; allowed: 2 to 2147483647"},
  }));
  CHECK(parse_error(text) == "test.json: " + want);
}

TEST_CASE("values that no JSON text can hold are refused", "[engine][config]") {
  const json values[] = {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity(),
                         -std::numeric_limits<double>::infinity(), json::binary({1, 2}), "\xff\xfe"};
  int accepted = 0;
  Config names_only;
  for (const ConfigField& field : make_config_table(names_only).fields) {
    for (const json& value : values) accepted += set_field(field, value).empty();
  }
  CHECK(accepted == 0);
}

TEST_CASE("a recipe sets the formats, and keys that are given override it", "[engine][config]") {
  struct Row {
    std::string recipe, compute, gemm, backward, norm_input, up_gate, qkv;
    bool save_norm, save_silu, save_product;
    std::string states, master;
  };
  const Row rows[] = {
      {"fp32", "fp32", "compute", "e5m2", "compute", "compute", "compute", true, false, true, "fp32", "none"},
      {"bf16", "bf16", "compute", "e5m2", "compute", "compute", "compute", true, false, true, "fp32", "fp32"},
      {"fp8_linear", "bf16", "fp8_tensor", "e5m2", "compute", "compute", "compute", true, false, true, "fp32",
       "fp32"},
      {"fp8_block", "bf16", "fp8_block", "e4m3", "compute", "compute", "compute", true, false, true, "fp32",
       "fp32"},
      {"coat_activation", "bf16", "fp8_tensor", "e5m2", "fp8", "fp8", "compute", true, true, true, "fp32", "fp32"},
      {"coat_optimizer", "bf16", "compute", "e5m2", "compute", "compute", "compute", true, false, true,
       "fp8_expanded", "fp32"},
      {"coat", "bf16", "fp8_tensor", "e5m2", "fp8", "fp8", "compute", true, true, true, "fp8_expanded", "fp32"},
      {"parka", "bf16", "fp8_tensor", "e5m2", "fp8", "fp8", "fp8", false, false, false, "fp8_expanded", "fp32"},
  };
  for (const Row& row : rows) {
    const bool is_parka = std::string_view(row.recipe) == "parka";
    const json resolved = to_json(parse(fmt::format(R"({{"precision": {{"recipe": "{}"}}}})", row.recipe)));
    const json want_precision = {{"recipe", row.recipe},
                                 {"compute", row.compute},
                                 {"gemm", row.gemm},
                                 {"forward_format", "e4m3"},
                                 {"backward_format", row.backward},
                                 {"norm_input", row.norm_input},
                                 {"up_gate", row.up_gate},
                                 {"qkv", row.qkv},
                                 {"head", is_parka ? "fp8" : "compute"},
                                 {"tower", "compute"},
                                 {"sampled_amax", is_parka},
                                 {"unquantized", json::array()},
                                 {"group_size", 16},
                                 {"save_norm_output", row.save_norm},
                                 {"save_silu", row.save_silu},
                                 {"save_product", row.save_product},
                                 {"weight_copies", "auto"},
                                 {"recompute", "none"},
                                 {"offload_blocks", 0},
                                 {"offload_weights", false},
                                 {"eval", "same"}};
    CHECK(resolved["precision"] == want_precision);
    CHECK(resolved["optimizer"]["states"] == row.states);
    CHECK(resolved["optimizer"]["master"] == row.master);
    CHECK(resolved["optimizer"]["gradient"] == "fp32");
  }
  // "qkv" stands before "recipe" in the order of keys, and "optimizer" before "precision".
  const Config c = parse(R"({"precision": {"recipe": "parka", "qkv": "compute", "group_size": 32},
                             "optimizer": {"states": "fp8", "master": "bf16_sr"}})");
  Config want;
  apply_recipe(Recipe::kParka, want);
  want.precision.qkv = Storage::kCompute;
  want.precision.group_size = 32;
  want.optimizer.states = StateFormat::kFp8;
  want.optimizer.master = MasterForm::kBf16Sr;
  CHECK(c == want);
}

TEST_CASE("another recipe on the command line replaces one whose keys are all given, as a run's config gives them",
          "[engine][config]") {
  Config own;
  apply_recipe(Recipe::kParka, own);
  own.precision.qkv = Storage::kCompute;
  own.precision.group_size = 32;
  const json file = to_json(own);
  Config want;
  apply_recipe(Recipe::kCoat, want);
  want.precision.group_size = 32;  // no recipe sets it
  CHECK(override_config(file, {"precision.recipe=coat"}, "config.json") == want);
  CHECK(override_config(file, {"precision.recipe=bf16", "precision.recipe=\"coat\""}, "config.json") == want);
  want.optimizer.states = StateFormat::kFp8;
  CHECK(override_config(file, {"optimizer.states=fp8", "precision.recipe=coat"}, "config.json") == want);
  // Its own name changes nothing, and where a file leaves a key to its recipe, those that it gives stay.
  CHECK(override_config(file, {"precision.recipe=parka"}, "config.json") == own);
  json some = file;
  some["precision"].erase("gemm");
  CHECK(override_config(some, {"precision.recipe=coat"}, "config.json").precision.up_gate == own.precision.up_gate);
  CHECK(override_config(some, {"precision.recipe=coat"}, "config.json").optimizer.master == own.optimizer.master);
}

TEST_CASE("the resolved config is complete and parses to the same", "[engine][config]") {
  for (const auto& [recipe, name] : EnumNames<Recipe>::kAll) {
    Config c;
    c.model = {.vocab_size = 272, .d_model = 128, .num_layers = 2, .num_heads = 4, .d_ffn = 256};
    c.data.sequence_length = 64;
    apply_recipe(recipe, c);
    c.optimizer.lr = 0.1 + 0.2;  // needs all 17 digits
    c.data.train = {"a \"b\" \\ \xC3\xA9", "c"};
    c.data.seed = kMaxExactInteger;
    const std::string text = to_json(c).dump(2);
    CAPTURE(name, text);
    CHECK(parse(text) == c);
    Config copy = c;
    // Two files to train on make two values of one field; so do the layers with adapters, and channels of pixels.
    const TowerConfig& tower = c.model.vision.tower;
    const size_t more = c.data.train.size() - 1 + c.finetune.targets.size() - 1 + tower.pixel_mean.size() - 1 +
                        tower.pixel_deviation.size() - 1;
    CHECK(to_json(c).flatten().size() == make_config_table(copy).fields.size() + more);
  }
}

TEST_CASE("an empty JSON file is named as one", "[engine][config]") {
  const std::string message = load_error("");  // versions of the library word it differently
  CAPTURE(message);
  CHECK(message.starts_with(":1:1: "));
  CHECK(message.ends_with("; the line: (empty)"));
}

TEST_CASE("data in the place of a config is told from a wrong config", "[engine][config]") {
  for (const char* text : {"PAR1\x15\x04", "\x93NUMPY\x01", "PK\x03\x04"})
    CHECK(load_error(text).find("--data") != std::string::npos);
}

TEST_CASE("JSON errors give file, line and column", "[engine][config]") {
  const auto [text, want] = GENERATE(table<std::string, std::string>({
      {"{\"optimizer\":\n  {\"lr\": 1,}\n}",
       ":2:12: syntax error while parsing object key - unexpected '}'; expected "
       "string literal; the line: {\"lr\": 1,}"},
      {"{\"a\": 1",
       ":1:8: syntax error while parsing object - unexpected end of input; expected '}'; the line: "
       "{\"a\": 1"},
      {"{} x",
       ":1:4: syntax error while parsing value - invalid literal; last read: '{} x'; expected end of input; "
       "the line: {} x"},
      {"\xEF\xBB\xBF{\"a\":}",
       ":1:6: syntax error while parsing value - unexpected '}'; expected '[', '{', or a "
       "literal; the line: {\"a\":}"},
      {"{\"optimizer\": {\"lr\": 1, \"lr\": 2}}", ": optimizer.lr: given twice; keep one"},
      {"{\"data\": {\"train\": [{\"a\": 1, \"a\": 2}]}}", ": data.train.[].a: given twice; keep one"},
      {"{\"optimizer\": {\"lr\": 1e999}}", ": number overflow parsing '1e999'"},
      {std::string(100000, '['), ": nested deeper than 64"},
      {"[]", ": expected an object of sections, got an array"},
  }));
  CHECK(load_error(text) == want);
}

TEST_CASE("comments are allowed", "[engine][config]") {
  const ConfigFile file("// a run\n{\"optimizer\": { /* peak */ \"lr\": 0.5 } // end\n}\n");
  CHECK(load_config(file.path(), {}).optimizer.lr == 0.5);
}

TEST_CASE("a config file that cannot be read is named", "[engine][config]") {
  const test::TemporaryFolder folder;
  const std::string missing = folder / "none.json";
  CHECK(refusal([&] { load_config(missing, {}); }).find(missing) != std::string::npos);
  CHECK(refusal([&] { load_config(folder.path().string(), {}); }).find(folder.path().string()) !=
        std::string::npos);
}

TEST_CASE("overrides replace what the file says", "[engine][config]") {
  const ConfigFile file(R"({"optimizer": {"lr": 0.5, "beta1": 0.8}, "precision": {"recipe": "coat"}})");
  const Config c = load_config(file.path(), {
                                                "optimizer.lr=1e-3",
                                                "precision.recipe=parka",
                                                "precision.qkv=compute",
                                                "data.train=[\"a\",\"b=c\"]",
                                                "checkpoint.folder=2024",
                                                "training.steps=7",
                                                "training.steps=8",
                                                "data.shuffle=false",
                                                "optimizer.schedule.kind=\"linear\"",
                                            });
  CHECK(c.optimizer.lr == 1e-3);
  CHECK(c.optimizer.beta1 == 0.8);
  CHECK(c.precision.recipe == Recipe::kParka);
  CHECK(c.precision.qkv == Storage::kCompute);
  CHECK(c.precision.norm_input == Storage::kFp8);
  CHECK(c.data.train == std::vector<std::string>{"a", "b=c"});
  CHECK(c.checkpoint.folder == "2024");
  CHECK(c.training.steps == 8);
  CHECK(c.data.shuffle == false);
  CHECK(c.optimizer.schedule.kind == ScheduleKind::kLinear);
}

TEST_CASE("a bad override is refused", "[engine][config]") {
  const auto [override, want] = GENERATE(table<std::string, std::string>({
      {"optimizer.lr", "command line: \"optimizer.lr\" is not an override; write section.key=value"},
      {"=1", "command line: \"=1\" is not an override; write section.key=value"},
      {"optimizer.lrr=1", "command line: optimizer.lrr: unknown key; did you mean optimizer.lr?"},
      {"optimzer.lr=1", "command line: optimzer: unknown key; did you mean optimizer?"},
      {"optimizer.lr.x=1", "command line: optimizer.lr.x: unknown key; optimizer.lr is not a section"},
      {"optimizer={}",
       "command line: optimizer is a section; override its keys one by one, as in optimizer.<key>=value"},
      {"optimizer.lr=abc", "command line: optimizer.lr: expected a number, got a string \"abc\""},
      {"optimizer.lr=1e999", "command line: optimizer.lr: expected a number, got a string \"1e999\""},
      {"optimizer.lr=", "command line: optimizer.lr: expected a number, got a string \"\""},
      {"optimizer.beta1=2", "command line: optimizer.beta1: 2 is out of range; allowed: 0 to below 1"},
      {"checkpoint.folder=\xff", "command line: checkpoint.folder: not valid UTF-8: \"\xEF\xBF\xBD\""},
      {"data.train=" + std::string(100000, '['),
       "command line: data.train: expected an array of strings, got a string \"" + std::string(100, '[') +
           "...\"; quote it for the shell, as in --set 'KEY=[\"TEXT\"]'"},
      {"data.train=a",
       "command line: data.train: expected an array of strings, got a string \"a\"; write it in square brackets"},
      // A combination is the fault of neither alone.
      {"model.num_heads=3", ": model.d_model = 2048 is not a multiple of model.num_heads = 3; change one of them"},
  }));
  CHECK(load_error("{\"optimizer\": {\"lr\": 0.5}}", {override}) == want);
  CHECK(load_error("{\"optimizer\": 3}", {"optimizer.lr=1"}) == ": optimizer: expected an object, got 3");
}

TEST_CASE("random JSON gives a config or a one-line error", "[engine][config]") {
  Config names_only;
  const ConfigTable table = make_config_table(names_only);
  uint64_t draws = 0;
  const auto draw = [&](uint64_t below) { return philox4x32(17, 3, draws++)[0] % below; };
  const json values[] = {nullptr,
                         true,
                         -1,
                         0,
                         1,
                         1e-40,
                         1.5,
                         1e300,
                         INT64_MIN,
                         INT64_MAX,
                         UINT64_MAX,
                         16,
                         2048,
                         "",
                         "fp8",
                         "bf16",
                         "\x01\xff",
                         "parka",
                         json::array(),
                         json::object(),
                         json::array({"a"}),
                         json::array({json::array()}),
                         json::binary({0}),
                         std::string(1000, 'x'),
                         std::nan("")};
  int valid = 0, not_one_line = 0, other_error = 0;
  for (int round = 0; round < 3000; ++round) {
    json root = json::object();
    for (uint64_t i = 0; i <= draw(6); ++i) {
      std::string path = table.fields[draw(table.fields.size())].path;
      if (draw(20) == 0) path[draw(path.size())] = static_cast<char>(draw(256));
      json* node = &root;
      for (size_t dot; (dot = path.find('.')) != std::string::npos && node->is_object(); path.erase(0, dot + 1)) {
        node = &(*node)[path.substr(0, dot)];
        if (node->is_null()) *node = json::object();
      }
      if (node->is_object()) (*node)[path] = values[draw(std::size(values))];
    }
    try {
      const Config c = parse_config(root, "random");
      valid += parse_config(to_json(c), "again") == c;
    } catch (const Error& error) {
      const std::string what = error.what();
      not_one_line += what.find('\n') != std::string::npos || !what.starts_with("random: ");
      other_error += error.code() != ExitCode::kBadInput;
    }
  }
  CHECK(valid > 10);
  CHECK(not_one_line == 0);
  CHECK(other_error == 0);
}
