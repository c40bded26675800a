#include "data/token_file.h"

#include <algorithm>

#include "data/token_files.h"
#include "engine/commands/data_statistics.h"
#include "fuzz/target.h"

using namespace parka;
using namespace parka::fuzz;

namespace {

constexpr int64_t kSequenceLength = 4;
constexpr int64_t kVocabSize = 1000;
constexpr int64_t kAnyId = int64_t{1} << 31;

void read_whole(const std::string& path, TokenType type) {
  TokenFile file(path, type);
  std::vector<int32_t> ids(static_cast<size_t>(file.num_tokens()));
  accepts([&] { file.read(0, file.num_tokens(), kAnyId, ids.data()); });
  accepts([&] {
    if (!file.has_document_index()) return;
    const std::vector<int64_t> starts = file.read_document_starts();
    require(std::is_sorted(starts.begin(), starts.end()), "documents do not begin in order");
    require(starts.empty() || (starts.front() >= 0 && starts.back() < file.num_tokens()),
            "a document begins outside of the file");
  });
  accepts([&] {
    std::vector<uint8_t> marks(ids.size());
    file.open_mask();
    file.read_marks(0, file.num_tokens(), marks.data());
  });
}

void read_examples(const std::string& path, TokenType type, const ExampleRules& rules) {
  const TokenFiles files({path}, type, kSequenceLength, kVocabSize, rules);
  std::vector<int32_t> tokens(kSequenceLength), targets(kSequenceLength), first_keys(kSequenceLength);
  for (int64_t i = 0; i < files.num_sequences(); ++i) {
    files.read_example(i, {tokens.data(), targets.data(), rules.separate_documents ? first_keys.data() : nullptr});
    for (int32_t t = 0; t < kSequenceLength; ++t) {
      require(tokens[t] >= 0 && tokens[t] < kVocabSize, "a token is not in the vocabulary");
      require(first_keys[t] >= 0 && first_keys[t] <= t, "a document begins after its own token");
    }
  }
  files.fingerprint();
}

}  // namespace

// A token file of every form. The parts are: the file's extension and the type of raw ids ("bin 16"); the tokens;
// Megatron's index; the mask.
FUZZ_TARGET(token_file) {
  const std::vector<std::string_view> parts = parts_of(input, 4);
  const TokenType type = parts[0].ends_with("32") ? TokenType::kUint32 : TokenType::kUint16;
  const std::string name = parts[0].starts_with("bin") || parts[0].starts_with("idx") ? "tokens.bin" : "tokens.npy";
  const std::string path = folder() / (parts[0].starts_with("idx") ? "tokens.idx" : name);
  test::write_file(folder() / name, std::string(parts[1]));
  place_file("tokens.idx", parts[2]);
  place_file(name + ".mask", parts[3]);
  if (!accepts([&] { read_whole(path, type); })) return;
  for (const ExampleRules& rules :
       {ExampleRules{}, ExampleRules{.loss_mask = true, .separate_documents = true},
        ExampleRules{.separate_documents = true},
        ExampleRules{.separate_documents = true, .document_ids = {.end = 3}},
        ExampleRules{.separate_documents = true, .document_ids = {.start = 3, .end = 3}}}) {
    accepts([&] { read_examples(path, type, rules); });
  }
  DataDescriptions descriptions;
  accepts([&] { data_statistics(TokenFile(path, type), descriptions, {}, kAnyId); });
}
