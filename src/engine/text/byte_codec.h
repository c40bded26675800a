#pragma once
#include "engine/text/text_codec.h"

namespace parka {

// For a model without tokenizer that was trained on bytes (scripts/prepare_data.py --tokenizer bytes): ids 0 to 255
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

}  // namespace parka
