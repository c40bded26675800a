#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "core/ignored_target.h"
#include "data/token_files.h"
#include "engine/commands/commands.h"
#include "engine/commands/data_statistics.h"
#include "engine/config/config_checks.h"
#include "engine/config/config_io.h"
#include "engine/config/data_description.h"
#include "engine/config/data_sources.h"
#include "engine/evaluation/evaluation.h"
#include "engine/files/json_text.h"
#include "engine/huggingface/huggingface_origin.h"
#include "engine/text/text_codec.h"
#include "engine/text/tokenizer_files.h"

namespace parka {
namespace {

// Prints sequences of token files as a model is trained on them, in the order of the files: their text, or ids
// where no tokenizer is found, with its targets and the beginnings of documents marked at the left.
class SequencePrinter {
 public:
  // `tokenizer`: folder of the tokenizer; empty: the one beside each token file. Prints `count` sequences at most.
  SequencePrinter(int64_t count, std::string tokenizer) : left_(count), tokenizer_(std::move(tokenizer)) {}

  // Throws Error(kBadInput) as TokenFiles does, and for a tokenizer that cannot be used.
  void print(const TokenFiles& files);
  bool is_done() const { return left_ == 0; }

 private:
  int64_t left_;
  std::string tokenizer_;
};

constexpr int64_t kBytes = 256;  // ids of a tokenizer of bytes that are text

// Turns ids into text.
class IdText {
 public:
  IdText(const std::string& token_file, const std::string& tokenizer) {
    const std::filesystem::path file = token_file;
    const std::filesystem::path beside = file.parent_path() / kTokenizerFolder;
    std::string folder = tokenizer;
    if (folder.empty() && file_exists((beside / kTokenizerName).string())) folder = beside.string();
    if (!folder.empty()) {
      codec_ = std::make_unique<TextTokenizer>(folder, TextTokenizer::Use::kPrompts);
      special_ = special_tokens(folder);
      return;
    }
    DataDescriptions descriptions;
    const nlohmann::json* description = descriptions.of(file);
    if (description == nullptr || described_tokenizer(*description) != "bytes") return;
    codec_ = std::make_unique<ByteCodec>(kBytes + 1);
    is_of_bytes_ = true;
  }

  // The text of tokens [first, end), as it is behind those before it.
  std::string of(std::span<const int32_t> tokens, size_t first, size_t end) {
    std::string text;
    bool is_going_on = false;
    while (first < end) {
      const std::string name = name_of_token(tokens[first]);
      size_t next = first + 1;
      if (name.empty()) {
        if (!is_going_on) codec_->begin(context(tokens, first));
        is_going_on = true;
        text += codec_->next(tokens[first]);
      } else {
        if (is_going_on) text += codec_->end();
        is_going_on = false;
        while (next < end && tokens[next] == tokens[first]) ++next;  // as padding, and slots of images
        text += next == first + 1 ? name : fmt::format("{}(x {})", name, next - first);
        if (codec_ == nullptr) text += ' ';
      }
      first = next;
    }
    return is_going_on ? text + codec_->end() : text;
  }

 private:
  // The name of a token that is no text; else empty.
  std::string name_of_token(int32_t id) const {
    if (codec_ == nullptr) return fmt::format("{}", id);
    if (is_of_bytes_) return id < kBytes ? "" : fmt::format("<{}>", id);
    const auto found = special_.find(id);
    return found == special_.end() ? "" : found->second;
  }

  static std::vector<int32_t> context(std::span<const int32_t> tokens, size_t first) {
    constexpr size_t kContext = 16;
    const auto before = tokens.first(first).last(std::min(first, kContext));
    return {before.begin(), before.end()};
  }

  std::unique_ptr<TextCodec> codec_;  // null where ids are shown
  bool is_of_bytes_ = false;
  std::map<int32_t, std::string> special_;
};

// Lines of `text`, each behind what stands in front of it; an end of a line is shown, too.
std::string marked_lines(std::string_view mark, std::string_view text) {
  std::string lines = fmt::format("{:8} | ", mark);
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (c == '\n') {
      lines += "\\n";
      if (i + 1 < text.size()) lines += fmt::format("\n{:8} | ", mark == "target" ? mark : "");
    } else if (is_control(c)) {
      lines += fmt::format("\\x{:02x}", c);
    } else {
      lines += c;
    }
  }
  return lines + "\n";
}

// A sequence with what is learnt in it.
struct ShownSequence {
  std::vector<int32_t> tokens, targets, first_keys;

  bool is_target(size_t t) const { return t > 0 && targets[t - 1] != kIgnoreTarget; }
  bool begins(size_t t) const { return !first_keys.empty() && first_keys[t] == static_cast<int32_t>(t); }
};

std::string describe(const ShownSequence& sequence, IdText& ids) {
  const size_t size = sequence.tokens.size();
  std::string lines;
  for (size_t first = 0; first < size;) {
    size_t end = first + 1;
    while (end < size && sequence.is_target(end) == sequence.is_target(first) && !sequence.begins(end)) ++end;
    const std::string_view mark = sequence.begins(first) ? "document" : sequence.is_target(first) ? "target" : "";
    lines += marked_lines(mark, ids.of(sequence.tokens, first, end));
    first = end;
  }
  return lines;
}

void SequencePrinter::print(const TokenFiles& files) {
  const int64_t length = files.sequence_length();
  const auto S = static_cast<size_t>(length);
  const bool separate = files.rules().separate_documents;
  ShownSequence shown{std::vector<int32_t>(S), std::vector<int32_t>(S), std::vector<int32_t>(separate ? S : 0)};
  int64_t sequence = 0;
  for (const TokenFile* file : files.token_files()) {
    if (is_done()) return;
    IdText ids(file->path(), tokenizer_);
    for (int64_t i = 0; i < file->num_tokens() / length && !is_done(); ++i, ++sequence, --left_) {
      const int64_t targets = files.read_example(
          sequence, {shown.tokens.data(), shown.targets.data(), separate ? shown.first_keys.data() : nullptr});
      std::printf("%s, sequence %lld: %lld tokens, %lld targets\n%s\n", file->path().c_str(),
                  static_cast<long long>(i), static_cast<long long>(length), static_cast<long long>(targets),
                  describe(shown, ids).c_str());
    }
  }
}

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
    for_each_description(listed.sources, [&](const std::string& file, const nlohmann::json& description) {
      check_described_type(file, description,
                           listed.type);  // ids of 32 bits, as twice as many, are all in a large vocabulary
    });
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
  if (!config.data.train.empty()) warn_of_training_files(open_training_files(config), config);
  check_present_tokenizer(config);
  check_start(config);
  warn_of_odd_values(config);
  listed.sources = held_out_sources(config);
  if (!listed.sources.empty()) open_token_files(listed.sources, config);
  listed.sources.insert(listed.sources.begin(), config.data.train.begin(), config.data.train.end());
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

ordered_json to_json(const DataStatistics& s) {
  ordered_json line = {{"file", s.path},         {"format", name_of(s.format)}, {"token_dtype", name_of(s.type)},
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

// The sequence length for which a file was packed, else the usual one, or the file's own.
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
      warn_of_repeats({&file});
      const DataStatistics s = data_statistics(std::move(file), descriptions, listed.document_ids,
                                               listed.vocab_size, listed.image_token);
      ++files;
      tokens += s.num_tokens;
      if (options.json) {
        using Json = ordered_json;  // a path may be no UTF-8
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
