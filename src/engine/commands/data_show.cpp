#include "engine/commands/data_show.h"

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include <fmt/format.h>

#include "core/ignored_target.h"
#include "engine/config/data_description.h"
#include "engine/files/json_text.h"
#include "engine/text/byte_codec.h"
#include "engine/text/text_tokenizer.h"
#include "engine/text/tokenizer_files.h"

namespace parka {
namespace {

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

}  // namespace

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

}  // namespace parka
