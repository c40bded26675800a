// Stacks and their buffers on their own, without a model around them.
#include "kernels/ops/quantize/quantize.h"
#include "model/layers/stack.h"
#include "tests/model/small_model.h"
#include "tests/support/catch.h"

using namespace parka;
using namespace parka::test;

namespace {

constexpr BatchShape kShape{2, 12};

struct NamedStack {
  std::string_view name;
  ModelConfig config;
};

const NamedStack kMain{kDecoder, {.d_model = 64, .num_layers = 2, .num_heads = 2, .d_ffn = 48}};
const NamedStack kSecond{"side.",
                         {.d_model = 32, .num_layers = 3, .num_heads = 4, .d_ffn = 80, .norm = NormKind::kRmsNorm}};

void upload(Device& device, const TensorView& t, const std::vector<float>& values) {
  upload_weight(device, t, values);
}

std::vector<float> download(Device& device, const TensorView& t) {
  const std::vector<float> plain = [&] {
    std::vector<float> host(static_cast<size_t>(t.numel()));
    if (t.dtype == DType::kF32) {
      device.copy_to_host(host.data(), t.data, t.bytes());
    } else {
      std::vector<BFloat16> codes(host.size());
      device.copy_to_host(codes.data(), t.data, t.bytes());
      std::transform(codes.begin(), codes.end(), host.begin(), decode_bf16);
    }
    return host;
  }();
  return plain;
}

// Some stacks in one plan, with weights that depend on their names alone.
struct Stacks {
  Stacks(Device& on, const PrecisionConfig& precision, const std::vector<NamedStack>& named)
      : device(on),
        table(table_of(named)),
        weights(table, Formats(precision), {WeightCopies::kBoth}, training_use(precision), plan) {
    int first_unit = 1;
    for (const NamedStack& one : named) {
      BufferScope scope(precision, kShape, BufferScope::Purpose::kTraining, plan);
      stacks.emplace_back(one.config, table, one.name, first_unit, scope);
      first_unit += static_cast<int>(one.config.num_layers);
    }
    for (const ParameterInfo& p : table.all) {
      gradient_ids.push_back(plan.add("gradients", p.name, DType::kF32, {p.rows, p.cols}));
    }
    for (const NamedStack& one : named) {
      cos_sin_ids.push_back(
          plan.add("tables", "cos_sin", DType::kF32, {kShape.sequence_length, one.config.head_dim()}));
    }
    plan.finish();
    arena = std::make_unique<Arena>(device, plan);
    weights.bind(*arena);
    for (TensorId id : gradient_ids) gradients.push_back((*arena)[id]);
    for (size_t i = 0; i < table.all.size(); ++i) {
      const uint64_t seed = std::hash<std::string>()(table.all[i].name);
      upload(device, weights.own()[i], random_normal(table.all[i].numel(), seed, 0.1f));
    }
    weights.find_amax(device);
    weights.quantize(device);
  }

  static ParameterTable table_of(const std::vector<NamedStack>& named) {
    const LoraRules no_adapters;
    ParameterList list(named.front().config, no_adapters);
    int64_t blocks = 0;
    for (const NamedStack& one : named) {
      Stack::add_parameters(list, one.config, one.name);
      blocks += one.config.num_layers;
    }
    ParameterTable table(list.take());
    table.num_blocks = blocks;
    return table;
  }

  // Forward and backward of one of the stacks. The output, the gradient of the input, and those of its weights.
  std::vector<float> run(size_t which, const NamedStack& one, uint64_t seed) {
    const Stack& stack = stacks[which];
    StepContext step{.device = device, .arena = *arena, .weights = weights};
    step.shape = kShape;
    step.keep = true;
    step.gradients = &gradients;
    step.positions.rotations = (*arena)[cos_sin_ids[which]];
    const int64_t numel = kShape.num_tokens() * one.config.d_model;
    upload(device, step.positions.rotations, random_normal(step.positions.rotations.numel(), 5));
    upload(device, stack.input(step), random_normal(numel, seed));
    stack.forward(step);
    std::vector<float> all = download(device, stack.residual(step));
    append(all, download(device, stack.branch(step)));
    const TensorView d_residual = stack.stream().d_residual(step);
    upload(device, d_residual, random_normal(numel, seed + 1));
    const GemmInput codes = stack.stream().d_residual_codes(step);
    if (!codes.row.empty()) quantize(device, {.x = d_residual, .out = codes.row, .out_t = codes.transposed});
    stack.backward(step);
    append(all, download(device, d_residual));
    for (size_t i = 0; i < table.all.size(); ++i) {
      if (table.all[i].name.starts_with(std::string(one.name) + "blocks."))
        append(all, download(device, gradients[i]));
    }
    return all;
  }
  static void append(std::vector<float>& all, const std::vector<float>& more) {
    all.insert(all.end(), more.begin(), more.end());
  }

  Device& device;
  MemoryPlan plan;
  ParameterTable table;
  ModelWeights weights;
  std::vector<Stack> stacks;
  std::vector<TensorId> gradient_ids, cos_sin_ids;
  std::unique_ptr<Arena> arena;
  std::vector<TensorView> gradients;
};

}  // namespace

TEST_CASE("a second stack of another size computes beside the first what each computes alone", "[model]") {
  for (Device* device : devices()) {
    for (const Recipe recipe : {Recipe::kBf16, Recipe::kCoat}) {
      for (const Recompute recompute : {Recompute::kNone, Recompute::kBlock}) {
        PrecisionConfig precision = precision_recipe(recipe);
        precision.recompute = recompute;
        Stacks both(*device, precision, {kMain, kSecond});
        const std::vector<float> side = both.run(1, kSecond, 3), main = both.run(0, kMain, 7);
        CHECK(main == Stacks(*device, precision, {kMain}).run(0, kMain, 7));
        CHECK(side == Stacks(*device, precision, {kSecond}).run(0, kSecond, 3));
      }
    }
  }
}

namespace {

// Declares [T, 8] to be kept, of some blocks of a scope in turn.
std::vector<int> kept_by(BufferScope& scope, int64_t blocks, const ActivationOffload& offload) {
  std::vector<int> ids;
  for (int64_t l = 0; l < blocks; ++l) {
    scope.enter_block(kDecoder, l, offload);
    ids.push_back(scope.kept("x", DType::kF32, {scope.tokens(), 8}).index);
  }
  return ids;
}

}  // namespace

TEST_CASE("a scope says which blocks share a buffer", "[model]") {
  const ActivationOffload none(5, 0), three(5, 3);
  PrecisionConfig plain, rerun;
  rerun.recompute = Recompute::kBlock;
  using Purpose = BufferScope::Purpose;
  MemoryPlan plan;
  SECTION("each block has what it keeps, and all have one workspace") {
    BufferScope scope(plain, kShape, Purpose::kTraining, plan);
    CHECK(kept_by(scope, 3, none) == std::vector{0, 1, 2});
    CHECK(plan.entries()[2].name == "blocks.2.x");
    const TensorId shared = scope.workspace("y", DType::kF32, {8}, kHead);
    scope.enter_block(kDecoder, 3, none);
    CHECK(scope.workspace("y", DType::kF32, {8}, kHead).index == shared.index);
    CHECK_THROWS_AS(scope.workspace("y", DType::kF32, {9}, kHead), Error);
  }
  SECTION("blocks that take turns in two buffers have two") {
    BufferScope scope(plain, kShape, Purpose::kTraining, plan);
    CHECK(kept_by(scope, 5, three) == std::vector{0, 1, 0, 1, 0});
  }
  SECTION("blocks that run again have one set, and an input each") {
    BufferScope scope(rerun, kShape, Purpose::kTraining, plan);
    CHECK(kept_by(scope, 3, none) == std::vector{0, 0, 0});
    CHECK(scope.kept_in_block().empty());
    const TensorId input = scope.residual("norm.input", 8, /*is_first_of_block=*/true, /*keep=*/true);
    CHECK(plan[input].name == "blocks.2.input");
    REQUIRE(scope.kept_in_block().size() == 1);
    CHECK(scope.kept_in_block()[0].index == input.index);
    CHECK(plan[scope.residual("norm.input", 8, /*is_first_of_block=*/false, /*keep=*/true)].name ==
          "block.norm.input");
  }
  SECTION("evaluation has one set, in memory of its own phase") {
    for (const PrecisionConfig& precision : {plain, rerun}) {
      MemoryPlan own;
      BufferScope scope(precision, kShape, Purpose::kEvaluation, own);
      CHECK(kept_by(scope, 3, none) == std::vector{0, 0, 0});
      CHECK(own.entries()[0].category == "evaluation");
      CHECK(own.entries()[0].phases == PhaseMask{Phase::kEvaluation});
    }
  }
}
