#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "engine/text/python_helper.h"
#include "engine/text/text_codec.h"

namespace parka {

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
  std::vector<int32_t> encode_chat(const nlohmann::json& messages);

  // Pieces of a continuation are whole characters.
  void begin(const std::vector<int32_t>& prompt) override;
  std::string next(int32_t token) override;
  std::string end() override;

 private:
  PythonHelper helper_;
  std::vector<int32_t> stop_tokens_;
};

}  // namespace parka
