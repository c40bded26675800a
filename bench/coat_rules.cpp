#include <functional>

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include "bench/coat_rules.h"
#include "bench/restored_model.h"
#include "engine/evaluation/inference_run.h"

// Prints the errors of COAT's rules for scales and rounding beside Parka's, as a Markdown table: of random numbers
// and, given a checkpoint in bf16, of its weights and of what a batch of its training data makes.
namespace {

using namespace parka;
using namespace parka::bench;

struct Errors {
  CodeErrors coat, parka;
};

void print_row(const std::string& difference, const std::string& content, const Errors& errors) {
  fmt::print("| {} | {}", difference, content);
  for (const CodeErrors* e : {&errors.coat, &errors.parka}) {
    fmt::print(" | {:.3f} / {:.3f}", 100 * e->rms_relative(), 100 * e->normalised_rms());
  }
  fmt::print(" |\n");
}

using Tensors = std::vector<std::vector<float>>;

Tensors random_tensors(const ActivationContent& content) {
  constexpr int64_t kCount = 64, kSize = 1 << 15;
  const std::vector<float> all = activation_content(content, kCount * kSize);
  Tensors tensors;
  for (int64_t t = 0; t < kCount; ++t) tensors.emplace_back(all.begin() + t * kSize, all.begin() + (t + 1) * kSize);
  return tensors;
}

// Rows of one content: the rule of scales, for groups and for tensors, and a rounding to bf16 in between.
void print_rules(const std::string& name, const Tensors& tensors, bool are_bf16) {
  Errors group_scale, tensor_scale, up_gate, product, gradient;
  for (const std::vector<float>& exact : tensors) {
    const std::vector<float> x = as_bf16(exact);
    add_stored(x, stored_by<kE4M3Traits>(ScaleRule::kCoat, x, 16), group_scale.coat);
    add_stored(x, stored_by<kE4M3Traits>(ScaleRule::kParka, x, 16), group_scale.parka);
    add_stored(x, stored_by<kE4M3Traits>(ScaleRule::kCoat, x, 0), tensor_scale.coat);
    add_stored(x, stored_by<kE4M3Traits>(ScaleRule::kParka, x, 0), tensor_scale.parka);
    if (are_bf16) continue;
    add_stored(exact, stored_by<kE4M3Traits>(ScaleRule::kParka, exact, 16), up_gate.coat);
    add_stored(exact, stored_by<kE4M3Traits>(ScaleRule::kParka, x, 16), up_gate.parka);
    add_stored(exact, stored_by<kE4M3Traits>(ScaleRule::kParka, x, 0), product.coat);
    add_stored(exact, stored_by<kE4M3Traits>(ScaleRule::kParka, exact, 0), product.parka);
    add_stored(exact, stored_by<kE5M2Traits>(ScaleRule::kParka, x, 0), gradient.coat);
    add_stored(exact, stored_by<kE5M2Traits>(ScaleRule::kParka, exact, 0), gradient.parka);
  }
  print_row("scale of a 1x16 group", name, group_scale);
  print_row("scale of a tensor", name, tensor_scale);
  if (are_bf16) return;
  print_row("up and gate, 1x16: bf16 first?", name, up_gate);
  print_row("product, E4M3: bf16 first?", name, product);
  print_row("gradients of up and gate, E5M2: bf16 first?", name, gradient);
}

// Gradients of q, k and v, of which backward has no more when the block is after it.
class GradientReader : public UnitHooks {
 public:
  explicit GradientReader(const RestoredModel& model) : model_(model) {}
  void before_forward(Device&, int) override {}
  void before_backward(Device&, int) override {}
  void after_backward(Device& device, int unit) override {
    if (unit == 0 || unit == model_.parameters().head_unit()) return;
    const TensorView d_qkv = model_.tensor("d_qkv");
    PARKA_REQUIRE(!d_qkv.empty());
    values.push_back(as_floats(device, d_qkv));
  }
  Tensors values;

 private:
  const RestoredModel& model_;
};

// One scale for a matrix (Parka) and one for each of its parts (COAT's Llama). `part_of(i)` is element i's.
template <const Float8Traits& kFormat>
void add_joint(const std::vector<float>& x, int parts, const std::function<int(size_t)>& part_of, Errors& errors) {
  add_stored(x, stored_by<kFormat>(ScaleRule::kParka, x, 0), errors.parka);
  for (int part = 0; part < parts; ++part) {
    std::vector<float> own;
    for (size_t i = 0; i < x.size(); ++i) {
      if (part_of(i) == part) own.push_back(x[i]);
    }
    add_stored(own, stored_by<kFormat>(ScaleRule::kParka, own, 0), errors.coat);
  }
}

int part_of_column(const ModelConfig& model, size_t column) {
  const auto c = static_cast<int64_t>(column), keys = model.kv_heads() * model.head_dim();
  return c < model.d_heads() ? 0 : c < model.d_heads() + keys ? 1 : 2;
}

void print_checkpoint(Device& device, const std::string& path) {
  const LoadedCheckpoint checkpoint = open_checkpoint(path);
  const Config config = config_of(checkpoint);
  if (config.precision.recipe != Recipe::kBf16) {
    throw_bad_input("{}: needs a run with precision.recipe=bf16", checkpoint.path());
  }
  RestoredModel model(device, checkpoint, config);
  GradientReader gradients(model);
  model.run_batch(&gradients);
  Tensors outputs, weights;
  Errors qkv, up_gate, d_qkv;
  for (size_t i = 0; i < model.entries().size(); ++i) {
    if (model.entries()[i].name.ends_with("norm.output")) outputs.push_back(as_floats(device, model.tensor(i)));
  }
  for (size_t i = 0; i < model.weights().size(); ++i) {
    const std::string& name = model.parameters().all[i].name;
    if (!name.starts_with("blocks.") || model.parameters().all[i].rows == 1) continue;
    const std::vector<float>& weight = weights.emplace_back(as_floats(device, model.weights()[i]));
    const auto width = static_cast<size_t>(config.model.d_model);
    if (name.ends_with(".qkv")) {
      add_joint<kE4M3Traits>(
          weight, 3, [&](size_t n) { return part_of_column(config.model, n / width); }, qkv);
    } else if (name.ends_with(".up_gate")) {
      add_joint<kE4M3Traits>(
          weight, 2, [&](size_t n) { return n < weight.size() / 2 ? 0 : 1; }, up_gate);
    }
  }
  const auto qkv_width = static_cast<size_t>(config.model.d_qkv());
  for (const std::vector<float>& d : gradients.values) {
    add_joint<kE5M2Traits>(
        d, 3, [&](size_t n) { return part_of_column(config.model, n % qkv_width); }, d_qkv);
  }
  print_rules("norm outputs of the model", outputs, /*are_bf16=*/true);
  print_rules("weights of the model", weights, /*are_bf16=*/true);
  print_row("scales of q, k, v", "weights of the model", qkv);
  print_row("scales of up, gate", "weights of the model", up_gate);
  print_row("scales of q, k, v, E5M2", "gradients of the model", d_qkv);
}

void print_all(const std::string& path) {
  const auto device = make_cpu_device();
  fmt::print("Each cell is the rms of (stored - x) / x, and the rms of stored - x over that of x, in %.\n\n");
  fmt::print("| what differs | content | COAT's rule | Parka's |\n|---|---|---|---|\n");
  for (const ActivationContent& content : kActivationContents) {
    print_rules(content.name, random_tensors(content), /*are_bf16=*/false);
  }
  if (!path.empty()) print_checkpoint(*device, path);
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("The errors of COAT's rules for FP8 where Parka has others");
  std::string path;
  app.add_option("checkpoint", path, "a checkpoint of a bf16 run, or its run folder: its model, too");
  CLI11_PARSE(app, argc, argv);
  try {
    print_all(path);
  } catch (const Error& error) {
    fmt::print(stderr, "coat_rules: {}\n", error.what());
    return static_cast<int>(error.code());
  } catch (const std::exception& error) {
    fmt::print(stderr, "coat_rules: {}\n", error.what());
    return static_cast<int>(ExitCode::kInternal);
  }
  return 0;
}
