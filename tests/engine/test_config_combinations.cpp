// Keys that do not go together.
#include <cmath>
#include <regex>
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

// That a config which is fine is refused after a change, in one line with these words.
void check_refused(Config c, Change change, const std::string& want) {
  CHECK_NOTHROW(validate(c));
  change(c);
  const std::string message = refusal([&] { validate(c); });
  CAPTURE(message, want);
  CHECK(message.find(want) != std::string::npos);
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
  const auto [change, want] = GENERATE(table<Change, std::string>({
      {[](Config& c) { c.model.num_heads = 3; }, "model.d_model = 128 is not a multiple of model.num_heads = 3"},
      {[](Config& c) { c.model.num_heads = 128; }, "model.d_model / model.num_heads = 1 is odd"},
      {[](Config& c) { c.model.given_head_dim = 7; }, "model.head_dim = 7 is odd"},
      {[](Config& c) {
         c.model.rope_scaling.kind = RopeScalingKind::kYarn;
         c.model.rope_theta = 1;
       },
       "model.rope_theta = 1 to be more than 1"},
      {[](Config& c) { c.model.norm_unit_offset = true; },
       "model.norm_unit_offset = true has no meaning where norms have no weights"},
      {[](Config& c) {
         c.optimizer.release_gradients = true;
         c.training.non_finite = NonFinitePolicy::kSkip;
       },
       "optimizer.release_gradients = true cannot skip a step of which a part is done: set training.non_finite = stop"},
      {[](Config& c) {
         c.optimizer.release_gradients = true;
         c.training.spike_window = 128;
       },
       "optimizer.release_gradients = true cannot skip a spike, whose gradient norm is known when its step is done: "
       "set training.spike_window = 0, not 128"},
      {[](Config& c) { c.model.full_attention_every = 2; },
       "model.full_attention_every = 2 has no meaning without model.sliding_window"},
      {[](Config& c) { c.model.local_rope_theta = 100; },
       "model.local_rope_theta = 100 has no meaning without model.sliding_window"},
      {[](Config& c) { c.model.local_rope_theta = 0.5; }, "model.local_rope_theta = 0.5 is less than 1"},
      {[](Config& c) {
         c.model.sliding_window = 8;
         c.model.full_attention_every = 1;
       },
       "model.full_attention_every = 1 leaves no block to model.sliding_window"},
      {[](Config& c) {
         c.model.sliding_window = 8;
         c.model.full_attention_every = c.model.num_layers + 1;
       },
       "so no block has full attention; set it to 0"},
      {[](Config& c) {
         c.model.sliding_window = 8;
         c.model.local_rope_theta = 100;
       },
       "model.local_rope_theta = 100 has no meaning where all blocks have a window"},
      {[](Config& c) {
         c.model.sliding_window = 8;
         c.model.rope_scaling.kind = RopeScalingKind::kLinear;
       },
       "model.rope_scaling.kind = linear scales no block where all have a window"},
      {[](Config& c) { c.model.num_kv_heads = 3; }, "model.num_kv_heads = 3 does not divide model.num_heads = 4"},
      {[](Config& c) { c.model.num_kv_heads = 8; }, "model.num_kv_heads = 8 does not divide model.num_heads = 4"},
      {[](Config& c) {
         c.model.d_model = c.model.num_heads = c.model.given_head_dim = kMaxDimension - 1;
         c.model.vocab_size = 1;
       },
       "model.num_kv_heads = 6442450938 heads of model.head_dim = 2147483646 are more than 2147483647 columns"},
      {[](Config& c) { c.model.d_model = int64_t{1} << 28; },
       "the model has 2.16e+17 parameters up to blocks.0.qkv, more than 1e+13"},
      {[](Config& c) {
         c.model.d_model = 1 << 14;
         c.model.d_ffn = 1 << 16;
         c.model.num_layers = 10000;
       },
       "the model has 1e+13 parameters up to blocks.2328.up_gate, more than 1e+13"},
      {[](Config& c) {
         c.data.sequence_length = kMaxDimension;
         c.training.micro_batch_size = 1024;
       },
       "an activation of"},
      {[](Config& c) { c.data.sequence_length = 1 << 29; }, "attention scores"},
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
      {[](Config& c) { c.training.steps = kMaxExactInteger; }, "training.steps x global_batch_size"},
      {[](Config& c) {
         apply_recipe(Recipe::kFp8Linear, c);
         c.model.d_ffn = 200;
       },
       "precision.gemm = fp8_tensor needs model.d_ffn = 200 to be a multiple of 16"},
      {[](Config& c) {
         apply_recipe(Recipe::kFp8Block, c);
         c.model.d_model = 120;
       },
       "precision.gemm = fp8_block needs model.d_model = 120 to be a multiple of 16"},
      {[](Config& c) {
         apply_recipe(Recipe::kFp8Linear, c);
         c.model.num_heads = 32;
         c.model.num_kv_heads = 1;
       },
       "d_model / num_heads = 136 to be a multiple of 16"},
      {[](Config& c) {
         apply_recipe(Recipe::kFp8Linear, c);
         c.data.sequence_length = 31;
       },
       "training.micro_batch_size * data.sequence_length = 124 to be a multiple of 16"},
      {[](Config& c) {
         apply_recipe(Recipe::kCoat, c);
         c.precision.group_size = 128;
         c.model.d_ffn = 192;
       },
       "precision.up_gate = fp8 needs model.d_ffn = 192 to be a multiple of precision.group_size = 128"},
      {[](Config& c) {
         apply_recipe(Recipe::kCoat, c);
         c.precision.group_size = 128;
         c.model.d_model = 192;
       },
       "precision.norm_input = fp8 needs model.d_model = 192"},
      {[](Config& c) {
         apply_recipe(Recipe::kParka, c);
         c.precision.group_size = 64;
       },
       "precision.qkv = fp8 needs model.d_model / model.num_heads = 32"},
      {[](Config& c) { c.precision.save_silu = true; }, "precision.save_silu = true needs precision.up_gate = fp8"},
      {[](Config& c) { c.finetune.rank = 3; }, "finetune.rank has no meaning with finetune.method = full"},
      {[](Config& c) { c.finetune.alpha = 3; }, "finetune.alpha has no meaning with finetune.method = full"},
      {[](Config& c) {
         c.finetune.method = FinetuneMethod::kLora;
         c.finetune.alpha = 0;
       },
       "finetune.alpha = 0 multiplies adapters and their gradients by 0, so that nothing is trained; give more"},
      {[](Config& c) {
         c.finetune.method = FinetuneMethod::kQst;
         c.finetune.targets = {"q_proj"};
       },
       "finetune.targets has no meaning with finetune.method = qst"},
      {[](Config& c) {
         c.finetune.method = FinetuneMethod::kLora;
         c.finetune.mix = SideMix::kPaper;
       },
       "finetune.mix has no meaning with finetune.method = lora"},
      {[](Config& c) {
         apply_recipe(Recipe::kBf16, c);
         c.precision.head = Storage::kFp8;
       },
       "precision.head = fp8 needs precision.gemm = fp8_tensor or fp8_block"},
      {[](Config& c) {
         apply_recipe(Recipe::kParka, c);
         c.precision.head = Storage::kFp8;
         c.training.logits_chunk_tokens = 1000;
       },
       "precision.head = fp8 needs training.logits_chunk_tokens = 1000 to be a multiple of 16"},
      {[](Config& c) {
         apply_recipe(Recipe::kParka, c);
         c.precision.tower = Storage::kFp8;
       },
       "precision.tower = fp8 needs a tower"},
      {[](Config& c) { c.precision.compute = DType::kF32; },
       "precision.compute = fp32 needs optimizer.master = none, not fp32"},
      {[](Config& c) { c.optimizer.master = MasterForm::kNone; },
       "optimizer.master = none needs precision.compute = fp32"},
      {[](Config& c) {
         apply_recipe(Recipe::kFp32, c);
         c.precision.eval = EvalNumerics::kBf16;
       },
       "precision.eval = bf16 needs precision.compute = bf16"},
      {[](Config& c) { c.precision.offload_weights = true; },
       "precision.offload_weights = true needs optimizer.offload = true"},
      {[](Config& c) {
         apply_recipe(Recipe::kParka, c);
         c.optimizer.offload = c.precision.offload_weights = true;
         c.precision.eval = EvalNumerics::kBf16;
       },
       "precision.offload_weights = true keeps FP8 copies alone on the GPU, which precision.eval = bf16 cannot use"},
      {[](Config& c) {
         apply_recipe(Recipe::kParka, c);
         c.optimizer.offload = c.precision.offload_weights = true;
         c.precision.weight_copies = WeightCopies::kNone;
         c.telemetry.interval = 10;
       },
       "telemetry.interval = 10 needs FP8 copies of weights that are in host memory"},
      {[](Config& c) { c.optimizer.schedule.decay_steps = 1; },
       "decay_steps = 1 has no meaning with kind = cosine"},
      {[](Config& c) { c.optimizer.schedule.warmup_steps = 1001; },
       "optimizer.schedule.warmup_steps = 1001 is more than training.steps = 1000"},
      {[](Config& c) {
         c.optimizer.schedule.warmup_steps = 51;
         c.optimizer.schedule.total_steps = 50;
       },
       "optimizer.schedule.warmup_steps = 51 is more than optimizer.schedule.total_steps = 50"},
      {[](Config& c) {
         c.optimizer.schedule = {
             .kind = ScheduleKind::kWsd, .warmup_steps = 10, .total_steps = 50, .decay_steps = 41};
       },
       "optimizer.schedule.warmup_steps + decay_steps = 51 is more than"},
      {[](Config& c) { c.training.global_batch_size = 6; },
       "training.global_batch_size = 6 is not a multiple of training.micro_batch_size = 4"},
      {[](Config& c) {
         c.training.eval_interval = 10;
         c.data.eval.clear();
       },
       "training.eval_interval = 10 but data.eval, evaluation.sets and evaluation.tasks list no files"},
      {[](Config& c) {
         c.evaluation.sets = {"a=b.npy", "c.npy"};
       },
       "evaluation.sets: \"c.npy\" is not of the form NAME=FILE"},
      {[](Config& c) { c.evaluation.sets = {"=b.npy"}; }, "evaluation.sets: \"=b.npy\" is not of the form"},
      {[](Config& c) { c.evaluation.sets = {"b="}; }, "evaluation.sets: \"b=\" is not of the form"},
      {[](Config& c) { c.optimizer.lr = std::nan(""); }, "optimizer.lr: nan is out of range"},
      {[](Config& c) { c.precision.compute = DType::kE4M3; }, "precision.compute: not valid; allowed: fp32, bf16"},
      {[](Config& c) { c.model.num_heads = 0; }, "model.num_heads: 0 is out of range"},
      {[](Config& c) { c.data.train = {""}; }, "data.train: must not be empty"},
  }));
  Config c = small_config();
  check_refused(c, change, want);
}

TEST_CASE("combinations of a model with a tower that cannot work are refused", "[engine][config][vision]") {
  const auto [change, want] = GENERATE(table<Change, std::string>({
      {[](Config& c) { c.model.vision.tower.kind = TowerKind::kNone; }, "model.vision.tower = none"},
      {[](Config& c) { c.model.vision = {}; }, "data.images_per_sequence = 2 has no meaning"},
      {[](Config& c) { c.data.images_per_sequence = 0; }, "needs data.images_per_sequence"},
      {[](Config& c) { c.model.vision.image_token = -1; }, "model.vision.image_token = -1"},
      {[](Config& c) { c.model.vision.image_token = c.model.vocab_size; }, "is not below model.vocab_size"},
      {[](Config& c) { c.model.vision.tower.num_heads = 3; }, "model.vision.width = 32 is not a multiple"},
      {[](Config& c) { c.model.vision.tower.patch_size = 29; }, "model.vision.patch_size = 29 is more than"},
      {[](Config& c) { c.model.vision.tower.feature_layer = -4; }, "has no hidden state -4"},
      {[](Config& c) { c.model.vision.tower.pixel_mean = {0.5}; }, "model.vision.pixel_mean has 1 numbers"},
      {[](Config& c) {
         c.model.vision.tower.kind = TowerKind::kSiglip;
         c.model.vision.tower.keeps_class_token = true;
       },
       "model.vision.keep_class_token = true needs tower = clip"},
      {[](Config& c) {
         c.model.vision.projector.kind = ProjectorKind::kMlpDownsample;
         c.model.vision.tower.keeps_class_token = true;
       },
       "takes a square grid of patches"},
      {[](Config& c) { c.model.vision.projector.column_major = true; }, "model.vision.column_major = true"},
      {[](Config& c) { c.finetune.method = FinetuneMethod::kLora; }, "finetune.method = lora does not go with"},
      {[](Config& c) { c.distributed.context_parallel = 2; },
       "model.vision.tower does not go with distributed.context_parallel = 2"},
      {[](Config& c) { c.precision.tower = Storage::kFp8; },
       "precision.tower = fp8 needs precision.gemm = fp8_tensor or fp8_block"},
      {[](Config& c) {
         apply_recipe(Recipe::kFp8Linear, c);
         c.precision.tower = Storage::kFp8;
         c.model.vision.tower.width = 40;
       },
       "precision.tower = fp8 needs model.vision.width = 40 to be a multiple of 16"},
      {[](Config& c) {
         apply_recipe(Recipe::kFp8Block, c);
         c.precision.tower = Storage::kFp8;
         c.model.vision.tower.d_ffn = 72;
       },
       "precision.tower = fp8 needs model.vision.d_ffn = 72 to be a multiple of 16"},
      {[](Config& c) {
         apply_recipe(Recipe::kParka, c);
         c.precision.group_size = 32;
         c.precision.tower = Storage::kFp8;
         c.model.vision.tower.width = 48;
       },
       "precision.tower = fp8 needs model.vision.width = 48 to be a multiple of precision.group_size = 32"},
      {[](Config& c) {
         apply_recipe(Recipe::kCoat, c);
         c.precision.group_size = 32;
         c.precision.tower = Storage::kFp8;
         c.model.vision.tower.d_ffn = 80;
       },
       "precision.tower = fp8 needs model.vision.d_ffn = 80 to be a multiple of precision.group_size = 32"},
      {[](Config& c) {
         apply_recipe(Recipe::kParka, c);
         c.precision.tower = Storage::kFp8;
         c.model.vision.tower.patch_size = 1;
         c.training.micro_batch_size = c.training.global_batch_size = 5344;  // of two images of 785 rows
       },
       "data.images_per_sequence * the rows of an image = 8390080 are more rows than the 8388480"},
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
  check_refused(c, change, want);
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
    CHECK(
        problem(recipe, more) ==
        "training.micro_batch_size * data.sequence_length = 8388608 are more rows than the 8388480 of which a GPU "
        "makes FP8 codes; make it smaller, or use no FP8");
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
