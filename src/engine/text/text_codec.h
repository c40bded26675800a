#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace parka {

// Text to token ids and back.
class TextCodec {
 public:
  TextCodec() = default;
  TextCodec(const TextCodec&) = delete;
  TextCodec& operator=(const TextCodec&) = delete;
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

}  // namespace parka
