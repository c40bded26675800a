#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <tuple>
#include <utility>

#include "core/error.h"
#include "core/log/log.h"
#include "core/log/work_progress.h"
#include "engine/checkpoint/checkpoint_base.h"
#include "engine/checkpoint/checkpoint_weights.h"
#include "engine/checkpoint/saved_state.h"
#include "engine/checkpoint/side_export.h"
#include "engine/commands/argument_values.h"
#include "engine/commands/commands.h"
#include "engine/config/config_io.h"
#include "engine/evaluation/inference_run.h"
#include "engine/files/file_io.h"
#include "engine/files/json_text.h"
#include "engine/files/safetensors.h"
#include "engine/huggingface/huggingface_config.h"
#include "engine/huggingface/huggingface_origin.h"
#include "engine/huggingface/import_source.h"
#include "engine/huggingface/llava_config.h"
#include "engine/huggingface/llava_tensors.h"
#include "engine/huggingface/peft_adapter.h"
#include "engine/text/tokenizer_files.h"

namespace parka {
namespace {

constexpr std::array<std::pair<std::string_view, DType>, 3> kFormats{
    {{"bf16", DType::kBF16}, {"fp16", DType::kF16}, {"fp32", DType::kF32}}};

std::optional<DType> parse_format(const std::string& name) {
  for (const auto& [text, dtype] : kFormats) {
    if (text == name) return dtype;
  }
  return std::nullopt;  // not given; the command line knows no other
}

LoadedCheckpoint open_whole(const ExportOptions& options) {
  if (options.base.empty()) return open_checkpoint(options.checkpoint);
  LoadedCheckpoint checkpoint = open_checkpoint(options.checkpoint, {"checkpoint.init_from=" + options.base});
  if (!has_base(checkpoint)) {
    throw_bad_input("{}: has all of its weights, so --base {} is not needed; leave it out", checkpoint.path(),
                    options.base);
  }
  return checkpoint;
}

// The key by which two models differ, most important first; empty if none does.
std::string first_difference(const ModelConfig& one, const ModelConfig& other) {
  const ResumeDifferences differences = model_differences(one, other);
  const std::vector<std::string>& shown = differences.refused.empty() ? differences.allowed : differences.refused;
  return shown.empty() ? std::string() : shown.front();
}

// Added weights say nothing of their model: whoever adds them to the base computes as the base's config.json says.
void check_base_is_unchanged(const LoadedCheckpoint& checkpoint, const Config& config) {
  if (checkpoint.base() == nullptr) return;
  const std::string difference = first_difference(config_of(*checkpoint.base()).model, config.model);
  if (difference.empty()) return;
  const bool is_qst = config.finetune.method == FinetuneMethod::kQst;
  throw_bad_input("{}: its base is changed, {}, and {} cannot say so; {}", checkpoint.path(), difference,
                  is_qst ? "a side network" : "adapters",
                  is_qst ? "give the base these keys in a run of all weights with optimizer.lr = 0, and begin there"
                         : "export the whole model, without --adapter");
}

std::string export_side_network(const ExportOptions& options, const LoadedCheckpoint& checkpoint,
                                const Config& config) {
  if (!options.adapter) {
    throw_bad_input(
        "{}: has a side network, which is nothing that could be added to the weights; `parka export --adapter` writes it "
        "alone{}",
        checkpoint.path(),
        has_base(checkpoint) ? ", and its base, a checkpoint of its own, is exported as ever" : "");
  }
  if (!options.family.empty() || !options.like.empty()) {
    throw_bad_input("{}: a side network is written as Parka has it; leave --family and --like out",
                    checkpoint.path());
  }
  check_base_is_unchanged(checkpoint, config);
  write_side_network(checkpoint, config, options.output);
  return fmt::format("side network of step {} of {}", checkpoint.step(), checkpoint.path());
}

class Exporter {
 public:
  Exporter(const ExportOptions& options, const LoadedCheckpoint& checkpoint, const Config& config)
      : options_(options),
        checkpoint_(checkpoint),
        config_(config),
        wanted_(parse_format(options.dtype)),
        table_(make_parameter_table(config_.model, false)),
        weights_(checkpoint_, table_.all, lora_adapters(config_)) {
    // The weights' origin says how they are named; --like, what goes along, or the tokenizer that the run keeps.
    const json state = state_with_base();
    if (options.like.empty()) tokenizer_ = find_tokenizer(checkpoint_.path(), state);
    origin_ = find_origin(checkpoint_.path(), state, [&](const std::string& gone) {
      if (!options.like.empty() || tokenizer_) return;
      log_warning("{}, named by checkpoint.init_from, is gone, so the tokenizer is unknown; give --like FOLDER",
                  gone);
    });
    if (origin_) {
      formats_ = origin_->formats;
      format_of_origin_ = huggingface_dtype(read_config(*origin_).second);
    }
    model_ = config_.model;
    if (model_.vision.exists()) choose_tower();
    if (!options.like.empty()) origin_ = HuggingFaceOrigin{model_folder_of(options.like)};
    if (origin_) std::tie(origin_text_, origin_config_) = read_config(*origin_);
    if (origin_ && !(is_vila_ && options.like.empty())) {  // VILA's own config.json is of no family
      original_ =
          parse_huggingface_config(origin_config_, (fs::path(origin_->folder) / kHuggingFaceConfigName).string());
      if (original_->model.vision.exists()) {
        read_pixel_statistics(origin_->folder, original_->model.vision.tower);
      }
    }
    if (!options.like.empty() && original_) check_pictures_of(original_->model.vision);
    choose_language_model();
    tensors_ = huggingface_tensors(*family_, model_, table_, llava_);
    if (llava_ == nullptr) return;
    for (const char* name : {"post_layernorm.weight", "post_layernorm.bias"}) {  // no parameter's: nothing reads it
      tensors_.push_back({.name = std::string(llava_->tower) + name, .shape = {model_.vision.tower.width}});
    }
  }

  // Returns a description of what is written.
  std::string write(const std::string& out) const {
    if (options_.adapter) {
      check_base_is_unchanged(checkpoint_, config_);
      const std::string difference =
          options_.like.empty() || !original_ ? "" : first_difference(original_->model, config_.model);
      if (!difference.empty()) {
        throw_bad_input("{}: --like {} is another model than the adapters' base: {}", checkpoint_.path(),
                        options_.like, difference);
      }
      write_peft_adapter(checkpoint_, config_, *family_, base_for_peft(), out);
      return fmt::format("adapters of step {} of {}", checkpoint_.step(), checkpoint_.path());
    }
    const std::optional<std::string> folder =
        tokenizer_ || !origin_ ? tokenizer_ : std::optional(origin_->folder);  // of the files that go along
    DraftFolder draft(out);
    if (is_vila_) {
      write_parts(draft, folder);
      return fmt::format("step {} of {}, in VILA's folders {}, {} and {}", checkpoint_.step(), checkpoint_.path(),
                         kVilaText, kVilaTower, kVilaProjector);
    }
    const DType usual = usual_format(table_.all.front());
    std::vector<DType> formats;
    for (const HuggingFaceTensor& tensor : tensors_) {
      if (is_router_bias(tensor)) continue;
      if (std::ranges::count(formats, format_of(tensor, usual)) == 0) formats.push_back(format_of(tensor, usual));
    }
    write_new_file(draft / kHuggingFaceConfigName, config_text(formats, usual));
    for (const std::string& name : folder ? carried_files(*folder) : std::vector<std::string>()) {
      copy_to_new_file((fs::path(*folder) / name).string(), draft / name);
    }
    if (model_.vision.exists()) require_pixel_statistics(draft / ".", model_.vision.tower, checkpoint_.path());
    const size_t files = write_tensors(draft / ".", tensors_, usual);
    draft.publish();
    std::string names;
    for (const DType dtype : formats) names += fmt::format("{}{}", names.empty() ? "" : " and ", name_of(dtype));
    return fmt::format("step {} of {} in {}, {} file{}{}", checkpoint_.step(), checkpoint_.path(), names, files,
                       files == 1 ? "" : "s", folder ? fmt::format(", with what came with {}", *folder) : "");
  }

 private:
  // The state, in which the base is named by the place where it was found.
  json state_with_base() const {
    json state = checkpoint_.state();
    if (checkpoint_.base() == nullptr) return state;
    state.erase(kBaseKey);
    state["config"]["checkpoint"]["init_from"] = checkpoint_.base()->path();
    return state;
  }

  // Its config.json as text and parsed.
  static std::pair<std::string, json> read_config(const HuggingFaceOrigin& origin) {
    const std::string path = (fs::path(origin.folder) / kHuggingFaceConfigName).string();
    std::string text = read_text(path, kMaxHuggingFaceConfigBytes);
    json parsed = parse_json_text(text, path, JsonComments::kRefused);
    return {std::move(text), std::move(parsed)};
  }

  // The files that go along with --like prepare pictures of that model's size and image slots.
  void check_pictures_of(const VisionConfig& theirs) const {
    const VisionConfig& ours = model_.vision;
    if (!ours.exists() || !theirs.exists()) return;
    const auto sizes = [](const VisionConfig& v) {
      return fmt::format("{} x {} pixels in patches of {}, slots of token {}", v.tower.image_size,
                         v.tower.image_size, v.tower.patch_size, v.image_token);
    };
    if (sizes(ours) == sizes(theirs)) return;
    throw_bad_input(
        "{}: its pictures have {}, and those of --like {} {}; give the folder of a model that sees as this one does",
        checkpoint_.path(), sizes(ours), options_.like, sizes(theirs));
  }

  // Names are those of the imported model. The export has the tower up to the block that is read, and a last
  // LayerNorm that changes nothing, because transformers looks for one.
  void choose_tower() {
    is_vila_ = model_.vision.projector.kind != ProjectorKind::kMlp2xGelu;
    if (is_vila_) make_vila_config(model_.vision, nullptr);  // refuses what VILA 1.5 does not have
    llava_ = find_llava_names([&](const std::string& name) { return formats_.contains(name); });
    if (llava_ == nullptr) llava_ = is_vila_ ? &vila_part_names() : &all_llava_names().front();
    TowerConfig& tower = model_.vision.tower;
    tower.num_layers = tower.num_blocks();
    tower.feature_layer = -1;
  }

  void choose_language_model() {
    ModelConfig text = model_;
    text.vision = {};
    family_ = &choose_family(text, options_.family, original_ ? original_->family : nullptr, checkpoint_.path());
    if (llava_ == nullptr || family_->model_type == "llama" || family_->model_type == "qwen2") return;
    throw_bad_input("{}: with model.vision.tower models are exported as llama or qwen2, and this one is {}",
                    checkpoint_.path(), family_->model_type);
  }

  // The format that the origin's config.json names if that is one for weights, else the checkpoint's.
  DType usual_format(const ParameterInfo& parameter) const {
    for (const auto& [text, dtype] : kFormats) {
      if (format_of_origin_ == huggingface_name_of(dtype)) return dtype;
    }
    return weights_.dtype(parameter);
  }

  bool is_router_bias(const HuggingFaceTensor& tensor) const {
    return table_.all[tensor.parameter].role == ParameterRole::kRouterBias;
  }

  // --dtype, or that of the imported tensor, or the usual one. Biases of routers stay in fp32, as in transformers.
  DType format_of(const HuggingFaceTensor& tensor, DType usual) const {
    const auto found = formats_.find(tensor.name);
    if (is_router_bias(tensor)) return found != formats_.end() ? found->second : DType::kF32;
    return wanted_.value_or(found != formats_.end() && is_plain_float(found->second) ? found->second : usual);
  }

  // The model that adapters are added to, where it came from Hugging Face; peft cannot read another.
  std::optional<std::string> base_for_peft() const {
    if (config_.finetune.method != FinetuneMethod::kLora) return std::nullopt;
    if (!options_.like.empty()) return options_.like;
    const LoadedCheckpoint* base = checkpoint_.base();
    if (base != nullptr && base->state().contains(kImportedFromKey)) {
      return base->state().at(kImportedFromKey).get<std::string>();
    }
    log_warning(
        "adapter_config.json names no model that the adapters belong to; export {}, and write its folder there",
        base != nullptr ? base->path() : "the one that they were trained beside");
    return std::nullopt;
  }

  // The longest sequence the model is meant for: a run on shorter ones than its origin's takes nothing from it.
  int64_t max_positions() const {
    int64_t own = max_positions_of(checkpoint_, config_.data.sequence_length);
    // transformers before version 5 takes the length by which YaRN has multiplied the original one for its factor.
    const RopeScaling& scaling = model_.rope_scaling;
    if (scaling.kind == RopeScalingKind::kYarn) {
      own = std::max<int64_t>(own, std::llround(scaling.factor * static_cast<double>(scaling.original_length)));
    }
    if (original_) return std::max(own, original_->max_positions);
    return origin_ ? std::max(own, origin_->max_positions.value_or(0)) : own;
  }

  // The origin's own text as far as it is true of these weights.
  std::string config_text(const std::vector<DType>& formats, DType usual) const {
    const DType dtype = formats.size() == 1 ? formats.front() : usual;
    const HuggingFaceModel described{family_, model_, max_positions()};
    // The imported model's special tokens are not those of a run with a tokenizer of its own.
    if (!origin_ || (tokenizer_ && have_different_tokenizers(*tokenizer_, origin_->folder))) {
      const json special_tokens = tokenizer_ ? special_token_ids(*tokenizer_) : json::object();
      return make_huggingface_config(described, dtype, &special_tokens);
    }
    const ResumeDifferences differences = model_differences(original_->model, model_);
    const bool is_longer = described.max_positions > original_->max_positions;
    const bool is_open = leaves_local_theta_open(*original_, origin_config_);
    if (original_->family != family_ || is_longer || is_open || model_.vision.exists() ||
        !differences.refused.empty() || !differences.allowed.empty()) {
      return make_huggingface_config(described, dtype, &origin_config_);
    }
    const std::optional<std::string> named = huggingface_dtype(origin_config_);
    if (formats.size() > 1 || !named || named == huggingface_name_of(dtype)) return origin_text_;
    return with_huggingface_dtype(origin_text_, dtype);
  }

  // VILA's folder of three: each is a model by itself.
  void write_parts(DraftFolder& draft, const std::optional<std::string>& folder) const {
    ModelConfig text = model_;
    text.vision = {};
    const HuggingFaceModel language_model{family_, text, max_positions()};
    const json special_tokens = folder ? special_token_ids(*folder) : json::object();
    const auto write_part = [&](const std::string& part, const auto& config_in) {
      std::vector<HuggingFaceTensor> tensors = tensors_;
      std::erase_if(tensors, [&](const auto& tensor) { return vila_part_of(tensor.name) != part; });
      const DType dtype = wanted_.value_or(usual_format(table_.all[tensors.front().parameter]));
      make_directory(draft / part);
      write_new_file(draft / part + "/" + kHuggingFaceConfigName, config_in(dtype));
      write_tensors(draft / part, tensors, dtype);
    };
    write_part(kVilaText,
               [&](DType dtype) { return make_huggingface_config(language_model, dtype, &special_tokens); });
    write_part(kVilaTower, [&](DType dtype) { return make_tower_config(model_.vision.tower, dtype); });
    write_part(kVilaProjector, [](DType) { return make_vila_projector_config(); });
    const bool is_of_vila = origin_ && !original_;
    write_new_file(draft / kHuggingFaceConfigName,
                   make_vila_config(model_.vision, is_of_vila ? &origin_config_ : nullptr));
    for (const std::string& name : folder ? carried_files(*folder) : std::vector<std::string>()) {
      const char* part = name == kPreprocessorName ? kVilaTower : kVilaText;
      copy_to_new_file((fs::path(*folder) / name).string(), draft / part + "/" + name);
    }
    require_pixel_statistics(draft / kVilaTower, model_.vision.tower, checkpoint_.path());
    for (const char* part : {kVilaText, kVilaTower, kVilaProjector}) sync_directory(draft / part);
    draft.publish();
  }

  size_t write_tensors(const std::string& folder, const std::vector<HuggingFaceTensor>& tensors,
                       DType usual) const {
    constexpr int64_t kDefaultFileBytes = 50'000'000'000;  // of transformers' save_pretrained
    std::vector<SafetensorsEntry> entries;
    entries.reserve(tensors.size());
    for (const HuggingFaceTensor& tensor : tensors) {
      entries.push_back({.name = tensor.name, .dtype = format_of(tensor, usual), .shape = tensor.shape});
    }
    WorkProgress progress("exporting", static_cast<int64_t>(tensors.size()));
    return write_huggingface_weights(
        folder, entries, options_.shard_size.empty() ? kDefaultFileBytes : parse_byte_size(options_.shard_size),
        [&](size_t i, OutputFile& file) {
          write_tensor(tensors[i], entries[i], file);
          progress.add(1);
        });
  }

  void write_tensor(const HuggingFaceTensor& tensor, const SafetensorsEntry& entry, OutputFile& file) const {
    const ParameterInfo& parameter = table_.all[tensor.parameter];
    const ElementRange range = {tensor.first_row * parameter.cols,
                                (tensor.first_row + tensor.num_rows) * parameter.cols};
    // In bf16 the very weights that the run computes with: its rounding of ties differs from encode_floats'.
    const WeightForm form = entry.dtype == DType::kBF16 ? WeightForm::kCompute : WeightForm::kMaster;
    std::vector<std::byte> bytes;
    const auto write = [&](std::span<const float> values) {
      bytes.resize(values.size() * static_cast<size_t>(size_of(entry.dtype)));
      encode_floats(values, entry.dtype, bytes);
      if (entry.dtype == DType::kF16) check_range(values, bytes, entry.name);
      file.write(bytes);
    };
    if (tensor.num_rows == 0) {  // no parameter's
      write(
          std::vector<float>(static_cast<size_t>(num_elements_of(tensor.shape)), tensor.name.ends_with("weight")));
      return;
    }
    const int64_t columns = tensor.num_columns();
    if (columns == parameter.cols) {
      weights_.read(parameter, range, form, [&](int64_t, std::span<const float> values) { write(values); });
      return;
    }
    const std::vector<float> padded = weights_.read(parameter, range, form);
    for (int64_t row = 0; row < tensor.num_rows; ++row) {
      write({&padded[static_cast<size_t>(row * parameter.cols)], static_cast<size_t>(columns)});
    }
  }

  void check_range(std::span<const float> values, const std::vector<std::byte>& bytes,
                   const std::string& name) const {
    std::vector<float> rounded(values.size());
    decode_floats(DType::kF16, bytes, rounded);
    for (size_t i = 0; i < values.size(); ++i) {
      if (std::isfinite(values[i]) && !std::isfinite(rounded[i])) {
        throw_bad_input("{}: {} has the value {:.6g}, too large for fp16; use --dtype bf16 or fp32",
                        checkpoint_.path(), name, values[i]);
      }
    }
  }

  const ExportOptions& options_;
  const LoadedCheckpoint& checkpoint_;
  const Config& config_;
  std::optional<DType> wanted_;  // for all weights
  ModelConfig model_;            // as it is exported
  ParameterTable table_;
  CheckpointWeights weights_;
  const LlavaNames* llava_ = nullptr;  // of a model with a tower
  bool is_vila_ = false;               // it is written in VILA's three folders
  TensorFormats formats_;              // of what the weights come from, and the format that it names
  std::optional<std::string> format_of_origin_;
  std::optional<HuggingFaceOrigin> origin_;  // the same, or --like
  std::optional<std::string> tokenizer_;     // the folder of the run's or the model's own; not with --like
  std::string origin_text_;
  json origin_config_;
  std::optional<HuggingFaceModel> original_;   // what it describes
  const HuggingFaceFamily* family_ = nullptr;  // of the export
  std::vector<HuggingFaceTensor> tensors_;     // with num_rows = 0: of no parameter
};

}  // namespace

int run_export(const ExportOptions& options) {
  const LoadedCheckpoint checkpoint = open_whole(options);
  const Config config = config_of(checkpoint);
  const std::string description = config.finetune.method == FinetuneMethod::kQst
                                      ? export_side_network(options, checkpoint, config)
                                      : Exporter(options, checkpoint, config).write(options.output);
  std::printf("%s: %s\n", options.output.c_str(), description.c_str());
  return 0;
}

}  // namespace parka
