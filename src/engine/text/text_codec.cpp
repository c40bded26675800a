#include "engine/text/text_codec.h"

#include "core/error.h"

namespace parka {
namespace {

constexpr int32_t kEndOfDocument = 256;
constexpr int64_t kMaxByteVocabulary = 1024;  // more rows than that are another tokenizer's

std::vector<std::string> arguments_of(const std::string& folder, TextTokenizer::Use use) {
  std::vector<std::string> arguments = {folder};
  if (use == TextTokenizer::Use::kChat) arguments.emplace_back("--chat");
  return arguments;
}

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

TextTokenizer::TextTokenizer(const std::string& folder, Use use)
    : helper_("tokenizer_helper.py", arguments_of(folder, use)) {
  stop_tokens_ = helper_.receive().at("stop").get<std::vector<int32_t>>();
}

std::vector<int32_t> TextTokenizer::encode(const std::string& text) {
  auto ids = helper_.ask({{"encode", text}}).at("ids").get<std::vector<int32_t>>();
  if (!ids.empty()) return ids;
  // If no token begins documents, the one that ends them comes before the next.
  if (stop_tokens_.size() == 1) return stop_tokens_;
  throw_bad_input("the prompt is empty and the tokenizer has no token to begin with; give --prompt");
}

std::vector<std::vector<int32_t>> TextTokenizer::encode_pieces(const std::vector<std::string>& pieces) {
  return helper_.ask({{"pieces", pieces}}).at("ids").get<std::vector<std::vector<int32_t>>>();
}

std::vector<int32_t> TextTokenizer::encode_chat(const json& messages) {
  return helper_.ask({{"chat", messages}}).at("ids").get<std::vector<int32_t>>();
}

void TextTokenizer::begin(const std::vector<int32_t>& prompt) { helper_.ask({{"begin", prompt}}); }

std::string TextTokenizer::next(int32_t token) {
  return helper_.ask({{"token", token}}).at("text").get<std::string>();
}

std::string TextTokenizer::end() { return helper_.ask({{"end", true}}).at("text").get<std::string>(); }

std::unique_ptr<TextCodec> open_codec(const std::string& folder, int64_t vocab_size) {
  if (!folder.empty()) return std::make_unique<TextTokenizer>(folder, TextTokenizer::Use::kPrompts);
  return ByteCodec::fits(vocab_size) ? std::make_unique<ByteCodec>(vocab_size) : nullptr;
}

}  // namespace parka
