#include <cstdio>
#include <optional>

#include <nlohmann/json.hpp>

#include "engine/commands/commands.h"
#include "engine/commands/data_statistics.h"
#include "engine/config/config_io.h"
#include "engine/config/data_sources.h"
#include "engine/evaluation/evaluation_suite.h"

namespace parka {
namespace {

struct Listed {
  std::vector<std::string> sources;
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

}  // namespace

int run_data(const DataOptions& options) {
  const Listed listed = list_files(options);
  warn_of_tokenizers(listed.sources, {});
  int64_t files = 0, tokens = 0;
  for (const std::string& source : listed.sources) {
    for (const std::string& path : expand_source(source)) {
      TokenFile file(path, listed.type, listed.vocab_size);
      warn_of_gaps(file.files(), {});
      const DataStatistics s =
          data_statistics(std::move(file), listed.document_ids, listed.vocab_size, listed.image_token);
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
