#include "engine/text/text_tokenizer.h"

#include "core/error.h"

namespace parka {
namespace {

using nlohmann::json;

std::vector<std::string> arguments_of(const std::string& folder, TextTokenizer::Use use) {
  std::vector<std::string> arguments = {folder};
  if (use == TextTokenizer::Use::kChat) arguments.emplace_back("--chat");
  return arguments;
}

}  // namespace

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

}  // namespace parka
