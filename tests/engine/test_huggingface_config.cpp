// config.json of Hugging Face models: what it says of a model, how a model is written as one, and what is refused;
// and the table of families.
#include <cmath>
#include <set>

#include "engine/config/config_io.h"
#include "engine/huggingface/huggingface_config.h"
#include "engine/huggingface/huggingface_weights.h"
#include "tests/engine/huggingface_fixture.h"
#include "tests/support/temporary_folder.h"

using namespace parka;
using namespace parka::test;

TEST_CASE("a config.json of Parka's own is read back as the same model", "[engine][huggingface]") {
  for (const NormKind norm : {NormKind::kRmsNorm, NormKind::kLayerNorm}) {
    ModelConfig model = {
        .vocab_size = 300, .d_model = 64, .num_layers = 3, .num_heads = 8, .num_kv_heads = 2, .d_ffn = 96};
    model.given_head_dim = 12;
    model.norm = norm;
    model.rope_theta = 12345.5;
    model.rope_scaling.kind = RopeScalingKind::kLlama3;
    model.rope_scaling.factor = 3.5;
    model.rope_scaling.original_length = 99;
    model.init = InitKind::kNormal;
    const HuggingFaceFamily& family = choose_family(model, "", nullptr, "here");
    const std::string text = make_huggingface_config({&family, model, 777}, DType::kBF16, nullptr);
    const HuggingFaceModel back = parse_huggingface_config(nlohmann::json::parse(text), "test");
    CHECK(back.family == &family);
    CHECK(back.model == model);
    CHECK(back.max_positions == 777);
  }
}

TEST_CASE("a model is exported as a family that can say all of it", "[engine][huggingface]") {
  const HuggingFaceFamily &llama = *find_family("llama", huggingface_families()),
                          &olmo = *find_family("olmo", huggingface_families());
  ModelConfig model;
  model.norm_eps = 1e-5;
  CHECK(&choose_family(model, "", nullptr, "here") == &olmo);
  CHECK(&choose_family(model, "", &llama, "here") == &olmo);  // what it comes from was another model
  CHECK(&choose_family(model, "olmo", &llama, "here") == &olmo);
  model.norm = NormKind::kRmsNorm;
  model.given_head_dim = model.d_model / model.num_heads;  // as not given
  CHECK(&choose_family(model, "", &olmo, "here") == &llama);
  CHECK(message_of([&] { choose_family(model, "olmo", nullptr, "here"); }) ==
        "here: --family olmo has model.norm = \"layernorm\", not \"rmsnorm\"; name another family, or leave out "
        "--family");
  CHECK(
      message_of([&] { choose_family(model, "gpt2", nullptr, "here"); }) ==
      "--family gpt2 is not known; llama (LlamaForCausalLM), mistral (MistralForCausalLM), qwen2 (Qwen2ForCausalLM), qwen3 "
      "(Qwen3ForCausalLM), olmo2 (Olmo2ForCausalLM), olmo3 (Olmo3ForCausalLM), gemma3_text (Gemma3ForCausalLM), olmo (OlmoForCausalLM), "
      "olmoe (OlmoeForCausalLM), qwen3_moe (Qwen3MoeForCausalLM), mixtral (MixtralForCausalLM), dots1 "
      "(Dots1ForCausalLM) are");

  // None with experts is one without.
  ModelConfig dense = model;
  dense.qk_norm = QkNormKind::kFull;
  CHECK(family_problems(*find_family("olmoe", huggingface_families()), dense) ==
        std::vector<std::string>{"model.moe.num_experts = 1, not 0"});
  dense.moe = {.num_experts = 8, .experts_per_token = 2};
  CHECK(choose_family(dense, "", nullptr, "here").model_type == "olmoe");

  // transformers' OLMo has one epsilon and no key for it.
  model.norm = NormKind::kLayerNorm;
  model.norm_eps = 0.25;
  CHECK(
      message_of([&] { choose_family(model, "", &olmo, "here"); }) ==
      "here: no supported Hugging Face family can express this model: llama has model.norm = \"rmsnorm\", not "
      "\"layernorm\"; mistral has model.norm = \"rmsnorm\", not \"layernorm\"; qwen2 has model.norm = \"rmsnorm\", not \"layernorm\", and model.qkv_bias = true, not false; qwen3 has model.norm = \"rmsnorm\", not "
      "\"layernorm\", and model.qk_norm = \"per_head\", not "
      "\"none\"; olmo2 has model.norm = \"rmsnorm\", not \"layernorm\", and model.norm_placement = \"after\", not "
      "\"before\", and model.qk_norm = \"full\", not \"none\"; olmo3 has model.norm = \"rmsnorm\", not \"layernorm\", and model.norm_placement = \"after\", not "
      "\"before\", and model.qk_norm = \"full\", not \"none\"; gemma3_text has model.norm = \"rmsnorm\", not \"layernorm\", and "
      "model.norm_placement = \"both\", not \"before\", and model.qk_norm = \"per_head\", not \"none\", and "
      "model.norm_unit_offset = true, not false, and model.activation = \"gelu_tanh\", not \"silu\", and "
      "model.embedding_scale = \"sqrt_d_model\", not \"none\"; olmo has model.norm_eps = 1e-05, not 0.25; train one "
      "with the values of a family");
  CHECK_THROWS_AS(make_huggingface_config({&olmo, model, 2048}, DType::kBF16, nullptr), Error);
}

TEST_CASE("a family without a key for a field has its default only", "[engine][huggingface]") {
  HuggingFaceFamily family = *find_family("llama", huggingface_families());
  std::erase_if(family.keys, [](const ModelKey& entry) {
    const auto* key = std::get_if<IntegerKey>(&entry);
    return key != nullptr && (key->key == "head_dim" || key->key == "num_key_value_heads");
  });
  ModelConfig model = {.d_model = 64, .num_heads = 8, .norm = NormKind::kRmsNorm};
  model.init = InitKind::kMitchell;  // no longer matters
  CHECK(family_problems(family, model).empty());
  model.given_head_dim = 8;  // what 0 stands for
  model.num_kv_heads = 8;
  CHECK(family_problems(family, model).empty());
  model.given_head_dim = 16;
  model.num_kv_heads = 2;
  CHECK(family_problems(family, model) ==
        std::vector<std::string>{"model.num_kv_heads = 8, not 2", "model.head_dim = 8, not 16"});
}

TEST_CASE("a family more is one value in the table", "[engine][huggingface]") {
  // Llama's layers with a window that is on where nothing is said of it, other defaults and other names.
  std::vector<HuggingFaceFamily> families(huggingface_families().begin(), huggingface_families().end());
  HuggingFaceFamily other = *find_family("llama", huggingface_families());
  other.model_type = "other";
  other.architecture = "OtherForCausalLM";
  other.rope_theta = 1e6;
  other.max_positions = 32768;
  for (ModelKey& entry : other.keys) {
    auto* key = std::get_if<IntegerKey>(&entry);
    if (key != nullptr && key->key == "head_dim") key->otherwise = 32;
  }
  std::erase_if(other.fixed_keys, [](const FixedKey& fixed) { return fixed.key == "sliding_window"; });
  other.fixed_keys.push_back({"sliding_window", {nullptr}, Presence::kRequired});
  other.tensors.embedding = "table.weight";
  other.tensors.blocks = "stack.";
  other.tensors.in_block[0].name = "query.weight";
  families.push_back(other);

  nlohmann::json config = {{"model_type", "other"},      {"vocab_size", 60},         {"hidden_size", 32},
                           {"num_hidden_layers", 1},     {"num_attention_heads", 4}, {"intermediate_size", 48},
                           {"tie_word_embeddings", true}};
  CHECK(message_of([&] { parse_huggingface_config(config, "here", families); }) ==
        "here: has no sliding_window, and its default is not supported; null is");
  config["sliding_window"] = nullptr;
  const HuggingFaceModel read = parse_huggingface_config(config, "here", families);
  CHECK(read.family == &families.back());
  CHECK(read.model.norm == NormKind::kRmsNorm);
  CHECK(read.model.rope_theta == 1e6);
  CHECK(read.model.head_dim() == 32);
  CHECK(read.max_positions == 32768);

  const auto tensors = huggingface_tensors(*read.family, read.model, make_parameter_table(read.model, false));
  CHECK(tensors.size() == 11);  // the head is tied
  CHECK(tensors[0].name == "table.weight");
  CHECK(tensors[1].name == "stack.0.query.weight");
  CHECK(tensors[1].shape == std::vector<int64_t>{128, 32});

  // Llama, too, can be this model, and is before it in the table.
  CHECK(&choose_family(read.model, "", nullptr, "here", families) == &families.front());
  CHECK(&choose_family(read.model, "", read.family, "here", families) == &families.back());
  CHECK(&choose_family(read.model, "other", nullptr, "here", families) == &families.back());
  const auto written = nlohmann::json::parse(make_huggingface_config(read, DType::kBF16, nullptr));
  CHECK(written.at("sliding_window").is_null());
  CHECK(written.at("architectures") == nlohmann::json{"OtherForCausalLM"});
  CHECK(parse_huggingface_config(written, "written", families).model == read.model);
}

TEST_CASE("each expert has tensors of its own", "[engine][huggingface]") {
  // Qwen3-30B-A3B as it is published, in 18,867 tensors.
  nlohmann::json config = nlohmann::json::parse(read_file(kFixtures + "qwen3_moe_gqa/config.json"));
  config.update({{"vocab_size", 151936},
                 {"hidden_size", 2048},
                 {"num_hidden_layers", 48},
                 {"num_attention_heads", 32},
                 {"num_key_value_heads", 4},
                 {"head_dim", 128},
                 {"moe_intermediate_size", 768},
                 {"num_experts", 128},
                 {"num_experts_per_tok", 8},
                 {"num_local_experts", nullptr}});
  const HuggingFaceModel read = parse_huggingface_config(config, "here");
  const auto tensors = huggingface_tensors(*read.family, read.model, make_parameter_table(read.model, false));
  CHECK(tensors.size() == 18867);
  int64_t elements = 0;
  std::set<std::string> names;
  for (const HuggingFaceTensor& tensor : tensors) {
    elements += tensor.num_rows * tensor.num_columns();
    names.insert(tensor.name);
  }
  CHECK(elements == 30532122624);
  CHECK(names.size() == tensors.size());
  CHECK(names.contains("model.layers.47.mlp.experts.127.down_proj.weight"));
  config["num_hidden_layers"] = 10000;  // of no model, and a tensor of each expert would fill the memory
  config["num_experts"] = 512;
  CHECK(message_of([&] { parse_huggingface_config(config, "here"); }).find("num_hidden_layers") !=
        std::string::npos);
}

TEST_CASE("a family whose tensors leave out a weight is a defect", "[engine][huggingface]") {
  HuggingFaceFamily family = *find_family("llama", huggingface_families());
  ModelConfig model = {.vocab_size = 60, .d_model = 32, .num_layers = 2, .num_heads = 4, .d_ffn = 48};
  model.norm = NormKind::kRmsNorm;
  const ParameterTable table = make_parameter_table(model, false);
  CHECK_NOTHROW(huggingface_tensors(family, model, table));
  family.tensors.in_block.pop_back();
  CHECK_THROWS_AS(huggingface_tensors(family, model, table), Error);
}

TEST_CASE("config.json that Parka cannot compute is refused with what is the matter", "[engine][huggingface]") {
  const auto base = nlohmann::json::parse(read_file(kFixtures + "llama3_gqa/config.json"));
  const struct {
    const char* patch;
    const char* says;
  } cases[] = {
      {R"({"model_type": "gpt2"})", "model_type \"gpt2\""},
      {R"({"architectures": ["LlamaForSequenceClassification"]})", "LlamaForSequenceClassification"},
      {R"({"attention_bias": true})", "attention_bias"},
      {R"({"mlp_bias": true})", "mlp_bias"},
      {R"({"hidden_act": "gelu"})", "hidden_act = \"gelu\""},
      {R"({"attention_dropout": 0.1})", "attention_dropout = 0.1"},
      {R"({"clip_qkv": 8.0})", "clip_qkv = 8.0"},
      {R"({"sliding_window": 4096})", "sliding_window = 4096"},
      {R"({"quantization_config": {"bits": 4}})", "quantization_config"},
      {R"({"rope_parameters": {"rope_type": "longrope"}})", "rope_type = \"longrope\""},
      {R"({"rope_scaling": {"type": "dynamic", "factor": 2.0}})", "rope_type = \"dynamic\""},
      {R"({"rope_scaling": {"type": "linear"}})", "has no factor"},
      {R"({"rope_parameters": {"rope_type": "yarn", "beta_slow": 33}})", "beta_slow = 33"},
      {R"({"rope_parameters": {"rope_type": "yarn", "attention_factor": 0}})", "attention_factor = 0"},
      {R"({"rope_parameters": {"rope_type": "yarn", "truncate": 1}})", "truncate: expected true or false"},
      {R"({"rope_parameters": {"rope_type": "yarn", "truncate": false}})", "truncate = false"},
      {R"({"original_max_position_embeddings": 8})", "original_max_position_embeddings"},
      {R"({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}})", "low_freq_factor"},
      {R"({"rope_parameters": {"low_freq_factor": 4.0}})", "low_freq_factor = 4"},
      {R"({"partial_rotary_factor": 0.5})", "partial_rotary_factor = 0.5"},
      {R"({"hidden_size": 33})", "model.d_model = 33"},
      {R"({"hidden_size": null})", "has no hidden_size"},
      {R"({"hidden_size": "32"})", "hidden_size: expected an integer"},
      {R"({"num_key_value_heads": 3})", "num_kv_heads = 3"},
      {R"({"head_dim": 5})", "model.head_dim = 5"},
      {R"({"vocab_size": -1})", "vocab_size"},
      {R"({"tie_word_embeddings": "no"})", "tie_word_embeddings: expected true or false"},
      {R"({"rms_norm_eps": 0})", "model.norm_eps"},
  };
  for (const auto& c : cases) {
    CAPTURE(c.patch);
    nlohmann::json config = base;
    config.merge_patch(nlohmann::json::parse(c.patch));
    if (nlohmann::json::parse(c.patch).contains("hidden_size") && c.says == std::string("has no hidden_size")) {
      config["hidden_size"] = nullptr;
    }
    std::string message;
    try {
      parse_huggingface_config(config, "here/config.json");
    } catch (const Error& error) {
      CHECK(error.code() == ExitCode::kBadInput);
      message = error.what();
    }
    CHECK(message.starts_with("here/config.json: "));
    CHECK(message.find(c.says) != std::string::npos);
  }
}

TEST_CASE("config.json of transformers 4 means the same as that of transformers 5", "[engine][huggingface]") {
  auto config = nlohmann::json::parse(read_file(kFixtures + "llama3_gqa/config.json"));
  const HuggingFaceModel now = parse_huggingface_config(config, "test");
  config["rope_scaling"] = config["rope_parameters"];
  config["rope_scaling"].erase("rope_theta");
  config["rope_theta"] = config["rope_parameters"]["rope_theta"];
  config.erase("rope_parameters");
  CHECK(parse_huggingface_config(config, "test").model == now.model);
  config["rope_theta"] = 500000;
  config["rope_scaling"] = nullptr;
  const ModelConfig plain = parse_huggingface_config(config, "test").model;
  CHECK(plain.rope_theta == 500000);
  CHECK(plain.rope_scaling.kind == RopeScalingKind::kNone);
  // An empty one counts as absent.
  config = nlohmann::json::parse(read_file(kFixtures + "llama3_gqa/config.json"));
  config["rope_scaling"] = nlohmann::json::object();
  CHECK(parse_huggingface_config(config, "test").model == now.model);
}

TEST_CASE("rope_type yarn says all that transformers reads", "[engine][huggingface]") {
  auto config = nlohmann::json::parse(read_file(kFixtures + "llama_yarn/config.json"));
  const auto read = [&](const char* patch) {
    nlohmann::json changed = config;
    changed["rope_parameters"].merge_patch(nlohmann::json::parse(patch));
    return parse_huggingface_config(changed, "test").model.rope_scaling;
  };
  RopeScalingConfig want;
  want.kind = RopeScalingKind::kYarn;
  want.factor = 4;
  want.original_length = 16;
  CHECK(read("{}") == want);
  CHECK(read(R"({"beta_fast": 0, "beta_slow": null})") == want);
  CHECK(read(R"({"original_max_position_embeddings": null})").original_length == 64);  // max_position_embeddings
  CHECK(read(R"({"mscale": 0.5})") == want);
  CHECK(std::abs(read(R"({"mscale": 0.5, "mscale_all_dim": 2})").attention_factor -
                 (0.05 * std::log(4.0) + 1) / (0.2 * std::log(4.0) + 1)) < 1e-15);
  want.attention_factor = 1.25;
  CHECK(read(R"({"beta_fast": 32, "beta_slow": 1, "attention_factor": 1.25, "truncate": true, "mscale": 3})") ==
        want);
}

TEST_CASE("scalings and windows are written so that they are read back", "[engine][huggingface]") {
  ModelConfig model = {.vocab_size = 300, .d_model = 64, .num_layers = 3, .num_heads = 8, .d_ffn = 96};
  model.num_kv_heads = 2;
  model.norm = NormKind::kRmsNorm;
  model.tie_embeddings = false;
  model.init = InitKind::kNormal;
  const auto written_as = [&](const char* family_name) {
    const HuggingFaceFamily& family = choose_family(model, "", nullptr, "here");
    CHECK(family.model_type == family_name);
    const auto json = nlohmann::json::parse(make_huggingface_config({&family, model, 777}, DType::kBF16, nullptr));
    CHECK(parse_huggingface_config(json, "test").model == model);
    return json;
  };
  model.rope_scaling.kind = RopeScalingKind::kLinear;
  model.rope_scaling.factor = 2.5;
  CHECK(written_as("llama").at("rope_scaling") == nlohmann::json{{"factor", 2.5}, {"rope_type", "linear"}});
  model.rope_scaling.kind = RopeScalingKind::kYarn;
  CHECK(written_as("llama").at("rope_scaling").size() == 5);
  model.rope_scaling.attention_factor = 1.5;
  CHECK(written_as("llama").at("rope_scaling").at("attention_factor") == 1.5);
  model.rope_scaling = {};
  model.sliding_window = 12;
  CHECK(written_as("mistral").at("sliding_window") == 12);
  const auto family_of = [&](const char* name) { return *find_family(name, huggingface_families()); };
  CHECK(family_problems(family_of("llama"), model) == std::vector<std::string>{"model.sliding_window = 0, not 12"});
  model.full_attention_every = 2;
  CHECK(family_problems(family_of("mistral"), model) ==
        std::vector<std::string>{"model.full_attention_every = 0, not 2"});
}

TEST_CASE("a Mistral config.json without a window is one of 4096, with null of none", "[engine][huggingface]") {
  auto config = nlohmann::json::parse(read_file(kFixtures + "mistral_window/config.json"));
  CHECK(parse_huggingface_config(config, "test").model.sliding_window == 7);
  config["sliding_window"] = nullptr;
  const HuggingFaceModel without = parse_huggingface_config(config, "test");
  CHECK(without.model.sliding_window == 0);
  CHECK(
      nlohmann::json::parse(make_huggingface_config(without, DType::kF32, nullptr)).at("sliding_window").is_null());
  config.erase("sliding_window");
  CHECK(parse_huggingface_config(config, "test").model.sliding_window == 4096);
  config["sliding_window"] = 0;
  CHECK(message_of([&] { parse_huggingface_config(config, "test"); }).find("sliding_window: expected") !=
        std::string::npos);
  // transformers scales the angles of all its layers.
  config["sliding_window"] = 7;
  config["rope_parameters"] = {{"rope_type", "linear"}, {"factor", 2}};
  CHECK(message_of([&] { parse_huggingface_config(config, "test"); }).find("model.rope_scaling.kind = linear") !=
        std::string::npos);
}

// What OLMo 3 needs of it, with Llama's layers.
TEST_CASE("layers of two types have windows and angles of their own", "[engine][huggingface]") {
  std::vector<HuggingFaceFamily> families = {*find_family("mistral", huggingface_families())};
  families[0].model_type = "two";
  families[0].rope_theta = 5e5;
  families[0].full_attention_every = 4;
  const auto yarn = nlohmann::json::parse(
      R"({"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192,
          "attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0})");
  nlohmann::json config = nlohmann::json::parse(read_file(kFixtures + "mistral_window/config.json"));
  config["model_type"] = "two";
  config["num_hidden_layers"] = 8;
  config.erase("rope_parameters");
  const auto read = [&] { return parse_huggingface_config(config, "here", families).model; };
  const auto types = [&](const std::string& letters) {
    nlohmann::json list;
    for (const char letter : letters) list.push_back(letter == 'w' ? "sliding_attention" : "full_attention");
    return list;
  };
  const auto written = [&](const ModelConfig& model) {
    REQUIRE(family_problems(families[0], model).empty());
    return nlohmann::json::parse(make_huggingface_config({&families[0], model, 777}, DType::kBF16, nullptr));
  };

  CHECK((read().sliding_window == 7 && read().full_attention_every == 4 && read().local_rope_theta == 0));
  CHECK(read().rope_theta == 5e5);
  const std::pair<const char*, int64_t> lists[] = {
      {"wwwfwwwf", 4}, {"wfwfwfwf", 2}, {"wwwwwfww", 6}, {"wwwwwwww", 0}};
  for (const auto& [letters, every] : lists) {
    config["layer_types"] = types(letters);
    CHECK(read().full_attention_every == every);
    CHECK(written(read()).at("layer_types") == config["layer_types"]);
    CHECK(parse_huggingface_config(written(read()), "again", families).model == read());
  }
  config["layer_types"] = types("ffffffff");
  CHECK((read().full_attention_every == 0 && read().sliding_window == 0));
  CHECK(parse_huggingface_config(written(read()), "again", families).model == read());
  for (const char* letters : {"wwwfwwff", "fwwwfwww", "wwwf", "wwwfwwwfw"}) {
    config["layer_types"] = types(letters);
    CHECK(message_of(read).find("layer_types is not supported") != std::string::npos);
  }
  config["layer_types"] = types("wwwfwwwf");
  config["sliding_window"] = nullptr;
  CHECK(message_of(read).find("sliding_window is null") != std::string::npos);
  config["sliding_window"] = 7;

  // As transformers 4 writes it: of layers with full attention.
  config["rope_theta"] = 1e4;
  config["rope_scaling"] = yarn;
  const ModelConfig scaled = read();
  CHECK((scaled.rope_theta == 1e4 && scaled.local_rope_theta == 0));
  CHECK(scaled.rope_scaling.kind == RopeScalingKind::kYarn);
  CHECK((scaled.has_windowed_rotations() && scaled.windowed_rope_theta() == 1e4));
  // As 5 does.
  config.erase("rope_theta");
  config.erase("rope_scaling");
  config["rope_parameters"] = {{"full_attention", yarn}, {"sliding_attention", {{"rope_type", "default"}}}};
  config["rope_parameters"]["full_attention"]["rope_theta"] = 1e4;
  config["rope_parameters"]["sliding_attention"]["rope_theta"] = 1e4;
  CHECK(read() == scaled);
  CHECK(parse_huggingface_config(written(scaled), "again", families).model == scaled);
  config["rope_parameters"]["sliding_attention"]["rope_theta"] = 500;
  CHECK(read().local_rope_theta == 500);
  CHECK(written(read()).at("rope_parameters").at("sliding_attention").at("rope_theta") == 500);
  CHECK(parse_huggingface_config(written(read()), "again", families).model == read());
  config["rope_parameters"]["sliding_attention"] = yarn;
  CHECK(message_of(read).find("sliding_attention: rope_type = \"yarn\" is not supported") != std::string::npos);
  config["rope_parameters"]["sliding_attention"] = 5;
  CHECK(message_of(read).find("expected an object") != std::string::npos);
  config["rope_parameters"] = yarn;  // of no type: transformers 5 scales neither
  CHECK(message_of(read).find("has neither full_attention nor sliding_attention") != std::string::npos);
}
