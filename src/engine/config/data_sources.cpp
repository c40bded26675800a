#include "engine/config/data_sources.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <map>
#include <optional>
#include <regex>
#include <set>
#include <span>

#include <fmt/ranges.h>
#include "core/error.h"
#include "core/log/log.h"
#include "data/xxh3.h"
#include "engine/config/data_description.h"
#include "engine/files/file_io.h"
#include "engine/files/json_text.h"
#include "model/vision/image_embedding.h"

namespace parka {

std::vector<NamedFiles> parse_sets(const std::vector<std::string>& entries, const char* key) {
  std::vector<NamedFiles> sets;
  for (const std::string& entry : entries) {
    const size_t equals = entry.find('=');
    if (equals == std::string::npos || equals == 0 || equals + 1 == entry.size()) {
      throw_bad_input("{}: \"{}\" is not of the form NAME=FILE", key, printable(entry));
    }
    const std::string name = entry.substr(0, equals), file = entry.substr(equals + 1);
    const auto found = std::ranges::find_if(sets, [&](const NamedFiles& set) { return set.name == name; });
    if (found != sets.end()) {
      found->files.push_back(file);
    } else {
      sets.push_back({name, {file}});
    }
  }
  return sets;
}

std::vector<std::string> held_out_sources(const Config& config) {
  std::vector<std::string> sources = config.data.eval;
  for (const NamedFiles& set : parse_sets(config.evaluation.sets, "evaluation.sets")) {
    sources.insert(sources.end(), set.files.begin(), set.files.end());
  }
  return sources;
}

ExampleRules example_rules(const Config& config) {
  const DataConfig& data = config.data;
  ExampleRules rules{.loss_mask = data.loss_mask,
                     .separate_documents = data.documents == DocumentMode::kSeparate,
                     .document_ids = data.document_ids()};
  const VisionConfig& vision = config.model.vision;
  if (vision.exists()) {
    rules.images = {vision.image_token, ImageEmbedding::num_slots(vision), vision.tower.image_size};
  }
  return rules;
}

namespace {

bool is_pattern(const std::string& source) {
  return source.find_first_of("*?[") != std::string::npos && !file_exists(source);
}

// Those of sources that are there.
std::vector<std::string> present_files(const std::vector<std::string>& sources) {
  std::vector<std::string> present;
  for (const std::string& source : sources) {
    std::ranges::copy_if(expand_source(source, true), std::back_inserter(present), file_exists);
  }
  return present;
}

// 16 bits hold no id of a larger vocabulary, so they are not meant, unless what made the file says so.
void check_reach(const TokenFile& file, bool is_described, const Config& config) {
  if (file.format() != TokenFormat::kRaw || file.type() != TokenType::kUint16 || is_described) return;
  if (config.model.vocab_size <= 65536) return;
  throw_bad_input(
      "{}: raw ids of data.token_dtype=uint16 do not reach model.vocab_size = {}; set "
      "data.token_dtype=uint32, and write ids of 16 bits again as uint32",
      file.path(), config.model.vocab_size);
}

// A mask is there to be used, and none has the name of its token file without .npy.
void check_mask(const TokenFile& file) {
  const std::string misnamed = fs::path(file.path()).replace_extension(".mask").string();
  if (fs::path(file.path()).has_extension() && misnamed != file.path() && file_exists(misnamed)) {
    throw_bad_input("{}: is not read; rename it to {}.mask if it is the mask of that file, or move it away",
                    misnamed, file.path());
  }
  if (file.has_mask() || !file_exists(file.path() + ".mask")) return;
  throw_bad_input(
      "{}.mask: marks the tokens to be learnt, and data.loss_mask=false learns all; set "
      "data.loss_mask=true, or move the mask away",
      file.path());
}

// Refuses a pattern that takes what parka prepare has made for the other use, and exchanged files. Warns
// of a file of others whose name says that it is for the other use, unless an entry of data.train says so, too.
void check_splits(const Config& config) {
  DataDescriptions descriptions;
  std::set<fs::path> exchanged;  // folders of which held-out files are trained on, by their names
  for (const bool trains : {true, false}) {
    const char* const key = trains ? "data.train" : "data.eval or evaluation.sets";
    const char* const use = trains ? "held out" : "for training";
    const char* const words = trains ? "val|valid|validation|test|dev|eval|held_?out" : "train(ing)?";
    const std::regex named(fmt::format("(^|[^a-z])({})([^a-z]|$)", words), std::regex::icase);
    bool is_told = false;
    for (const std::string& source : trains ? config.data.train : held_out_sources(config)) {
      const bool is_written = !is_pattern(source) || std::regex_search(fs::path(source).filename().string(), named);
      for (const fs::path file : expand_source(source, !trains)) {
        if (descriptions.of(file, trains ? "eval" : "train") == nullptr) {
          if (is_told || (trains && is_written) || !std::regex_search(file.filename().string(), named)) continue;
          log_warning("{}: \"{}\" takes {}, which is named as {}; check that this is meant", key, source,
                      file.string(), use);
          is_told = true;
        } else if (is_pattern(source) || (!trains && exchanged.contains(file.parent_path()))) {
          throw_bad_input(
              "{}: \"{}\" takes {}, which is {}, as {} says; write \"{}\"", key, source, file.string(), use,
              description_path(file).string(),
              (file.parent_path() / ((trains ? "train-*" : "eval-*") + file.extension().string())).string());
        } else if (trains) {
          exchanged.insert(file.parent_path());
        }
      }
    }
  }
  descriptions.warn_of_others();
}

// A mask that says the same of all its first tokens, as one of another meaning may; or which tells targets from
// others, and only its marks of documents are read. Returns true if it is told.
bool warn_of_mask(const TokenFile& file, bool has_targets) {
  constexpr int64_t kFirst = 1 << 14;
  std::vector<uint8_t> marks(static_cast<size_t>(std::min(kFirst, file.num_tokens())));
  file.read_marks(0, std::ssize(marks), marks.data());
  const auto targets = std::ranges::count_if(marks, [](uint8_t mark) { return (mark & kMarkTarget) != 0; });
  if ((targets == 0 || targets == std::ssize(marks)) != has_targets) return false;
  log_warning("{}.mask: of the first {} tokens it excludes {}; {}", file.path(), marks.size(),
              std::ssize(marks) - targets,
              has_targets ? "check that 1 marks what is to be learnt" : "data.loss_mask=false learns them, too");
  return true;
}

// Hashes of the first and of the last 4 KiB of a file; none of what is one byte again and again, as padding.
std::vector<std::pair<bool, uint64_t>> hashes_of_ends(const ReadOnlyFile& file) {
  const std::vector<std::byte> both = file.ends();
  std::vector<std::pair<bool, uint64_t>> hashes;
  for (const bool is_end : {false, true}) {
    const auto bytes = std::span(both).subspan(is_end ? both.size() / 2 : 0, both.size() / 2);
    if (std::ranges::any_of(bytes, [&](std::byte b) { return b != bytes[0]; }))
      hashes.emplace_back(is_end, xxh3_64(bytes));
  }
  return hashes;
}

// The facts that are known of files of data.train.
struct Trained {
  std::map<FileId, std::string> files;
  std::map<std::pair<int64_t, uint64_t>, std::string> contents;  // of sizes and ends
  std::map<std::pair<bool, uint64_t>, std::string> ends;
  std::map<std::pair<bool, uint64_t>, std::string> begins;  // from the first token on, and from the second

  // Throws Error(kBadInput) if the tokens are those of another file without its first, as labels are.
  void check_begin(const TokenFile& file) {
    constexpr int64_t kTokens = 1024, kLeast = 32;
    std::vector<int32_t> ids(static_cast<size_t>(std::min(kTokens, file.num_tokens() - 1) + 1));
    file.read(0, std::ssize(ids), kAnyVocabulary, ids.data());
    if (std::ssize(ids) <= kLeast ||
        std::ranges::equal(std::span(ids).subspan(1), std::span(ids).first(ids.size() - 1)))
      return;
    for (const bool is_later : {false, true}) {
      const uint64_t hash = xxh3_64(std::as_bytes(std::span(ids).subspan(is_later ? 1 : 0, ids.size() - 1)));
      if (const auto found = begins.find({!is_later, hash}); found != begins.end()) {
        throw_bad_input(
            "data.train: {} has the tokens of {}, one token {}, as labels and inputs; list the inputs alone",
            file.path(), found->second, is_later ? "later" : "earlier");
      }
      begins.try_emplace({is_later, hash}, file.path());
    }
  }
};

// The files of data.train. Throws Error(kBadInput) if a file is there by several entries, unless one entry is
// written twice: then that is meant, and told. Copies are told by their size and ends.
Trained distinct_files(const TokenFiles& training, const Config& config) {
  Trained trained;
  std::map<FileId, const std::string*> entries;
  bool is_told = false;
  const std::vector<const TokenFile*> opened = training.token_files();
  auto next = opened.begin();
  for (const std::string& source : config.data.train) {
    for (size_t left = expand_source(source).size(); left > 0; --left) {
      const TokenFile& tokens = **next++;
      const ReadOnlyFile& file = *tokens.files().front();
      const std::optional<FileId> id = file_id(file.path());
      if (!id) continue;
      const auto [same, is_new] = trained.files.emplace(*id, file.path());
      const std::string* entry = entries.emplace(*id, &source).first->second;
      if (!is_new && (entry == &source || *entry != source)) {
        throw_bad_input("data.train: {} is the same file as {}, which \"{}\" takes; take it out of one",
                        file.path(), same->second, *entry);
      }
      if (is_new) trained.check_begin(tokens);
      for (const auto& hash : hashes_of_ends(file)) trained.ends.try_emplace(hash, file.path());
      const auto [copy, is_other] = trained.contents.try_emplace({file.size(), xxh3_64(file.ends())}, file.path());
      if (is_other || is_told) continue;
      log_warning("data.train: {} is trained on twice, as {}, too", file.path(), copy->second);
      is_told = true;
    }
  }
  return trained;
}

const std::string* find_in(const auto& map, const auto& key) {
  const auto found = map.find(key);
  return found == map.end() ? nullptr : &found->second;
}

// Pieces of a file of ids, spread over it, each without what ends documents, unless it is one id again and again.
std::set<std::string> pieces_of(const ReadOnlyFile& part, size_t width, int64_t end) {
  constexpr int64_t kCount = 8, kBytes = 512, kLeast = 128;
  std::set<std::string> found;
  for (int64_t i = 0; i < kCount; ++i) {
    std::string text(static_cast<size_t>(std::min(kBytes, part.size())), 0), longest;
    part.read((part.size() - std::ssize(text)) * (2 * i + 1) / (8 * kCount) * 4,
              std::as_writable_bytes(std::span(text)));
    for (size_t first = 0, at = 0; at <= text.size(); at += width) {
      if (at + width <= text.size() && std::memcmp(&text[at], &end, width) != 0) continue;
      if (at - first > longest.size()) longest = text.substr(first, at - first);
      first = at + width;
    }
    const bool is_varied = longest.find_first_not_of(longest.substr(0, width)) != longest.npos;
    if (is_varied && std::ssize(longest) >= kLeast) found.insert(longest);
  }
  return found;
}

// The first of `files` that has a piece of `part`; null where none has, or `left`, the bytes that may be read, do
// not tell.
const std::string* file_with(const ReadOnlyFile& part, const std::vector<const TokenFile*>& files, int64_t end,
                             int64_t& left) {
  constexpr int64_t kPiece = 1 << 20, kLongest = 512;
  const std::set<std::string> pieces = pieces_of(part, static_cast<size_t>(size_of(files.front()->type())), end);
  std::string piece;
  for (const TokenFile* tokens : files) {
    const ReadOnlyFile& file = *tokens->files().front();
    if ((left -= file.size()) < 0) return nullptr;
    for (int64_t begin = 0; !pieces.empty() && begin < file.size(); begin += kPiece) {
      piece.resize(static_cast<size_t>(std::min(kPiece + kLongest, file.size() - begin)));
      file.read(begin, std::as_writable_bytes(std::span(piece)));
      for (const std::string& sought : pieces)
        if (memmem(piece.data(), piece.size(), sought.data(), sought.size()) != nullptr) return &file.path();
    }
  }
  return nullptr;
}

// Files are the same by any path, and copies are.
void check_held_out(const Trained& trained, const TokenFiles& training, const Config& config) {
  const std::vector<const TokenFile*> opened = training.token_files();
  DataDescriptions descriptions;
  const json* made = descriptions.of(opened.front()->path());
  const json eos = made != nullptr ? made->value("eos", json()) : json();
  const DocumentIds ids = config.data.document_ids();
  const int64_t end = ids.any() || !eos.is_number_integer() ? std::max(ids.start, ids.end) : eos.get<int64_t>();
  int64_t left = 1 << 27;
  for (fs::path path : present_files(held_out_sources(config))) {
    if (path.extension() == ".idx") path.replace_extension(".bin");
    const ReadOnlyFile file(path.string());
    const auto hashes = hashes_of_ends(file);
    const std::optional<FileId> id = file_id(path.string());
    const std::string* there = id ? find_in(trained.files, *id) : nullptr;
    if (there == nullptr && !hashes.empty())
      there = find_in(trained.contents, std::pair(file.size(), xxh3_64(file.ends())));
    if (there != nullptr) {
      throw_bad_input(
          "{}: is in data.train and in data.eval or evaluation.sets{}, so its loss would tell nothing; take it out of "
          "one of them",
          path.string(), *there == path.string() ? "" : ", there as " + *there);
    }
    for (const auto& hash : hashes) there = there == nullptr ? find_in(trained.ends, hash) : there;
    if (there == nullptr) there = file_with(file, opened, end, left);
    if (there == nullptr) continue;
    log_warning(
        "data.eval or evaluation.sets: {} has tokens of {} of data.train, and on them the loss is lower than on new text; "
        "take them out of one of the two, if they are more than a few (parka prepare drops equal documents, and none that "
        "differ a little)",
        path.string(), *there);
  }
}

}  // namespace

TokenFiles open_token_files(const std::vector<std::string>& sources, const Config& config) {
  DataDescriptions descriptions;
  std::set<const json*> told;
  for (const std::string& source : sources) {
    const std::vector<std::string> expanded = expand_source(source);
    if (is_pattern(source)) descriptions.check_complete(source, expanded);
    for (const std::string& file : expanded) {
      const json* description = descriptions.of(file);
      if (description == nullptr) continue;
      check_described(file, *description, config);
      // Tokenizers of published models have ids for which their models have no rows, and text seldom has them.
      if (told.insert(description).second) warn_of_vocabulary(file, *description, config.model.vocab_size);
    }
  }
  TokenFiles files(sources, config.data.token_dtype, config.data.sequence_length, config.model.vocab_size,
                   example_rules(config));
  bool is_mask_told = false;
  for (const TokenFile* file : files.token_files()) {
    const bool is_described = descriptions.of(file->path()) != nullptr;
    check_reach(*file, is_described, config);
    check_mask(*file);
    const bool is_read = file->has_mask() && !(config.data.loss_mask && is_described);
    if (is_read && !is_mask_told) is_mask_told = warn_of_mask(*file, config.data.loss_mask);
  }
  for (const ReadOnlyFile* file : files.files()) descriptions.check_content(*file);
  const int64_t most = files.most_images();
  if (most > config.data.images_per_sequence) {
    throw_bad_input(
        "a sequence of {} has {} images, more than data.images_per_sequence = {}; make that larger, or prepare the "
        "data with a smaller --max-images",
        fmt::join(sources, ", "), most, config.data.images_per_sequence);
  }
  return files;
}

TokenFiles open_training_files(const Config& config) {
  check_splits(config);
  TokenFiles files = open_token_files(config.data.train, config);
  check_held_out(distinct_files(files, config), files, config);
  if (const auto source = files.source_without_documents()) {
    throw_bad_input(
        "data.train: {} has {}, so that data.documents=separate would keep nothing apart; {}, or "
        "data.documents=joined",
        config.data.train[*source],
        config.data.document_ids().any() ? "no token of data.document_start or data.document_end"
                                         : "no mark of 2 in its masks, as a document begins with (docs/data.md)",
        config.data.document_ids().any() ? "set the id that its documents begin or end with"
                                         : "make masks with marks, or set data.document_end");
  }
  if (!files.targets_vary()) return files;
  if (const auto source = files.source_without_targets()) {
    throw_bad_input("data.train: none of {} sequences of {} has a target; check the file, and the mask beside it",
                    files.source_sequences()[*source], config.data.train[*source]);
  }
  return files;
}

void warn_of_training_files(const TokenFiles& files, const Config& config) {
  constexpr int64_t kFewestIds = 4096;
  constexpr double kShortDocument = 16;
  int64_t used = 0, seen = 0;  // ids
  for (const TokenFile* file : files.token_files()) {
    for (const std::vector<int32_t>& ids : file->sample_ids(kAnyVocabulary)) {
      seen += std::ssize(ids);
      for (const int32_t id : ids) used = std::max(used, int64_t{id} + 1);
    }
    if (4 * used > config.model.vocab_size) break;
  }
  // Published models have the rows that they have.
  if (4 * used <= config.model.vocab_size && seen >= kFewestIds && config.checkpoint.init_from.empty()) {
    log_warning(
        "model.vocab_size = {}: ids of data.train are below {}, by a few pages; set the size of their tokenizer, rounded "
        "up",
        config.model.vocab_size, used);
  }
  if (!files.rules().loss_mask && !files.rules().separate_documents) return;
  const TokenFiles::Estimate few = files.estimate();
  if (few.document_length > 0 && few.document_length < kShortDocument) {
    log_warning(
        "data.documents=separate: documents have about {:.0f} tokens, and a token attends to its own alone; check "
        "data.document_start and data.document_end, or the marks of masks",
        few.document_length);
  }
  if (few.begins_with_targets) {
    log_warning(
        "{}.mask: nearly all documents of data.train begin with targets and go on without, as where questions are learnt; "
        "check that 1 marks what is to be learnt",
        files.token_files().front()->path());
  }
  if (!files.rules().loss_mask) return;
  constexpr double kFewTargets = 0.02, kManyWithout = 0.25, kManyRepeated = 0.2;
  const auto warn = [&](double share, const char* what) {
    log_warning(
        "data.loss_mask: by the masks of data.train, {:.1f} % of the {}; check that 1 marks what is to be learnt",
        100 * share, what);
  };
  if (few.targets < kFewTargets && !files.rules().images.any()) warn(few.targets, "tokens are targets");
  if (few.without_targets >= kManyWithout) warn(few.without_targets, "sequences have no target");
  if (few.repeated >= kManyRepeated) warn(few.repeated, "targets are one id again and again, as padding");
}

void check_present_files(Config config) {
  const auto keep_present = [](std::vector<std::string>& sources) {
    std::erase_if(sources, [](const std::string& source) { return present_files({source}).empty(); });
  };
  keep_present(config.data.train);
  DataDescriptions descriptions;
  const auto check_all = [&](const TokenFiles& files) {
    for (const ReadOnlyFile* file : files.files()) {
      descriptions.check_content(*file, [&] { return checksum_of(*file); });
    }
  };
  if (!config.data.train.empty()) {
    const TokenFiles training = open_training_files(config);
    warn_of_training_files(training, config);
    check_all(training);
  }
  std::vector<std::string> held_out = held_out_sources(config);
  keep_present(held_out);
  if (!held_out.empty()) check_all(open_token_files(held_out, config));
}

}  // namespace parka
