#include <cstdint>
#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include "core/ignored_target.h"
#include "tests/data/token_file_fixtures.h"
#include "tests/support/catch.h"

using namespace parka;
using namespace parka::test;

namespace {

template <typename T>
std::string bytes_of(const std::vector<T>& values) {
  return std::string(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
}
template <typename T>
std::string bytes_of(T value) {
  return std::string(reinterpret_cast<const char*>(&value), sizeof(T));
}

// What Megatron-LM's IndexedDatasetBuilder writes for documents that are one sequence each.
struct Index {
  uint64_t version = 1;
  uint8_t code = 8;
  std::vector<int32_t> lengths;
  std::vector<int64_t> pointers, documents;

  Index(const std::vector<int32_t>& lengths_, uint8_t code_, int64_t token_size) : code(code_), lengths(lengths_) {
    int64_t pointer = 0;
    for (size_t i = 0; i < lengths.size(); ++i) {
      pointers.push_back(pointer);
      pointer += lengths[i] * token_size;
      documents.push_back(static_cast<int64_t>(i));
    }
    documents.push_back(static_cast<int64_t>(lengths.size()));
  }
  std::string bytes() const {
    return std::string("MMIDIDX\0\0", 9) + bytes_of(version) + bytes_of(code) +
           bytes_of(static_cast<uint64_t>(lengths.size())) + bytes_of(static_cast<uint64_t>(documents.size())) +
           bytes_of(lengths) + bytes_of(pointers) + bytes_of(documents);
  }
};

std::string llm_c_header(int32_t magic, int32_t version, int32_t tokens) {
  std::vector<int32_t> header(256, 0);
  header[0] = magic;
  header[1] = version;
  header[2] = tokens;
  return bytes_of(header);
}

const std::vector<uint16_t> kIds = {1, 2, 3, 4, 5, 6, 7, 8, 9};

struct Examples {
  std::vector<int32_t> tokens, targets, first_keys;
  int64_t num_targets;
};

Examples example(const TokenFiles& files, int64_t sequence) {
  const auto S = static_cast<size_t>(files.sequence_length());
  Examples e{std::vector<int32_t>(S, -7), std::vector<int32_t>(S, -7), std::vector<int32_t>(S, -7), 0};
  const bool separate = files.rules().separate_documents;
  e.num_targets =
      files.read_example(sequence, {e.tokens.data(), e.targets.data(), separate ? e.first_keys.data() : nullptr});
  return e;
}

}  // namespace

TEST_CASE("Megatron's files are read with the type that their index tells", "[data][token_formats]") {
  const TemporaryFolder folder;
  write_tokens(folder / "a.bin", kIds);
  write_file(folder / "a.idx", Index({4, 0, 5}, 8, 2).bytes());
  const std::vector<int32_t> wide = {70000, 1, 2, 3, 4};
  write_tokens(folder / "b.bin", wide);
  write_file(folder / "b.idx", Index({2, 3}, 4, 4).bytes());
  const std::string first = GENERATE("a.bin", "a.idx");
  // data.token_dtype is of raw files only: it must not matter here.
  const TokenType raw = GENERATE(TokenType::kUint16, TokenType::kUint32);
  const TokenFiles files({folder / first, folder / "b.idx"}, raw, 4, 100000);
  CHECK(files.num_sequences() == 3);
  CHECK((read_sequence(files, 1) == std::vector<int32_t>{5, 6, 7, 8}));
  CHECK((read_sequence(files, 2) == std::vector<int32_t>{70000, 1, 2, 3}));
}

TEST_CASE("llm.c's files of both versions are read", "[data][token_formats]") {
  const TemporaryFolder folder;
  write_file(folder / "a.bin", llm_c_header(20240520, 1, 9) + bytes_of(kIds));
  const std::vector<uint32_t> wide = {128000, 1, 2, 3};
  write_file(folder / "b.bin", llm_c_header(20240801, 7, 4) + bytes_of(wide));
  const TokenFiles files({folder / "a.bin", folder / "b.bin"}, TokenType::kUint32, 4, 128256);
  CHECK(files.num_sequences() == 3);
  CHECK((read_sequence(files, 0) == std::vector<int32_t>{1, 2, 3, 4}));
  CHECK((read_sequence(files, 2) == std::vector<int32_t>{128000, 1, 2, 3}));
}

TEST_CASE("a .bin file without index or magic number is raw", "[data][token_formats]") {
  const TemporaryFolder folder;
  write_tokens(folder / "a.bin", kIds);
  CHECK(TokenFile(folder / "a.bin", TokenType::kUint16).format() == TokenFormat::kRaw);
  write_file(folder / "a.npy", llm_c_header(20240520, 1, 0));
  const Error error = error_of([&] { TokenFile(folder / "a.npy", TokenType::kUint16); });
  CHECK((error.code() == ExitCode::kBadInput && contains(error, "rename it to end in .bin")));
}

TEST_CASE("Megatron's files may be named without .bin, as it names them", "[data][token_formats]") {
  const TemporaryFolder folder;
  write_tokens(folder / "a.bin", kIds);
  CHECK(contains(error_of([&] { TokenFiles({folder / "a"}, TokenType::kUint16, 4, 10); }), "a: no such file"));
  write_file(folder / "a.idx", Index({4, 5}, 8, 2).bytes());
  CHECK(expand_source(folder / "a") == std::vector<std::string>{folder / "a.bin"});
  CHECK((read_sequence(TokenFiles({folder / "a"}, TokenType::kUint16, 4, 10), 1) ==
         std::vector<int32_t>{5, 6, 7, 8}));
}

TEST_CASE("an index may have modes of sequences, which must be of text", "[data][token_formats]") {
  const TemporaryFolder folder;
  write_tokens(folder / "a.bin", kIds);
  const std::string index = Index({4, 5}, 8, 2).bytes();
  write_file(folder / "a.idx", index + std::string(2, '\0'));
  CHECK((TokenFile(folder / "a.bin", TokenType::kUint16).read_document_starts() == std::vector<int64_t>{0, 4}));
  write_file(folder / "a.idx", index + std::string("\0\1", 2));
  CHECK(contains(error_of([&] { TokenFile(folder / "a.bin", TokenType::kUint16); }), "several modes"));
}

TEST_CASE("files that contradict themselves are refused", "[data][token_formats]") {
  const TemporaryFolder folder;
  write_tokens(folder / "a.bin", kIds);
  const Index good({4, 5}, 8, 2);
  Index type = good, longer = good, negative = good, elsewhere = good, version = good;
  type.code = 5;
  longer.lengths[1] = 6;
  negative.lengths = {-1, 10};
  elsewhere.pointers = {2, 10};
  version.version = 2;
  const auto [content, message] = GENERATE_COPY(table<std::string, std::string>({
      {"", "is not a Megatron index"},
      {std::string(100, 'x'), "is not a Megatron index"},
      {version.bytes(), "is not a Megatron index"},
      {type.bytes(), "Megatron's type 5; only uint16 (8) and int32 (4)"},
      {good.bytes() + "x", "are not an index of 2 sequences and 3 document marks"},
      {good.bytes().substr(0, 40), "are not an index of 2 sequences"},
      {longer.bytes(), "lists 10 tokens of 2 bytes, but"},
      {negative.bytes(), "has a sequence of -1 tokens"},
      {elsewhere.bytes(), "the two files do not belong together"},
  }));
  CAPTURE(message);
  write_file(folder / "a.idx", content);
  const Error error = error_of([&] { TokenFile(folder / "a.bin", TokenType::kUint16); });
  CHECK(error.code() == ExitCode::kBadInput);
  CHECK(contains(error, folder / "a.idx: "));
  CHECK(contains(error, message));
}

TEST_CASE("llm.c's files that contradict themselves are refused", "[data][token_formats]") {
  const TemporaryFolder folder;
  const auto [content, message] = GENERATE(table<std::string, std::string>({
      {llm_c_header(20240520, 2, 9) + bytes_of(kIds), "of version 2, but only version 1"},
      {llm_c_header(20240801, 1, 9) + bytes_of(kIds), "of version 1, but only version 7"},
      {llm_c_header(20240520, 1, 10) + bytes_of(kIds),
       "its header says 10 tokens of 2 bytes, but 18 bytes follow it"},
      {llm_c_header(20240520, 1, -9) + bytes_of(kIds), "its header says -9 tokens"},
      {llm_c_header(20240520, 1, 9).substr(0, 100), "ends within the header"},
  }));
  CAPTURE(message);
  write_file(folder / "a.bin", content);
  const Error error = error_of([&] { TokenFile(folder / "a.bin", TokenType::kUint16); });
  CHECK(error.code() == ExitCode::kBadInput);
  CHECK(contains(error, message));
}

TEST_CASE("an .idx without its .bin is refused", "[data][token_formats]") {
  const TemporaryFolder folder;
  write_file(folder / "a.idx", Index({4, 5}, 8, 2).bytes());
  CHECK(contains(error_of([&] { TokenFile(folder / "a.idx", TokenType::kUint16); }), "a.bin: no such file"));
}

TEST_CASE("patterns stand for matching files in sorted order", "[data][token_formats]") {
  const TemporaryFolder folder;
  for (const uint16_t i : {2, 0, 1}) {
    write_tokens(folder / (std::to_string(i) + ".npy"), std::vector<uint16_t>(4, i));
  }
  write_file(folder / "0.npy.mask", "xxxx");
  write_file(folder / "0.json", "{\"train\": 1}");  // as data.json: of another kind, and so are folders
  std::filesystem::create_directory((folder / "0.tokenizer").c_str());
  write_tokens(folder / "x.bin", std::vector<uint16_t>(4, 7));
  const TokenFiles files({folder / "[0-9]*", folder / "x.bin"}, TokenType::kUint16, 2, 10);
  CHECK((files.source_sequences() == std::vector<int64_t>{6, 2}));
  for (int64_t i = 0; i < 6; ++i) CHECK(read_sequence(files, i)[0] == i / 2);
  // A file of that very name comes first.
  write_tokens(folder / "[0-9]*", std::vector<uint16_t>(4, 9));
  CHECK(TokenFiles({folder / "[0-9]*"}, TokenType::kUint16, 2, 10).num_sequences() == 2);
  const Error error = error_of([&] { TokenFiles({folder / "none-*"}, TokenType::kUint16, 2, 10); });
  CHECK((error.code() == ExitCode::kBadInput && contains(error, "none-*: no token file matches")));
}

TEST_CASE("names longer than the file system has are refused, not a crash", "[data][token_formats]") {
  const TemporaryFolder folder;
  const Error pattern = error_of([&] { expand_source(folder / (std::string(300, 'x') + "*")); });
  CHECK((pattern.code() == ExitCode::kBadInput && contains(pattern, "no token file matches")));
  // A token file whose mask's name is one letter too long.
  const std::string path = folder / std::string(251, 'x');
  write_tokens(path, kIds);
  const Error mask = error_of([&] { TokenFile(path, TokenType::kUint16).open_mask(); });
  CHECK((mask.code() == ExitCode::kBadInput && contains(mask, ".mask: no such file")));
}

TEST_CASE("every token but the last of a sequence has its successor as target", "[data][token_formats]") {
  const TemporaryFolder folder;
  write_tokens(folder / "a.npy", kIds);
  const Examples e = example(TokenFiles({folder / "a.npy"}, TokenType::kUint16, 4, 10), 1);
  CHECK((e.tokens == std::vector<int32_t>{5, 6, 7, 8}));
  CHECK((e.targets == std::vector<int32_t>{6, 7, 8, kIgnoreTarget}));
  CHECK(e.num_targets == 3);
}

TEST_CASE("a loss mask leaves the marked targets", "[data][token_formats]") {
  const TemporaryFolder folder;
  write_tokens(folder / "a.npy", std::vector<uint16_t>{9, 9, 9, 9, 9, 9, 1, 2, 3, 4, 5, 6});
  // Marks of the sequence's own first token (1) ask for nothing; document starts (2) are no targets.
  write_file(folder / "a.npy.mask", std::string(6, '\0') + std::string("\1\1\0\3\2\1", 6));
  const TokenFiles files({folder / "a.npy"}, TokenType::kUint16, 6, 10, {.loss_mask = true});
  const Examples e = example(files, 1);
  CHECK((e.targets == std::vector<int32_t>{2, kIgnoreTarget, 4, kIgnoreTarget, 6, kIgnoreTarget}));
  CHECK(e.num_targets == 3);
  CHECK(example(files, 0).num_targets == 0);
  CHECK(!files.source_without_targets());
}

TEST_CASE("documents are told apart by id, by mask and by index", "[data][token_formats]") {
  const TemporaryFolder folder;
  const std::vector<uint16_t> ids = {9, 1, 1, 9, 1, 1, 1, 9, 1, 1, 1, 1};
  const std::string how = GENERATE("id", "mask", "index");
  CAPTURE(how);
  std::string path = folder / "a.bin";
  ExampleRules rules{.separate_documents = true};
  write_tokens(path, ids);
  if (how == "id") rules.document_ids.end = 9;
  if (how == "mask") write_file(path + ".mask", std::string("\2\2\0\0\2\0\0\0\2\0\0\0", 12));
  if (how == "index") write_file(folder / "a.idx", Index({1, 3, 4, 4}, 8, 2).bytes());
  const TokenFiles files({path}, TokenType::kUint16, 6, 10, rules);
  const Examples first = example(files, 0), second = example(files, 1);
  CHECK((first.first_keys == std::vector<int32_t>{0, 1, 1, 1, 4, 4}));
  // From one document to the next nothing is to be learnt.
  CHECK((first.targets == std::vector<int32_t>{kIgnoreTarget, 1, 9, kIgnoreTarget, 1, kIgnoreTarget}));
  CHECK(first.num_targets == 3);
  // A document that began in the sequence before is cut there.
  CHECK((second.first_keys == std::vector<int32_t>{0, 0, 2, 2, 2, 2}));
  CHECK(second.num_targets == 4);
}

TEST_CASE("documents begin at a token, behind one, or where one stands behind itself", "[data][token_formats]") {
  const TemporaryFolder folder;
  using Ids = std::vector<uint16_t>;
  using Keys = std::vector<int32_t>;
  // B begins a document and E ends one; X does both.
  constexpr uint16_t B = 8, E = 9, X = 7;
  const auto [ids, rules, first_keys] = GENERATE_COPY(table<Ids, DocumentIds, Keys>({
      {{B, 1, 1, B, 1, B, B, 1}, {.start = B}, {0, 0, 0, 3, 3, 5, 6, 6}},
      {{1, 1, 1, B, 1, 1, 1, 1}, {.start = B}, {0, 0, 0, 3, 3, 3, 3, 3}},
      {{B, 1, E, B, 1, E, 1, B}, {.start = B, .end = E}, {0, 0, 0, 3, 3, 3, 6, 7}},
      {{1, E, B, 1, B, 1, 1, E}, {.start = B, .end = E}, {0, 0, 2, 2, 4, 4, 4, 4}},
      {{X, 1, 1, X, X, 1, X, X}, {.start = X, .end = X}, {0, 0, 0, 0, 4, 4, 4, 7}},
      // A sequence that begins within a document, with the end of one, and with a token that may be either.
      {{1, 1, X, X, 1, 1, 1, X}, {.start = X, .end = X}, {0, 0, 0, 3, 3, 3, 3, 3}},
      {{X, X, 1, 1, 1, X, X, 1}, {.start = X, .end = X}, {0, 1, 1, 1, 1, 1, 6, 6}},
      {{X, 1, 1, 1, 1, 1, 1, 1}, {.start = X, .end = X}, {0, 0, 0, 0, 0, 0, 0, 0}},
      // One alone ends a document; the text behind it is another.
      {{1, 1, X, 1, 1, 1, 1, 1}, {.start = X, .end = X}, {0, 0, 0, 3, 3, 3, 3, 3}},
      // A document without text.
      {{1, X, X, X, X, 1, 1, X}, {.start = X, .end = X}, {0, 0, 2, 2, 4, 4, 4, 4}},
  }));
  write_tokens(folder / "a.npy", ids);
  const TokenFiles files({folder / "a.npy"}, TokenType::kUint16, 8, 10,
                         {.separate_documents = true, .document_ids = rules});
  CHECK(example(files, 0).first_keys == first_keys);
}

TEST_CASE("the documents of an index may have several sequences or none", "[data][token_formats]") {
  const TemporaryFolder folder;
  write_tokens(folder / "a.bin", std::vector<uint16_t>(9, 1));
  Index index({2, 3, 0, 4}, 8, 2);
  index.documents = {0, 2, 3, 3, 4};  // of 5 tokens, of none, of none, of 4
  write_file(folder / "a.idx", index.bytes());
  const TokenFile file(folder / "a.bin", TokenType::kUint16);
  CHECK((file.read_document_starts() == std::vector<int64_t>{0, 5}));
  index.documents = {0, 3, 2};
  write_file(folder / "a.idx", index.bytes());
  CHECK(contains(error_of([&] { TokenFile(folder / "a.bin", TokenType::kUint16).read_document_starts(); }),
                 "document marks are not in order"));
}

TEST_CASE("mask files that do not fit are refused", "[data][token_formats]") {
  const TemporaryFolder folder;
  write_tokens(folder / "a.npy", kIds);
  const auto open = [&](const ExampleRules& rules) {
    return TokenFiles({folder / "a.npy"}, TokenType::kUint16, 4, 10, rules);
  };
  for (const ExampleRules& rules : {ExampleRules{.loss_mask = true}, ExampleRules{.separate_documents = true}}) {
    std::filesystem::remove(folder / "a.npy.mask");
    CHECK(contains(error_of([&] { open(rules); }), "a.npy.mask: no such file"));
    write_file(folder / "a.npy.mask", std::string(8, '\1'));
    CHECK(contains(error_of([&] { open(rules); }), "8 bytes are not one for each of the 9 tokens"));
    write_file(folder / "a.npy.mask", std::string(6, '\1') + "\4\1\1");
    const TokenFiles files = open(rules);
    CHECK(example(files, 0).num_targets == 3);
    const Error error = error_of([&] { example(files, 1); });
    CHECK((error.code() == ExitCode::kBadInput && contains(error, "a.npy.mask: byte 6 is 4; a mark is 0 to 3")));
  }
}

TEST_CASE("the fingerprint covers index and mask files where they are used", "[data][token_formats]") {
  const TemporaryFolder folder;
  write_tokens(folder / "a.bin", kIds);
  write_file(folder / "a.bin.mask", std::string(9, '\1'));
  const auto fingerprint = [&](const ExampleRules& rules) {
    return TokenFiles({folder / "a.bin"}, TokenType::kUint16, 4, 10, rules).fingerprint();
  };
  const uint64_t plain = fingerprint({}), masked = fingerprint({.loss_mask = true});
  write_file(folder / "a.bin.mask", std::string(8, '\1') + "\2");
  CHECK(fingerprint({}) == plain);
  CHECK(fingerprint({.loss_mask = true}) != masked);
  write_file(folder / "a.idx", Index({4, 5}, 8, 2).bytes());
  const uint64_t indexed = fingerprint({});
  write_file(folder / "a.idx", Index({5, 4}, 8, 2).bytes());
  CHECK(fingerprint({}) != indexed);
  const auto identities = TokenFiles({folder / "a.bin"}, TokenType::kUint16, 4, 10).identities();
  REQUIRE(identities.size() == 2);
  CHECK((identities[0].name == "a.bin" && identities[0].bytes == 18 && identities[1].name == "a.idx"));
}
