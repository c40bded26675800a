#include "data/token_files.h"

#include <glob.h>

#include <algorithm>
#include <filesystem>
#include <iterator>
#include <limits>
#include <span>
#include <string_view>
#include <utility>

#include "core/error.h"
#include "core/ignored_target.h"

namespace parka {
namespace {

// FNV-1a, 64 bits (Fowler, Noll, Vo): no more is asked of it than that a changed file gives another value.
class Fnv1a {
 public:
  void add(std::span<const std::byte> bytes) {
    for (std::byte b : bytes) value_ = (value_ ^ std::to_integer<uint64_t>(b)) * 0x100000001b3u;
  }
  void add(int64_t number) { add(std::as_bytes(std::span(&number, 1))); }
  uint64_t value() const { return value_; }

 private:
  uint64_t value_ = 0xcbf29ce484222325u;
};

std::string file_name(const ReadOnlyFile& file) { return std::filesystem::path(file.path()).filename().string(); }

// A model without a tower would read slots as text.
void refuse_images(const std::string& path, int64_t num_tokens) {
  if (!file_exists(ImageReferences::path_of(path))) return;
  const ImageReferences references(path, num_tokens, ImageReferences::rules_of(path));
  if (references.all().empty()) return;
  throw_bad_input(
      "{}: has {} images, and the model has no tower to see them; give model.vision as parka prepare-images has "
      "printed it, or take files of text alone",
      path, references.all().size());
}

void add_to(Fnv1a& hash, const ReadOnlyFile& file) {
  const std::string name = file_name(file);
  hash.add(static_cast<int64_t>(name.size()));
  hash.add(std::as_bytes(std::span(name)));
  hash.add(file.size());
  hash.add(file.ends());
}

// Refuses a file that a pattern takes beside token files. The list is that of scripts/text_data/readers.py.
void refuse_leftover(const std::string& source, const std::filesystem::path& path) {
  constexpr std::string_view kEnds[] = {"~",    ".bak",        ".tmp",      ".part",       ".partial", ".orig",
                                        ".old", ".crdownload", ".download", ".incomplete", ".aria2",   ".swp"};
  const std::string name = path.filename().string();
  const bool is_leftover = std::ranges::any_of(kEnds, [&](std::string_view end) { return name.ends_with(end); });
  if (is_leftover || (path.extension() == ".mask" && !file_exists(path.parent_path() / path.stem()))) {
    throw_bad_input(
        "\"{}\" takes {}, which {}; move it away, or write a pattern that does not take it", source, path.string(),
        is_leftover ? "seems to be left of an editor or a download"
                    : "is the mask of no file; a mask has the whole name of its token file before .mask");
  }
}

}  // namespace

std::vector<std::string> expand_source(const std::string& source, bool may_be_absent) {
  if (file_exists(source)) return {source};
  if (file_exists(source + ".idx") && file_exists(source + ".bin")) return {source + ".bin"};
  if (source.find_first_of("*?[") == std::string::npos) return {source};
  glob_t found{};
  const int status = glob(source.c_str(), 0, nullptr, &found);  // sorts by byte in the C locale, which is ours
  const std::vector<std::filesystem::path> matches(found.gl_pathv,
                                                   found.gl_pathv + (status == 0 ? found.gl_pathc : 0));
  globfree(&found);
  std::vector<std::string> files;
  for (const std::filesystem::path& path : matches) {
    if (!may_be_absent) refuse_leftover(source, path);
    const auto is_beside = [&](std::string_view extension) { return path.extension() == extension; };
    if (is_beside(".mask") || is_beside(".idx") || is_beside(".images") || is_beside(".pixels")) continue;
    std::error_code ignored;
    if (is_beside(".json") || std::filesystem::is_directory(path, ignored)) continue;  // of parka prepare
    files.push_back(path.string());
  }
  if (files.empty() && !may_be_absent)
    throw_bad_input("{}: no token file matches; check the path in the config's data section or on the command line",
                    source);
  return files;
}

TokenFiles::TokenFiles(const std::vector<std::string>& sources, TokenType raw_type, int64_t sequence_length,
                       int64_t vocab_size, const ExampleRules& rules)
    : raw_type_(raw_type), sequence_length_(sequence_length), vocab_size_(vocab_size), rules_(rules) {
  PARKA_REQUIRE(sequence_length > 0);
  PARKA_REQUIRE(vocab_size > 0 && vocab_size <= int64_t{std::numeric_limits<int32_t>::max()} + 1);
  if (sources.empty()) throw_bad_input("no token files are given; list them in the config's data section");
  entries_.reserve(sources.size());
  if (rules.images.any()) images_.emplace(rules.images);
  for (const std::string& source : sources) {
    const int64_t before = entries_.empty() ? 0 : num_sequences();
    for (const std::string& path : expand_source(source)) add_file(path);
    source_sequences_.push_back(num_sequences() - before);
  }
}

void TokenFiles::add_file(const std::string& path) {
  TokenFile file(path, raw_type_, vocab_size_);
  if (file.num_tokens() < sequence_length_) {
    throw_bad_input(
        "{}: {} tokens are fewer than one sequence of {}; remove the file, make it longer (parka prepare --eval-fraction), or lower "
        "data.sequence_length",
        path, file.num_tokens(), sequence_length_);
  }
  const bool by_marks = rules_.finds_marked_documents();
  std::vector<int64_t> document_starts;
  if (by_marks && file.has_document_index()) document_starts = file.read_document_starts();
  if (rules_.loss_mask || (by_marks && !file.has_document_index())) file.open_mask();
  if (images_)
    images_->add(path, file.num_tokens());
  else
    refuse_images(path, file.num_tokens());
  const int64_t before = entries_.empty() ? 0 : num_sequences();
  const int64_t end = before + file.num_tokens() / sequence_length_;
  entries_.push_back({std::move(file), end, std::move(document_starts)});
}

int64_t TokenFiles::num_sequences() const { return entries_.back().end_sequence; }

int64_t TokenFiles::num_tokens() const { return num_sequences() * sequence_length_; }

TokenFiles::Place TokenFiles::find(int64_t sequence) const {
  PARKA_REQUIRE(sequence >= 0 && sequence < num_sequences());
  const auto entry = std::upper_bound(entries_.begin(), entries_.end(), sequence,
                                      [](int64_t s, const Entry& e) { return s < e.end_sequence; });
  const int64_t begin_sequence = entry == entries_.begin() ? 0 : std::prev(entry)->end_sequence;
  const auto file = static_cast<size_t>(std::distance(entries_.begin(), entry));
  return {*entry, (sequence - begin_sequence) * sequence_length_, file};
}

void TokenFiles::read(int64_t sequence, int32_t* out) const {
  const Place place = find(sequence);
  place.entry.file.read(place.first_token, sequence_length_, vocab_size_, out);
}

// Sets kMarkDocumentStart where documents begin, and nowhere else.
void TokenFiles::mark_documents(const Place& place, const int32_t* tokens, std::vector<uint8_t>& marks) const {
  const bool by_ids = rules_.document_ids.any();
  if (!by_ids && !place.entry.file.has_document_index()) return;  // the marks as read
  for (uint8_t& mark : marks) mark &= static_cast<uint8_t>(~kMarkDocumentStart);
  if (by_ids) {
    DocumentFinder finder(rules_.document_ids);
    for (size_t t = 0; t < marks.size(); ++t) {
      if (finder.begins(tokens[t])) marks[t] |= kMarkDocumentStart;
    }
    return;
  }
  const std::vector<int64_t>& starts = place.entry.document_starts;
  for (auto start = std::lower_bound(starts.begin(), starts.end(), place.first_token);
       start != starts.end() && *start < place.first_token + sequence_length_; ++start) {
    marks[static_cast<size_t>(*start - place.first_token)] |= kMarkDocumentStart;
  }
}

int64_t TokenFiles::read_example(int64_t sequence, const Example& out) const {
  PARKA_REQUIRE((out.first_keys != nullptr) == rules_.separate_documents);
  const Place place = find(sequence);
  place.entry.file.read(place.first_token, sequence_length_, vocab_size_, out.tokens);
  std::vector<uint8_t> marks(static_cast<size_t>(sequence_length_), kMarkTarget);
  if (images_) {
    const std::vector<ImagePlace> images = images_->in_sequence(place.file, place.first_token, sequence_length_);
    images_->check_slots(place.file, place.entry.file.path(), place.first_token, images, out.tokens,
                         sequence_length_);
  }
  if (place.entry.file.has_mask()) place.entry.file.read_marks(place.first_token, sequence_length_, marks.data());
  if (rules_.separate_documents) mark_documents(place, out.tokens, marks);
  int64_t num_targets = 0;
  int32_t document = 0;
  for (int64_t t = 0; t < sequence_length_; ++t) {
    if (rules_.separate_documents) {
      if ((marks[static_cast<size_t>(t)] & kMarkDocumentStart) != 0) document = static_cast<int32_t>(t);
      out.first_keys[t] = document;
    }
    out.targets[t] = kIgnoreTarget;
    if (t + 1 == sequence_length_) break;
    const uint8_t next = marks[static_cast<size_t>(t + 1)];
    const bool masked = rules_.loss_mask && (next & kMarkTarget) == 0;
    const bool of_another_document = rules_.separate_documents && (next & kMarkDocumentStart) != 0;
    const bool in_image = rules_.images.any() && out.tokens[t + 1] == rules_.images.token;
    if (masked || of_another_document || in_image) continue;
    out.targets[t] = out.tokens[t + 1];
    ++num_targets;
  }
  return num_targets;
}

template <typename Has>
std::optional<size_t> TokenFiles::first_source_without(const Has& has) const {
  int64_t end = 0;
  for (size_t source = 0; source < source_sequences_.size(); ++source) {
    int64_t sequence = end;
    end += source_sequences_[source];
    while (sequence < end && !has(sequence, source)) ++sequence;
    if (sequence == end) return source;
  }
  return std::nullopt;
}

std::optional<size_t> TokenFiles::source_without_targets() const {
  const auto S = static_cast<size_t>(sequence_length_);
  std::vector<int32_t> tokens(S), targets(S), first_keys(rules_.separate_documents ? S : 0);
  const Example example = {tokens.data(), targets.data(), rules_.separate_documents ? first_keys.data() : nullptr};
  return first_source_without([&](int64_t sequence, size_t) { return read_example(sequence, example) > 0; });
}

TokenFiles::Estimate TokenFiles::estimate() const {
  constexpr int64_t kMostSequences = 64, kMostTokens = int64_t{1} << 18;
  const auto S = static_cast<size_t>(sequence_length_);
  const int64_t count =
      std::clamp<int64_t>(kMostTokens / sequence_length_, 1, std::min(kMostSequences, num_sequences()));
  std::vector<int32_t> tokens(S), targets(S), first_keys(rules_.separate_documents ? S : 0);
  const Example example = {tokens.data(), targets.data(), rules_.separate_documents ? first_keys.data() : nullptr};
  constexpr int64_t kLongRun = 16;  // which no text has
  double num_targets = 0, inside = 0, documents = 0, mixed = 0, begun = 0, without = 0, repeated = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t own_targets = read_example(num_sequences() / count * i, example);
    num_targets += static_cast<double>(own_targets);
    without += static_cast<int>(own_targets == 0);
    for (size_t t = 1, run = 1; t < S; ++t) {
      run = targets[t] == targets[t - 1] && targets[t] != kIgnoreTarget ? run + 1 : 1;
      if (run >= kLongRun) repeated += run == kLongRun ? kLongRun : 1;
    }
    for (size_t begin = 0, end = 0; begin < first_keys.size(); begin = end) {
      while (end < S && first_keys[end] == static_cast<int32_t>(begin)) ++end;
      // Those of one token, as each of padding may be, are passed over.
      if (end - begin < 2) continue;
      inside += static_cast<double>(end - begin);
      documents += static_cast<int>(begin > 0);
      const auto own = std::span(targets).subspan(begin, end - begin - 1);
      const int64_t ignored = std::ranges::count(own, kIgnoreTarget);
      const bool is_mixed = ignored > 1 && ignored < std::ssize(own);  // one may be the end of a document
      mixed += static_cast<int>(is_mixed);
      begun += static_cast<int>(is_mixed && own.front() != kIgnoreTarget);
    }
  }
  constexpr double kFewest = 4, kNearlyAll = 0.9;
  return {num_targets / static_cast<double>(count * sequence_length_), documents > 0 ? inside / documents : 0,
          mixed >= kFewest && begun >= kNearlyAll * mixed, without / static_cast<double>(count),
          num_targets > 0 ? repeated / num_targets : 0};
}

bool TokenFiles::shows_documents(int64_t sequence) const {
  const Place place = find(sequence);
  if (rules_.document_ids.any()) {
    std::vector<int32_t> tokens(static_cast<size_t>(sequence_length_));
    read(sequence, tokens.data());
    const DocumentIds& ids = rules_.document_ids;
    return std::ranges::any_of(tokens, [&](int32_t id) { return id == ids.start || id == ids.end; });
  }
  if (place.entry.file.has_document_index()) return true;
  std::vector<uint8_t> marks(static_cast<size_t>(sequence_length_));
  place.entry.file.read_marks(place.first_token, sequence_length_, marks.data());
  return std::ranges::any_of(marks, [](uint8_t mark) { return (mark & kMarkDocumentStart) != 0; });
}

std::optional<size_t> TokenFiles::source_without_documents() const {
  constexpr int64_t kLongestDocument = int64_t{1} << 16;  // tokens
  if (!rules_.separate_documents) return std::nullopt;
  const bool may_be_one = source_sequences_.size() > 1 && rules_.document_ids.any();
  return first_source_without([&](int64_t sequence, size_t source) {
    const int64_t tokens = source_sequences_[source] * sequence_length_;
    return (may_be_one && tokens < kLongestDocument) || shows_documents(sequence);
  });
}

std::vector<ImagePlace> TokenFiles::images_of(int64_t sequence) const {
  PARKA_REQUIRE(images_.has_value());
  const Place place = find(sequence);
  return images_->in_sequence(place.file, place.first_token, sequence_length_);
}

int64_t TokenFiles::most_images() const {
  int64_t most = 0, before = 0;
  for (size_t file = 0; images_ && file < entries_.size(); ++file) {
    const int64_t end = entries_[file].end_sequence;
    most = std::max(most, images_->most_in_a_sequence(file, end - before, sequence_length_));
    before = end;
  }
  return most;
}

std::vector<const ReadOnlyFile*> TokenFiles::files() const {
  std::vector<const ReadOnlyFile*> all;
  for (const Entry& entry : entries_) {
    for (const ReadOnlyFile* file : entry.file.files()) all.push_back(file);
  }
  if (images_) {
    for (const ReadOnlyFile* file : images_->files()) all.push_back(file);
  }
  return all;
}

std::vector<const TokenFile*> TokenFiles::token_files() const {
  std::vector<const TokenFile*> all;
  for (const Entry& entry : entries_) all.push_back(&entry.file);
  return all;
}

uint64_t TokenFiles::fingerprint() const {
  Fnv1a hash;
  hash.add(sequence_length_);
  hash.add(size_of(raw_type_));
  for (const ReadOnlyFile* file : files()) add_to(hash, *file);
  return hash.value();
}

std::vector<TokenFiles::FileIdentity> TokenFiles::identities() const {
  std::vector<FileIdentity> all;
  for (const ReadOnlyFile* file : files()) {
    Fnv1a hash;
    add_to(hash, *file);
    all.push_back({file_name(*file), file->size(), hash.value()});
  }
  return all;
}

}  // namespace parka
