#include <algorithm>
#include <cstdio>
#include <map>

#include <fmt/ranges.h>

#include "core/error.h"
#include "core/log/log.h"
#include "core/log/work_progress.h"
#include "engine/checkpoint/checkpoint_layout.h"
#include "engine/commands/commands.h"
#include "engine/config/config_io.h"
#include "engine/evaluation/inference_run.h"
#include "engine/files/file_io.h"
#include "engine/files/json_text.h"
#include "engine/files/safetensors.h"
#include "engine/huggingface/bitsandbytes.h"
#include "engine/huggingface/huggingface_config.h"
#include "engine/huggingface/huggingface_origin.h"
#include "engine/huggingface/import_source.h"
#include "engine/huggingface/llava_tensors.h"
#include "engine/huggingface/peft_adapter.h"
#include "engine/huggingface/value_check.h"
#include "engine/text/tokenizer_files.h"
#include "engine/training/progress.h"
#include "model/vision/projector.h"
#include "model/vision/vision_tower.h"

namespace parka {
namespace {

constexpr int64_t kPieceBytes = 8 << 20;
constexpr int64_t kMaxShardBytes = int64_t{4} << 30;
constexpr int64_t kLongestSequence = 4096;  // of the config that is written: a start, for the user to change
constexpr int64_t kMostUint16Tokens = 1 << 16;

// A parameter of Parka and the tensors that become its rows, in their order.
struct Target {
  struct Source {
    const HuggingFaceWeights::Place* place;
    int64_t columns;  // of a row; zeros follow up to those of the parameter
  };
  SafetensorsEntry entry;
  std::vector<Source> sources;  // none: the parameter is drawn
  size_t parameter;             // in ParameterTable::all
};

// Copies weights into a checkpoint of Parka's, a few MiB in memory at a time.
class Importer {
 public:
  // `finetune`: see ImportOptions.
  Importer(ImportSource source, std::string finetune)
      : source_(std::move(source)),
        finetune_(std::move(finetune)),
        table_(make_parameter_table(source_.described.model, false)),
        tensors_(stored_tensors()) {
    if (model().tie_embeddings) name_tied_embedding(source_.weights, embedding_of(tensors_).name, head());
    if (has_tower()) drop_unread_weights();
    quantized_ = take_bitsandbytes_weights(source_.weights);
    check_huggingface_weights(source_.weights, tensors_, head(),
                              fs::path(source_.config_path).parent_path().string());
    check_tied_head();
    list_targets();
  }

  void write(const std::string& out) const {
    DraftFolder draft(out);
    Manifest manifest{.step = 0,
                      .state = state(),
                      .files = write_shards(draft),
                      .num_tensors = static_cast<int64_t>(targets_.size())};
    make_directory(draft / kHuggingFaceFolder);
    const std::string beside = draft / kHuggingFaceFolder + "/";
    write_new_file(beside + kHuggingFaceConfigName, config_text());
    for (const ImportSource::CarriedFile& file : source_.carried) {
      if (!file.text.empty()) {
        write_new_file(beside + file.name, file.text);
      } else {
        copy_to_new_file((fs::path(file.folder) / file.name).string(), beside + file.name);
      }
    }
    warn_of_tokens(draft / kHuggingFaceFolder);
    tell_defaults();
    if (!with_zeros_.empty()) {
      log_warning(
          "{}: has rows of zeros in {} of its matrices, first in {}; download it again, unless it was padded, "
          "pruned or given new blocks",
          source_.config_path, with_zeros_.size(), with_zeros_.front());
    }
    sync_directory(draft / kHuggingFaceFolder);
    write_new_file(draft / "config.json", training_config(out));
    write_new_file(draft / std::string(kManifestName), encode_manifest(manifest));
    draft.publish();
  }

  std::string description() const {
    return fmt::format("{}, kept in {}", parameters_text(table_), name_of(targets_.front().entry.dtype));
  }

 private:
  const ModelConfig& model() const { return source_.described.model; }
  bool has_tower() const { return model().vision.exists(); }
  std::string head() const { return head_name(*source_.described.family, source_.llava); }
  const HuggingFaceWeights::Place& place_of(std::string_view name) const {
    return source_.weights.tensors.at(std::string(name));
  }

  // The config.json that goes along.
  std::string config_text() const {
    if (!source_.config_text.empty()) return source_.config_text;
    return make_huggingface_config(source_.described, format_of_embedding(), &source_.special_tokens);
  }
  DType format_of_embedding() const { return targets_.at(static_cast<size_t>(table_.embedding)).entry.dtype; }

  // Tokenizers of published models have more ids than rows, too, and text seldom has those. transformers gives an
  // end of text that the tokenizer lacks a new id, after those that the model was trained with.
  void warn_of_tokens(const std::string& folder) const {
    const auto read = [&](const char* name) {
      constexpr int64_t kMostBytes = int64_t{1} << 30;
      const std::string path = (fs::path(folder) / name).string();
      return file_exists(path) ? parse_json_if_valid(read_text(path, kMostBytes)) : json();
    };
    const json described = parse_json_if_valid(config_text());
    for (const char* key : {"bos_token_id", "eos_token_id"}) {
      for (const json& id : described.is_object() ? described.value(key, json()) : json()) {
        if (!id.is_number_integer() || id < model().vocab_size) continue;
        log_warning(
            "{}: {} = {} is beyond the {} tokens of the model, which can never write it; name one that it has",
            source_.config_path, key, id.dump(), model().vocab_size);
      }
    }
    if (!file_exists((fs::path(folder) / kTokenizerName).string())) return;
    const std::map<int64_t, std::string> tokens = tokens_of(folder);
    const json config = read("tokenizer_config.json"), added = read("added_tokens.json");
    json end = config.is_object() ? config.value("eos_token", json()) : json();
    if (end.is_object()) end = end.value("content", json());
    const auto is_end = [&](const auto& token) { return end == token.second; };
    if (end.is_string() && std::ranges::none_of(tokens, is_end) && !added.contains(end.get<std::string>()) &&
        config.value("added_tokens_decoder", json()).dump().find(end.dump()) == std::string::npos) {
      log_warning(
          "{}: eos_token in tokenizer_config.json is {}, which tokenizer.json lacks, so prepared data would end in an id "
          "that the model does not know; download both files again, or name a token of it there",
          source_.config_path, printable(end.dump()));
    }
    if (tokens.empty() || tokens.rbegin()->first < model().vocab_size) return;
    log_warning(
        "{}: the model has {} rows of tokens, and the last of its tokenizer is {}, id {}: no text with that can be trained "
        "on; resize the embeddings in transformers first, if it is wanted",
        source_.config_path, model().vocab_size, printable(tokens.rbegin()->second), tokens.rbegin()->first);
  }

  // Names what decides the computation, and the files leave out.
  void tell_defaults() const {
    const HuggingFaceFamily& family = *source_.described.family;
    const std::string& text = source_.config_text;
    std::vector<std::string> taken;
    const auto add = [&](std::string_view key, const auto& value) {
      if (text.find(fmt::format("\"{}\"", key)) == text.npos) taken.push_back(fmt::format("{} = {}", key, value));
    };
    for (const ModelKey& key : family.keys) {
      const auto* real = std::get_if<RealKey>(&key);
      if (real != nullptr && real->field == &ModelConfig::norm_eps) add(real->key, model().norm_eps);
      const auto* flag = std::get_if<FlagKey>(&key);
      if (flag != nullptr && flag->field.of_experts != nullptr) add(flag->key, flag->field.in(model()));
    }
    add("rope_theta", model().rope_theta);
    if (text.empty() || taken.empty()) return;
    log_info("{}: does not say {}, which {} has in transformers without it", source_.config_path,
             fmt::join(taken, " and "), family.architecture);
  }

  // The tensors that the files have to hold.
  std::vector<HuggingFaceTensor> stored_tensors() const {
    ModelConfig stored = model();
    stored.vocab_size = source_.num_stored_tokens;
    std::vector<HuggingFaceTensor> tensors =
        huggingface_tensors(*source_.described.family, stored, make_parameter_table(stored, false), source_.llava);
    if (!source_.has_projector) {
      std::erase_if(tensors, [&](const HuggingFaceTensor& tensor) {
        return table_.all[tensor.parameter].name.starts_with(kProjector);
      });
    }
    return tensors;
  }

  // Leaves out the weights of a tower that no model reads.
  void drop_unread_weights() {
    std::erase_if(source_.weights.tensors, [&](const auto& tensor) {
      const std::string_view name = tensor.first, prefix = source_.llava->tower;
      return name.starts_with(prefix) && is_unread_by_models(name.substr(prefix.size()), model().vision.tower);
    });
  }

  // bf16 as it is; fp32 as it is; fp16, and parts that differ, as fp32, which is exact.
  void list_targets() {
    for (const ParameterInfo& p : table_.all) {
      targets_.push_back(
          {{.name = p.name, .dtype = DType::kBF16, .shape = {p.rows, p.cols}}, {}, /*parameter=*/targets_.size()});
    }
    std::vector<const HuggingFaceTensor*> by_row;
    for (const HuggingFaceTensor& tensor : tensors_) by_row.push_back(&tensor);
    std::ranges::stable_sort(by_row, [](const auto* a, const auto* b) { return a->first_row < b->first_row; });
    for (const HuggingFaceTensor* tensor : by_row) {
      Target& target = targets_[tensor->parameter];
      target.sources.push_back({&place_of(tensor->name), tensor->num_columns()});
      if (target.sources.back().place->entry.dtype != DType::kBF16) target.entry.dtype = DType::kF32;
    }
    for (Target& target : targets_) {
      if (target.sources.empty()) target.entry.dtype = format_of_embedding();  // drawn
    }
  }

  // transformers passes over the head in a file whose model is tied; one that differs is of another model.
  void check_tied_head() const {
    if (!model().tie_embeddings || !source_.weights.tensors.contains(this->head())) return;
    const std::string& embedding = embedding_of(tensors_).name;
    const HuggingFaceWeights::Place &head = place_of(this->head()), &table = place_of(embedding);
    bool same = head.entry.dtype == table.entry.dtype;
    std::vector<std::byte> a, b;
    for (int64_t begin = 0; same && begin < head.entry.num_bytes; begin += kPieceBytes) {
      a.resize(static_cast<size_t>(std::min(kPieceBytes, head.entry.num_bytes - begin)));
      b.resize(a.size());
      source_.weights.files[head.file].read(head.entry.offset + begin, a);
      source_.weights.files[table.file].read(table.entry.offset + begin, b);
      same = a == b;
    }
    if (!same) {
      throw_bad_input("{}: tie_word_embeddings is true, but {} in {} is not {}", source_.config_path, this->head(),
                      source_.weights.files[head.file].path(), embedding);
    }
  }

  std::vector<Manifest::File> write_shards(const DraftFolder& draft) const {
    std::vector<Manifest::File> files;
    WorkProgress progress("importing", static_cast<int64_t>(targets_.size()));
    std::vector<const Target*> shard;
    int64_t filled = 0;
    for (const Target& target : targets_) {
      const int64_t bytes = num_bytes_of(target.entry.dtype, target.entry.shape);
      if (!shard.empty() && filled + bytes > kMaxShardBytes) {
        files.push_back(write_shard(draft, shard_name(files.size()), shard, progress));
        shard.clear();
        filled = 0;
      }
      shard.push_back(&target);
      filled += bytes;
    }
    files.push_back(write_shard(draft, shard_name(files.size()), shard, progress));
    return files;
  }

  Manifest::File write_shard(const DraftFolder& draft, const std::string& name, std::vector<const Target*> shard,
                             WorkProgress& progress) const {
    // Larger elements first, so that all are aligned.
    std::ranges::stable_sort(
        shard, [](const Target* a, const Target* b) { return size_of(a->entry.dtype) > size_of(b->entry.dtype); });
    std::vector<SafetensorsEntry> entries;
    entries.reserve(shard.size());
    for (const Target* target : shard) entries.push_back(target->entry);
    OutputFile file(draft / name);
    file.write(as_bytes(encode_safetensors_header(entries, {})));
    for (const Target* target : shard) {
      for (const Target::Source& source : target->sources) copy(source, target->entry, file);
      write_made_rows(*target, file);
      progress.add(1);
    }
    file.sync_and_close();
    return {name, file.num_bytes(), file.checksum()};
  }

  void copy(const Target::Source& source, const SafetensorsEntry& target, OutputFile& file) const {
    const SafetensorsEntry& entry = source.place->entry;
    const int64_t columns = target.shape.back();
    const bool is_padded = source.columns < columns;  // a patch embedding, which is small
    ValueCheck check = check_of(*source.place);
    std::vector<float> values;
    const auto write = [&](DType dtype, ByteSpan bytes) {
      check.add(dtype, bytes);
      if (dtype == target.dtype && !is_padded) return file.write(bytes);
      values.resize(bytes.size() / static_cast<size_t>(size_of(dtype)));
      decode_floats(dtype, bytes, values);
      if (!is_padded) return write_values(values, target.dtype, file);
      std::vector<float> row(static_cast<size_t>(columns));
      for (auto begin = values.cbegin(); begin != values.cend(); begin += source.columns) {
        std::copy_n(begin, source.columns, row.begin());
        write_values(row, target.dtype, file);
      }
    };
    if (const auto found = quantized_.find(entry.name); found != quantized_.end()) {
      const std::vector<float> decoded =
          decode_bitsandbytes(source_.weights, found->second, entry.dtype, num_elements_of(entry.shape));
      write(DType::kF32, std::as_bytes(std::span(decoded)));
    } else {
      const int64_t most = is_padded ? entry.num_bytes : kPieceBytes;
      std::vector<std::byte> bytes;
      for (int64_t begin = 0; begin < entry.num_bytes; begin += most) {
        bytes.resize(static_cast<size_t>(std::min(most, entry.num_bytes - begin)));
        source_.weights.files[source.place->file].read(entry.offset + begin, bytes);
        write(entry.dtype, bytes);
      }
    }
    end(check, *source.place);
  }

  static void write_values(std::span<const float> values, DType dtype, OutputFile& file) {
    std::vector<std::byte> bytes(values.size() * static_cast<size_t>(size_of(dtype)));
    encode_floats(values, dtype, bytes);
    file.write(bytes);
  }

  // Norms of some families add one to their weights.
  ValueCheck check_of(const HuggingFaceWeights::Place& place) const {
    const bool is_offset = place.entry.shape.size() < 2 && model().norm_unit_offset;
    const bool may_be_zero = is_offset || place.entry.shape.empty() || may_begin_as_zeros(place.entry.name);
    return {source_.weights.files[place.file], place.entry, may_be_zero};
  }

  void end(ValueCheck& check, const HuggingFaceWeights::Place& place) const {
    const std::string& name = place.entry.name;
    const bool is_table = name.find("embed") != std::string::npos || name.find("lm_head") != std::string::npos;
    if (check.finish() && place.entry.shape.size() > 1 && !is_table) with_zeros_.push_back(name);
  }

  // Writes the values with which a run would begin for a parameter that the files do not have, and the further rows
  // of a table that has more than the files: each is the mean of theirs.
  void write_made_rows(const Target& target, OutputFile& file) const {
    if (target.sources.empty()) {
      constexpr uint64_t kSeed = 1;
      write_values(initial_weight(model(), table_, target.parameter, kSeed), target.entry.dtype, file);
      return;
    }
    const SafetensorsEntry& stored = target.sources.front().place->entry;
    const bool grows =
        target.sources.size() == 1 && stored.shape.size() == 2 && stored.shape.front() < target.entry.shape.front();
    if (!grows) return;
    const std::vector<float> mean = mean_row(*target.sources.front().place);
    for (int64_t row = stored.shape.front(); row < target.entry.shape.front(); ++row)
      write_values(mean, target.entry.dtype, file);
  }

  std::vector<float> mean_row(const HuggingFaceWeights::Place& place) const {
    const int64_t rows = place.entry.shape.at(0), cols = place.entry.shape.at(1);
    const int64_t row_bytes = cols * size_of(place.entry.dtype);
    std::vector<double> sums(static_cast<size_t>(cols));
    std::vector<float> values(sums.size());
    std::vector<std::byte> bytes(static_cast<size_t>(row_bytes));
    for (int64_t row = 0; row < rows; ++row) {
      source_.weights.files[place.file].read(place.entry.offset + row * row_bytes, bytes);
      decode_floats(place.entry.dtype, bytes, values);
      for (size_t i = 0; i < sums.size(); ++i) sums[i] += double{values[i]};
    }
    for (size_t i = 0; i < sums.size(); ++i) values[i] = static_cast<float>(sums[i] / static_cast<double>(rows));
    return values;
  }

  // Evaluation and generation round nothing unless they are told to.
  std::string_view recipe() const {
    const bool all_bf16 = std::ranges::all_of(targets_, [&](const Target& target) {
      return target.entry.dtype == DType::kBF16 ||
             table_.all[target.parameter].role == ParameterRole::kRouterBias;  // fp32 in all recipes
    });
    return all_bf16 ? "bf16" : "fp32";
  }

  // The keys that evaluation, generation and configs of runs need: the model's, so that a recipe can be chosen.
  ordered_json model_config() const {
    Config config;
    config.model = model();
    ordered_json written = {{"model", to_json(config).at("model")},
                            {"precision", {{"recipe", recipe()}}},
                            {"data",
                             {{"token_dtype", model().vocab_size <= kMostUint16Tokens ? "uint16" : "uint32"},
                              {"sequence_length", std::min(source_.described.max_positions, kLongestSequence)}}}};
    if (has_tower()) written["data"]["images_per_sequence"] = 1;
    return written;
  }

  json state() const {
    TensorFormats formats;
    for (const HuggingFaceTensor& tensor : tensors_)
      formats.emplace(tensor.name, place_of(tensor.name).entry.dtype);
    const bool has_formats = source_.is_one_folder && quantized_.empty();
    return {{"config", model_config()},
            {kImportedFromKey,
             recordable_path(fs::absolute(source_.config_path).lexically_normal().parent_path().string())},
            {kMaxPositionsKey, source_.described.max_positions},
            {kFormatsKey, has_formats ? encode_formats(formats) : json()}};
  }

  // LLaVA-1.5 is trained like this: a new projector alone at first, then with the language model.
  json frozen() const {
    json patterns = {std::string(kVision) + "*"};
    if (source_.has_projector) return patterns;
    for (const ParameterInfo& p : table_.all) {
      const bool is_of_block = p.name.starts_with("blocks.");
      if (is_of_block || p.name.starts_with(kVision) || p.name.starts_with(kProjector)) continue;
      patterns.push_back(p.name);
    }
    patterns.push_back("blocks.*");
    return patterns;
  }

  // A run that continues training the model.
  std::string training_config(const std::string& out) const {
    const fs::path normal = (fs::path(out) / "").lexically_normal();  // with a slash at the end
    const std::string name = normal.parent_path().filename().string();
    ordered_json config = model_config();
    config["precision"]["recipe"] = "bf16";
    config["optimizer"] = {{"lr", 2e-5}, {"eps", 1e-8}, {"schedule", {{"kind", "cosine"}, {"warmup_steps", "3%"}}}};
    if (!finetune_.empty()) {  // rates as in the papers of QLoRA and QST
      config["finetune"] = {{"method", finetune_ == "qlora" ? "lora" : finetune_}, {"rank", 16}};
      if (finetune_ != "qst") config["finetune"]["alpha"] = 32;
      if (finetune_ != "lora") config["finetune"]["base"] = "nf4";
      const MoeConfig& moe = model().moe;
      const bool has_experts_alone = moe.exists() && moe.dense_layers == 0 && moe.shared_width == 0;
      if (has_experts_alone && finetune_ != "qst")
        config["finetune"]["targets"] = {"q_proj", "k_proj", "v_proj", "o_proj"};
      config["optimizer"].update({{"lr", 2e-4}, {"weight_decay", 0.0}, {"gradient", "bf16"}});
    }
    if (has_tower()) config["optimizer"]["frozen"] = frozen();
    config["data"]["train"] = json::array();
    config["training"] = {{"steps", 1000}, {"global_batch_size", 32}, {"micro_batch_size", 1}};
    config["checkpoint"] = {{"folder", "runs/" + name}, {"interval", 500}, {"init_from", recordable_path(out)}};
    return "// Goes on training the imported model, with the token files of --data FOLDER. Look at what is below.\n" +
           config.dump(2) + "\n";
  }

  ImportSource source_;
  std::string finetune_;
  ParameterTable table_;
  std::vector<HuggingFaceTensor> tensors_;
  std::unordered_map<std::string, BitsAndBytesWeight> quantized_;  // by the name of their tensor
  std::vector<Target> targets_;
  mutable std::vector<std::string> with_zeros_;  // names of matrices
};

int import_adapter(const ImportOptions& options) {
  if (!options.vision_tower.empty()) {
    throw_bad_input("{}: has adapters, and --vision-tower is for a model; leave it out", options.folder);
  }
  if (!options.finetune.empty()) {
    throw_bad_input("{}: has adapters, and --finetune is for a model; leave it out", options.folder);
  }
  if (options.base.empty()) {
    throw_bad_input("{}: has adapters; give the imported model that they belong to as --base", options.folder);
  }
  const std::string description =
      import_peft_adapter(options.folder, open_checkpoint(options.base), options.output);
  std::printf("%s: %s\n", options.output.c_str(), description.c_str());
  return 0;
}

ImportSource open_source(const ImportOptions& options) {
  const int64_t image_token = options.image_token.value_or(-1);
  if (is_vila_folder(options.folder)) {
    if (!options.vision_tower.empty()) {
      throw_bad_input("{}: has a tower of its own; leave out --vision-tower", options.folder);
    }
    return open_vila_model(options.folder, image_token);
  }
  if (!options.vision_tower.empty()) {
    return open_model_with_tower(options.folder, options.vision_tower, image_token);
  }
  if (options.image_token) {
    throw_bad_input("--image-token goes with --vision-tower, or with VILA's folders; leave it out");
  }
  return open_model(options.folder);
}

}  // namespace

int run_import(const ImportOptions& given) {
  if (!is_folder(given.folder))
    throw_bad_input("{}: no such folder; download the model into one first", given.folder);
  ImportOptions options = given;
  const auto has_adapters = [&] { return file_exists((fs::path(options.folder) / kPeftConfigName).string()); };
  if (!has_adapters()) options.folder = model_folder_of(given.folder);
  if (has_adapters()) return import_adapter(options);
  if (!given.base.empty()) {
    throw_bad_input("{}: --base is for a folder with {}; leave it out to import a model", given.folder,
                    kPeftConfigName);
  }
  if (!given.vision_tower.empty()) options.vision_tower = model_folder_of(given.vision_tower);
  const Importer importer(open_source(options), options.finetune);
  importer.write(options.output);
  std::printf("%s: %s\ntrain from it with   parka train %s --data FOLDER   (of parka prepare)\n",
              options.output.c_str(), importer.description().c_str(),
              shell_word(options.output + "/config.json").c_str());
  return 0;
}

}  // namespace parka
