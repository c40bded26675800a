// Keys that do not go together.
#include <cmath>
#include <regex>
#include <sstream>
#include <string>

#include "engine/config/config_io.h"
#include "tests/support/catch.h"
#include "tests/support/refusal.h"

using namespace parka;
using parka::test::refusal;

namespace {

Config small_config() {
  Config c;
  c.model = {.vocab_size = 272, .d_model = 128, .num_layers = 2, .num_heads = 4, .d_ffn = 256};
  c.data.sequence_length = 64;
  c.data.eval = {"eval.npy"};
  return c;
}

using Change = void (*)(Config&);

// That a config which is fine is refused after a change, in one line with these keys.
void check_refused(Config c, Change change, const std::string& keys) {
  CHECK_NOTHROW(validate(c));
  change(c);
  const std::string message = refusal([&] { validate(c); });
  CAPTURE(message, keys);
  std::istringstream words(keys);
  for (std::string key; words >> key;) CHECK(message.find(key) != std::string::npos);
  CHECK(message.find('\n') == std::string::npos);
}

}  // namespace

TEST_CASE("heads of a given width need not divide the model's", "[engine][config]") {
  Config c = small_config();
  c.model.num_heads = 3;
  c.model.given_head_dim = 16;
  CHECK_NOTHROW(validate(c));
}

TEST_CASE("combinations that cannot work are refused", "[engine][config]") {
  const auto [change, keys] = GENERATE(table<Change, std::string>({
      {[](Config& c) { c.model.num_heads = 3; }, "model.d_model model.num_heads"},
      {[](Config& c) { c.model.num_heads = 128; }, "model.d_model model.num_heads"},
      {[](Config& c) { c.model.given_head_dim = 7; }, "model.head_dim"},
      {[](Config& c) {
         c.model.rope_scaling.kind = RopeScalingKind::kYarn;
         c.model.rope_theta = 1;
       },
       "model.rope_theta"},
      {[](Config& c) { c.model.norm_unit_offset = true; }, "model.norm_unit_offset"},
      {[](Config& c) {
         c.optimizer.release_gradients = true;
         c.training.non_finite = NonFinitePolicy::kSkip;
       },
       "optimizer.release_gradients training.non_finite"},
      {[](Config& c) {
         c.optimizer.release_gradients = true;
         c.training.spike_window = 128;
       },
       "optimizer.release_gradients training.spike_window"},
      {[](Config& c) { c.model.full_attention_every = 2; }, "model.full_attention_every model.sliding_window"},
      {[](Config& c) { c.model.local_rope_theta = 100; }, "model.local_rope_theta model.sliding_window"},
      {[](Config& c) { c.model.local_rope_theta = 0.5; }, "model.local_rope_theta"},
      {[](Config& c) {
         c.model.sliding_window = 8;
         c.model.full_attention_every = 1;
       },
       "model.full_attention_every model.sliding_window"},
      {[](Config& c) {
         c.model.sliding_window = 8;
         c.model.full_attention_every = c.model.num_layers + 1;
       },
       "model.full_attention_every"},
      {[](Config& c) {
         c.model.sliding_window = 8;
         c.model.local_rope_theta = 100;
       },
       "model.local_rope_theta"},
      {[](Config& c) {
         c.model.sliding_window = 8;
         c.model.rope_scaling.kind = RopeScalingKind::kLinear;
       },
       "model.rope_scaling.kind"},
      {[](Config& c) { c.model.num_kv_heads = 3; }, "model.num_kv_heads model.num_heads"},
      {[](Config& c) { c.model.num_kv_heads = 8; }, "model.num_kv_heads model.num_heads"},
      {[](Config& c) {
         c.model.d_model = c.model.num_heads = c.model.given_head_dim = kMaxDimension - 1;
         c.model.vocab_size = 1;
       },
       "model.num_heads model.num_kv_heads"},
      {[](Config& c) { c.model.d_model = int64_t{1} << 28; }, "blocks.0.qkv"},
      {[](Config& c) {
         c.model.d_model = 1 << 14;
         c.model.d_ffn = 1 << 16;
         c.model.num_layers = 10000;
       },
       "blocks.2328.up_gate"},
      {[](Config& c) {
         c.data.sequence_length = kMaxDimension;
         c.training.micro_batch_size = 1024;
       },
       "training.micro_batch_size data.sequence_length"},
      {[](Config& c) { c.data.sequence_length = 1 << 29; }, "data.sequence_length model.num_heads"},
      {[](Config& c) {
         c.data.sequence_length = 1 << 24;
         c.training.micro_batch_size = 1 << 10;
       },
       "data.sequence_length"},
      {[](Config& c) {
         c.data.sequence_length = kMaxDimension;
         c.training.micro_batch_size = 1;
       },
       "training.micro_batch_size"},
      {[](Config& c) { c.training.steps = kMaxExactInteger; }, "training.steps training.global_batch_size"},
      {[](Config& c) {
         apply_recipe(Recipe::kFp8Linear, c);
         c.model.d_ffn = 200;
       },
       "precision.gemm model.d_ffn"},
      {[](Config& c) {
         apply_recipe(Recipe::kFp8Block, c);
         c.model.d_model = 120;
       },
       "precision.gemm model.d_model"},
      {[](Config& c) {
         apply_recipe(Recipe::kFp8Linear, c);
         c.model.num_heads = 32;
         c.model.num_kv_heads = 1;
       },
       "model.num_kv_heads 16"},
      {[](Config& c) {
         apply_recipe(Recipe::kFp8Linear, c);
         c.data.sequence_length = 31;
       },
       "training.micro_batch_size data.sequence_length"},
      {[](Config& c) {
         apply_recipe(Recipe::kCoat, c);
         c.precision.group_size = 128;
         c.model.d_ffn = 192;
       },
       "precision.up_gate model.d_ffn precision.group_size"},
      {[](Config& c) {
         apply_recipe(Recipe::kCoat, c);
         c.precision.group_size = 128;
         c.model.d_model = 192;
       },
       "precision.norm_input model.d_model"},
      {[](Config& c) {
         apply_recipe(Recipe::kParka, c);
         c.precision.group_size = 64;
       },
       "precision.qkv model.d_model model.num_heads"},
      {[](Config& c) { c.precision.save_silu = true; }, "precision.save_silu precision.up_gate"},
      {[](Config& c) { c.finetune.rank = 3; }, "finetune.rank finetune.method"},
      {[](Config& c) { c.finetune.alpha = 3; }, "finetune.alpha finetune.method"},
      {[](Config& c) {
         c.finetune.method = FinetuneMethod::kLora;
         c.finetune.alpha = 0;
       },
       "finetune.alpha"},
      {[](Config& c) {
         c.finetune.method = FinetuneMethod::kQst;
         c.finetune.targets = {"q_proj"};
       },
       "finetune.targets finetune.method"},
      {[](Config& c) {
         c.finetune.method = FinetuneMethod::kLora;
         c.finetune.mix = SideMix::kPaper;
       },
       "finetune.mix finetune.method"},
      {[](Config& c) {
         apply_recipe(Recipe::kBf16, c);
         c.precision.head = Storage::kFp8;
       },
       "precision.head precision.gemm"},
      {[](Config& c) {
         apply_recipe(Recipe::kParka, c);
         c.precision.head = Storage::kFp8;
         c.training.logits_chunk_tokens = 1000;
       },
       "precision.head training.logits_chunk_tokens"},
      {[](Config& c) {
         apply_recipe(Recipe::kParka, c);
         c.precision.tower = Storage::kFp8;
       },
       "precision.tower model.vision.tower"},
      {[](Config& c) { c.precision.forward_format = DType::kI8; }, "precision.forward_format precision.gemm"},
      {[](Config& c) {
         apply_recipe(Recipe::kCoat, c);
         c.precision.forward_format = DType::kI8;
         c.precision.compute = DType::kF32;
         c.optimizer.master = MasterForm::kNone;
       },
       "precision.forward_format precision.compute"},
      {[](Config& c) {
         apply_recipe(Recipe::kCoat, c);
         c.precision.forward_format = DType::kI8;
         c.distributed.zero_stage = 3;
       },
       "precision.forward_format distributed.zero_stage"},
      {[](Config& c) { c.precision.compute = DType::kF32; }, "optimizer.master precision.compute"},
      {[](Config& c) { c.optimizer.master = MasterForm::kNone; }, "optimizer.master precision.compute"},
      {[](Config& c) {
         apply_recipe(Recipe::kFp32, c);
         c.precision.eval = EvalNumerics::kBf16;
       },
       "precision.eval precision.compute"},
      {[](Config& c) { c.precision.offload_weights = true; }, "precision.offload_weights optimizer.offload"},
      {[](Config& c) {
         apply_recipe(Recipe::kParka, c);
         c.optimizer.offload = c.precision.offload_weights = true;
         c.precision.eval = EvalNumerics::kBf16;
       },
       "precision.eval precision.offload_weights"},
      {[](Config& c) {
         apply_recipe(Recipe::kParka, c);
         c.optimizer.offload = c.precision.offload_weights = true;
         c.precision.weight_copies = WeightCopies::kNone;
         c.telemetry.interval = 10;
       },
       "telemetry.interval precision.weight_copies"},
      {[](Config& c) { c.optimizer.schedule.decay_steps = 1; }, "optimizer.schedule.decay_steps"},
      {[](Config& c) { c.optimizer.schedule.warmup_steps = 1001; },
       "optimizer.schedule.warmup_steps training.steps"},
      {[](Config& c) {
         c.optimizer.schedule.warmup_steps = 51;
         c.optimizer.schedule.total_steps = 50;
       },
       "optimizer.schedule.warmup_steps optimizer.schedule.total_steps"},
      {[](Config& c) {
         c.optimizer.schedule = {
             .kind = ScheduleKind::kWsd, .warmup_steps = 10, .total_steps = 50, .decay_steps = 41};
       },
       "optimizer.schedule.warmup_steps decay_steps"},
      {[](Config& c) { c.training.global_batch_size = 6; }, "training.global_batch_size training.micro_batch_size"},
      {[](Config& c) {
         c.training.eval_interval = 10;
         c.data.eval.clear();
       },
       "training.eval_interval data.eval evaluation.sets evaluation.tasks"},
      {[](Config& c) {
         c.evaluation.sets = {"a=b.npy", "c.npy"};
       },
       "evaluation.sets"},
      {[](Config& c) { c.evaluation.sets = {"=b.npy"}; }, "evaluation.sets"},
      {[](Config& c) { c.evaluation.sets = {"b="}; }, "evaluation.sets"},
      {[](Config& c) { c.distributed.shard_size = 8; }, "distributed.shard_size distributed.zero_stage"},
      {[](Config& c) { c.distributed.context_parallel = 3; }, "distributed.context_parallel data.sequence_length"},
      {[](Config& c) { c.distributed.context_parallel = 8; }, "distributed.context_parallel model.num_heads"},
      {[](Config& c) {
         c.distributed.context_parallel = 4;
         c.model.num_kv_heads = 2;
       },
       "distributed.context_parallel model.num_kv_heads"},
      {[](Config& c) {
         apply_recipe(Recipe::kParka, c);
         c.distributed.context_parallel = 2;
         c.data.sequence_length = 16;
         c.training.micro_batch_size = 1;
       },
       "precision.gemm distributed.context_parallel"},
      {[](Config& c) {
         c.distributed.context_parallel = 2;
         c.evaluation.tasks = {"a.jsonl"};
       },
       "distributed.context_parallel evaluation.tasks"},
      {[](Config& c) {
         c.distributed.context_parallel = 2;
         c.finetune.method = FinetuneMethod::kQst;
       },
       "distributed.context_parallel finetune.method"},
      {[](Config& c) {
         c.distributed.context_parallel = 2;
         c.finetune.method = FinetuneMethod::kLora;
         c.finetune.dropout = 0.1;
       },
       "distributed.context_parallel finetune.dropout"},
      {[](Config& c) {
         c.data.documents = DocumentMode::kSeparate;
         c.data.document_end = c.model.vocab_size;
       },
       "data.document_end model.vocab_size"},
      {[](Config& c) { c.optimizer.lr = std::nan(""); }, "optimizer.lr"},
      {[](Config& c) { c.model.num_heads = 0; }, "model.num_heads"},
      {[](Config& c) { c.data.train = {""}; }, "data.train"},
  }));
  Config c = small_config();
  check_refused(c, change, keys);
}

TEST_CASE("combinations of a model with a tower that cannot work are refused", "[engine][config][vision]") {
  const auto [change, keys] = GENERATE(table<Change, std::string>({
      {[](Config& c) { c.model.vision.tower.kind = TowerKind::kNone; }, "model.vision.tower"},
      {[](Config& c) { c.model.vision = {}; }, "data.images_per_sequence"},
      {[](Config& c) { c.data.images_per_sequence = 0; }, "data.images_per_sequence"},
      {[](Config& c) { c.model.vision.image_token = -1; }, "model.vision.image_token"},
      {[](Config& c) { c.model.vision.image_token = c.model.vocab_size; },
       "model.vision.image_token model.vocab_size"},
      {[](Config& c) { c.model.vision.tower.num_heads = 3; }, "model.vision.width"},
      {[](Config& c) { c.model.vision.tower.patch_size = 29; }, "model.vision.patch_size"},
      {[](Config& c) { c.model.vision.tower.feature_layer = -4; }, "-4"},
      {[](Config& c) { c.model.vision.tower.pixel_mean = {0.5}; }, "model.vision.pixel_mean"},
      {[](Config& c) {
         c.model.vision.tower.kind = TowerKind::kSiglip;
         c.model.vision.tower.keeps_class_token = true;
       },
       "model.vision.keep_class_token"},
      {[](Config& c) {
         c.model.vision.projector.kind = ProjectorKind::kMlpDownsample;
         c.model.vision.tower.keeps_class_token = true;
       },
       "square"},
      {[](Config& c) { c.model.vision.projector.column_major = true; }, "model.vision.column_major"},
      {[](Config& c) { c.finetune.method = FinetuneMethod::kLora; }, "finetune.method model.vision.tower"},
      {[](Config& c) { c.distributed.context_parallel = 2; }, "model.vision.tower distributed.context_parallel"},
      {[](Config& c) { c.precision.tower = Storage::kFp8; }, "precision.tower precision.gemm"},
      {[](Config& c) {
         apply_recipe(Recipe::kFp8Linear, c);
         c.precision.tower = Storage::kFp8;
         c.model.vision.tower.width = 40;
       },
       "precision.tower model.vision.width"},
      {[](Config& c) {
         apply_recipe(Recipe::kFp8Block, c);
         c.precision.tower = Storage::kFp8;
         c.model.vision.tower.d_ffn = 72;
       },
       "precision.tower model.vision.d_ffn"},
      {[](Config& c) {
         apply_recipe(Recipe::kParka, c);
         c.precision.group_size = 32;
         c.precision.tower = Storage::kFp8;
         c.model.vision.tower.width = 48;
       },
       "precision.tower model.vision.width precision.group_size"},
      {[](Config& c) {
         apply_recipe(Recipe::kCoat, c);
         c.precision.group_size = 32;
         c.precision.tower = Storage::kFp8;
         c.model.vision.tower.d_ffn = 80;
       },
       "precision.tower model.vision.d_ffn precision.group_size"},
      {[](Config& c) {
         apply_recipe(Recipe::kParka, c);
         c.precision.tower = Storage::kFp8;
         c.model.vision.tower.patch_size = 1;
         c.training.micro_batch_size = c.training.global_batch_size = 5344;  // of two images of 785 rows
       },
       "data.images_per_sequence"},
  }));
  Config c = small_config();
  c.model.vision.tower = {.kind = TowerKind::kClip,
                          .width = 32,
                          .num_layers = 3,
                          .num_heads = 2,
                          .d_ffn = 64,
                          .image_size = 28,
                          .patch_size = 7};
  c.model.vision.image_token = 5;
  c.data.images_per_sequence = 2;
  check_refused(c, change, keys);
}

TEST_CASE("all blocks of a model but two can be offloaded", "[engine][config]") {
  const auto problem = [](int64_t layers, int64_t blocks) {
    Config c = small_config();
    c.model.num_layers = layers;
    c.precision.offload_blocks = blocks;
    return refusal([&] { validate(c); });
  };
  for (const int64_t layers : {1, 2, 3, 6}) {
    const int64_t most = std::max<int64_t>(layers - 2, 0);
    for (const int64_t blocks : {int64_t{0}, most}) CHECK(problem(layers, blocks).empty());
    for (const int64_t blocks : {int64_t{-1}, most + 1, layers, kMaxExactInteger}) {
      const std::string message = problem(layers, blocks);
      CAPTURE(message, layers, blocks);
      CHECK(message.find("precision.offload_blocks") != std::string::npos);
      if (layers > 2 && most < blocks && blocks <= layers) {
        CHECK(std::regex_search(message, std::regex(fmt::format("\\b{}\\b", most))));
      }
    }
  }
}

TEST_CASE("matrices of more rows than a GPU makes FP8 codes of are refused, and no smaller ones",
          "[engine][config]") {
  // A GPU has tiles of 128 rows, of which 65535 fit below one another.
  const auto problem = [](Recipe recipe, Change change) {
    Config c = small_config();
    apply_recipe(recipe, c);
    c.data.sequence_length = 128;
    c.training.micro_batch_size = 1;
    change(c);
    c.training.global_batch_size = c.training.micro_batch_size;
    return refusal([&] { validate(c); });
  };
  const Change most = [](Config& c) { c.training.micro_batch_size = 65535; };
  const Change more = [](Config& c) { c.training.micro_batch_size = 65536; };
  const Change shared = [](Config& c) {
    c.training.micro_batch_size = 65536;
    c.distributed.context_parallel = 2;
  };
  for (const Recipe recipe : {Recipe::kFp8Linear, Recipe::kFp8Block, Recipe::kCoat, Recipe::kParka}) {
    CAPTURE(name_of(recipe));
    CHECK(problem(recipe, most) == "");
    CHECK(problem(recipe, shared) == "");
    CHECK(problem(recipe, more).starts_with("training.micro_batch_size * data.sequence_length = 8388608"));
  }
  CHECK(problem(Recipe::kBf16, more) == "");
  CHECK(problem(Recipe::kBf16, [](Config& c) { c.model.vocab_size = 8388608; }) == "");
  CHECK(problem(Recipe::kParka, [](Config& c) { c.model.vocab_size = 8388480; }) == "");
  CHECK(
      problem(Recipe::kParka, [](Config& c) { c.model.vocab_size = 8388608; }).starts_with("model.vocab_size = "));
  CHECK(problem(Recipe::kParka, [](Config& c) { c.model.d_ffn = 4194240; }) == "");
  CHECK(
      problem(Recipe::kParka, [](Config& c) { c.model.d_ffn = 4194304; }).starts_with("2 * model.d_ffn = 8388608"));
  CHECK(problem(Recipe::kParka, [](Config& c) {
          c.model.num_heads = c.model.given_head_dim = 2048;
        }).starts_with("(model.num_heads + 2 * model.num_kv_heads) * head_dim = 12582912"));
}

TEST_CASE("fp32 compute with FP8 storage is a valid study", "[engine][config]") {
  Config c = small_config();
  apply_recipe(Recipe::kCoat, c);
  c.precision.compute = DType::kF32;
  c.optimizer.master = MasterForm::kNone;
  CHECK_NOTHROW(validate(c));
}
