#include "engine/text/byte_codec.h"

namespace parka {
namespace {

constexpr int32_t kEndOfDocument = 256;
constexpr int64_t kMaxByteVocabulary = 1024;  // more rows than that are another tokenizer's

}  // namespace

bool ByteCodec::fits(int64_t vocab_size) { return vocab_size > kEndOfDocument && vocab_size <= kMaxByteVocabulary; }

ByteCodec::ByteCodec(int64_t vocab_size) {
  for (int64_t id = kEndOfDocument; id < vocab_size; ++id) stop_tokens_.push_back(static_cast<int32_t>(id));
}

std::vector<int32_t> ByteCodec::encode(const std::string& text) {
  std::vector<int32_t> tokens;
  for (unsigned char byte : text) tokens.push_back(byte);
  if (tokens.empty()) tokens.push_back(kEndOfDocument);  // what stands before every document but the first
  return tokens;
}

std::vector<std::vector<int32_t>> ByteCodec::encode_pieces(const std::vector<std::string>& pieces) {
  std::vector<std::vector<int32_t>> tokens;
  for (const std::string& piece : pieces) {
    std::vector<int32_t>& ids = tokens.emplace_back();
    for (unsigned char byte : piece) ids.push_back(byte);
  }
  return tokens;
}

}  // namespace parka
