#include <algorithm>
#include <cstdio>
#include <optional>

#include <nlohmann/json.hpp>

#include "engine/commands/commands.h"
#include "engine/commands/data_show.h"
#include "engine/commands/data_statistics.h"
#include "engine/config/config_io.h"
#include "engine/config/data_description.h"
#include "engine/config/data_sources.h"
#include "engine/evaluation/evaluation_suite.h"
#include "engine/text/tokenizer_files.h"

namespace parka {
namespace {

struct Listed {
  std::vector<std::string> sources;
  std::optional<Config> config;
  TokenType type = TokenType::kUint16;
  DocumentIds document_ids;
  int64_t vocab_size = kAnyVocabulary;
  int64_t image_token = -1;  // of image slots
};

// Token files as the command line lists them, or those of a config.
Listed list_files(const DataOptions& options) {
  Listed listed;
  const bool is_config = options.inputs.size() == 1 && options.inputs.front().ends_with(".json");
  if (!is_config) {
    if (!options.overrides.empty()) throw_bad_input("--set: overrides keys of a config, but token files are given");
    listed.sources = options.inputs;
    if (options.dtype == "uint32") listed.type = TokenType::kUint32;
    check_token_type(listed.sources, listed.type);
    listed.document_ids = options.document_ids;
    return listed;
  }
  if (!options.dtype.empty() || options.document_ids.any()) {
    throw_bad_input(
        "--dtype, --document-start and --document-end are for token files; set data.token_dtype, data.document_start "
        "and data.document_end in {}",
        options.inputs.front());
  }
  const Config config = load_config(options.inputs.front(), options.overrides);
  // Opening them refuses what is too short, lacks a mask or has no target.
  if (!config.data.train.empty()) open_training_files(config);
  check_present_tokenizer(config);
  listed.sources = config.data.train;
  const auto add = [&](const std::vector<std::string>& sources) {
    if (!sources.empty()) open_token_files(sources, config);
    listed.sources.insert(listed.sources.end(), sources.begin(), sources.end());
  };
  add(config.data.eval);
  for (const NamedFiles& set : parse_sets(config.evaluation.sets, "evaluation.sets")) add(set.files);
  if (listed.sources.empty()) {
    throw_bad_input("{}: data.train, data.eval and evaluation.sets list no files", options.inputs.front());
  }
  listed.config = config;
  listed.type = config.data.token_dtype;
  listed.document_ids = config.data.document_ids();
  listed.vocab_size = config.model.vocab_size;
  if (config.model.vision.exists()) listed.image_token = config.model.vision.image_token;
  return listed;
}

nlohmann::ordered_json to_json(const DataStatistics& s) {
  nlohmann::ordered_json line = {
      {"file", s.path},         {"format", name_of(s.format)}, {"token_dtype", name_of(s.type)},
      {"tokens", s.num_tokens}, {"min_id", s.min_id},          {"max_id", s.max_id}};
  if (s.num_documents) line["documents"] = *s.num_documents;
  if (s.num_targets) line["targets"] = *s.num_targets;
  if (s.num_images) line["images"] = *s.num_images;
  line["checksum"] = s.checksum;
  return line;
}

// How a file would be trained on by what lies beside it.
ExampleRules rules_beside(const TokenFile& file, const DocumentIds& ids) {
  const bool has_mask = file_exists(file.path() + ".mask");
  ExampleRules rules{.loss_mask = has_mask,
                     .separate_documents = ids.any() || has_mask || file.has_document_index(),
                     .document_ids = ids};
  if (file_exists(ImageReferences::path_of(file.path()))) rules.images = ImageReferences::rules_of(file.path());
  return rules;
}

// That for which a file was packed, else the usual one, or what the file has.
int64_t length_beside(const TokenFile& file) {
  DataDescriptions descriptions;
  const nlohmann::json* description = descriptions.of(file.path());
  const nlohmann::json packed =
      description == nullptr ? nlohmann::json() : description->value("sequence_length", nlohmann::json());
  const int64_t length = packed.is_number_integer() ? packed.get<int64_t>() : DataConfig().sequence_length;
  return std::clamp<int64_t>(file.num_tokens(), 1, std::max<int64_t>(length, 1));
}

void show_sequences(const DataOptions& options, const Listed& listed) {
  std::string tokenizer;
  if (!options.tokenizer.empty()) {
    tokenizer = open_tokenizer(options.tokenizer, "--tokenizer");
  } else if (listed.config && !listed.config->data.tokenizer.empty()) {
    tokenizer = open_tokenizer(listed.config->data.tokenizer, "data.tokenizer");
  }
  SequencePrinter printer(options.show, tokenizer);
  if (listed.config) {
    printer.print(open_token_files(listed.sources, *listed.config));
    return;
  }
  for (const std::string& source : listed.sources) {
    for (const std::string& path : expand_source(source)) {
      if (printer.is_done()) return;
      const TokenFile file(path, listed.type);
      printer.print(
          {{path}, listed.type, length_beside(file), kAnyVocabulary, rules_beside(file, listed.document_ids)});
    }
  }
}

}  // namespace

int run_data(const DataOptions& options) {
  const Listed listed = list_files(options);
  warn_of_tokenizers(listed.sources, {});
  if (options.show > 0) {
    show_sequences(options, listed);
    return 0;
  }
  DataDescriptions descriptions;
  int64_t files = 0, tokens = 0;
  for (const std::string& source : listed.sources) {
    for (const std::string& path : expand_source(source)) {
      TokenFile file(path, listed.type, listed.vocab_size);
      warn_of_gaps(file.files(), {});
      const DataStatistics s = data_statistics(std::move(file), descriptions, listed.document_ids,
                                               listed.vocab_size, listed.image_token);
      ++files;
      tokens += s.num_tokens;
      if (options.json) {
        using Json = nlohmann::ordered_json;  // a path may be no UTF-8
        std::printf("%s\n", to_json(s).dump(-1, ' ', false, Json::error_handler_t::replace).c_str());
        continue;
      }
      std::string text = fmt::format("{}: {}, {}, {} tokens, ids {} to {}", s.path, name_of(s.format),
                                     name_of(s.type), s.num_tokens, s.min_id, s.max_id);
      if (s.num_documents)
        text += fmt::format(", {} document{}", *s.num_documents, *s.num_documents == 1 ? "" : "s");
      if (s.num_targets) text += fmt::format(", {} targets", *s.num_targets);
      if (s.num_images) text += fmt::format(", {} images", *s.num_images);
      std::printf("%s, checksum %s\n", text.c_str(), s.checksum.c_str());
    }
  }
  if (!options.json) {
    std::printf("%lld tokens in %lld file%s\n", static_cast<long long>(tokens), static_cast<long long>(files),
                files == 1 ? "" : "s");
  }
  return 0;
}

}  // namespace parka
