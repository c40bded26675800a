#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "engine/text/helper_process.h"

namespace parka {

// Text to token ids and back.
class TextCodec {
 public:
  TextCodec() = default;
  TextCodec& operator=(TextCodec&&) = delete;
  virtual ~TextCodec() = default;

  // The tokens before which a continuation ends.
  virtual const std::vector<int32_t>& stop_tokens() const = 0;
  // The ids of a prompt, beginning with what the tokenizer puts before a text. Not empty.
  virtual std::vector<int32_t> encode(const std::string& text) = 0;
  // The ids of each of the texts between images, the first beginning likewise. Any may be empty.
  virtual std::vector<std::vector<int32_t>> encode_pieces(const std::vector<std::string>& pieces) = 0;

  // The text of a continuation: after begin() with its prompt, next() with each token and end() return its pieces.
  virtual void begin(const std::vector<int32_t>& prompt) = 0;
  virtual std::string next(int32_t token) = 0;
  virtual std::string end() = 0;
};

// For a model without tokenizer that was trained on bytes (parka prepare --tokenizer bytes): ids 0 to 255
// are bytes, 256 ends a document, and no other id belongs to a text.
class ByteCodec : public TextCodec {
 public:
  // True if a vocabulary of this size is likely one of bytes.
  static bool fits(int64_t vocab_size);

  explicit ByteCodec(int64_t vocab_size);  // that fits

  const std::vector<int32_t>& stop_tokens() const override { return stop_tokens_; }
  std::vector<int32_t> encode(const std::string& text) override;
  std::vector<std::vector<int32_t>> encode_pieces(const std::vector<std::string>& pieces) override;
  void begin(const std::vector<int32_t>&) override {}
  std::string next(int32_t token) override { return {static_cast<char>(token)}; }
  std::string end() override { return {}; }

 private:
  std::vector<int32_t> stop_tokens_;
};

// Text to token ids and back by a tokenizer.json, which a process of scripts/tokenizer_helper.py reads. All
// functions throw Error(kBadInput) for what the user can fix, and Error(kIo) if that process dies.
class TextTokenizer : public TextCodec {
 public:
  enum class Use : uint8_t { kPrompts, kChat };

  // Takes a folder with a tokenizer.json; kChat needs a chat template there, too. Throws Error(kBadInput) also if
  // Python or a package of it is missing. Call it before anything takes long.
  TextTokenizer(const std::string& folder, Use use);

  // With kChat those before which an answer ends, too.
  const std::vector<int32_t>& stop_tokens() const override { return stop_tokens_; }
  std::vector<int32_t> encode(const std::string& text) override;
  std::vector<std::vector<int32_t>> encode_pieces(const std::vector<std::string>& pieces) override;
  // The ids of a conversation, a list of {"role", "content"}, up to where the assistant speaks. Needs kChat.
  std::vector<int32_t> encode_chat(const json& messages);

  // Pieces of a continuation are whole characters.
  void begin(const std::vector<int32_t>& prompt) override;
  std::string next(int32_t token) override;
  std::string end() override;

 private:
  PythonHelper helper_;
  std::vector<int32_t> stop_tokens_;
};

// That of a tokenizer's folder, or of bytes where there is none; null if such a vocabulary is not one of bytes.
std::unique_ptr<TextCodec> open_codec(const std::string& folder, int64_t vocab_size);

}  // namespace parka
