#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "tests/data/token_file_fixtures.h"
#include "tests/support/catch.h"

using namespace parka;
using namespace parka::test;

namespace {

using std::string_literals::operator""s;

template <typename T>
std::string as_bytes(const std::vector<T>& values) {
  return std::string(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
}

// Ids as text has them: small ones are frequent.
std::vector<int64_t> ids_of(int64_t vocab_size, size_t count) {
  std::mt19937 random(7);
  std::vector<int64_t> ids(count);
  for (int64_t& id : ids) {
    const double u = static_cast<double>(random()) / 4294967296.0;
    id = static_cast<int64_t>(u * u * static_cast<double>(vocab_size));
  }
  return ids;
}

template <typename T>
std::string stored_as(const std::vector<int64_t>& ids) {
  return as_bytes(std::vector<T>(ids.begin(), ids.end()));
}

// What opening a file of these bytes says; empty if it is taken.
std::string refusal(const std::string& bytes, TokenType type = TokenType::kUint16,
                    int64_t vocab_size = kAnyVocabulary) {
  const TemporaryFolder folder;
  write_file(folder / "t.npy", bytes);
  try {
    TokenFile(folder / "t.npy", type, vocab_size);
    return {};
  } catch (const Error& error) {
    CHECK(error.code() == ExitCode::kBadInput);
    CHECK(contains(error, folder / "t.npy"));
    return error.what();
  }
}

std::string llm_c_file(int32_t magic, int32_t version) {
  std::vector<int32_t> header(256, 0);
  header[0] = magic;
  header[1] = version;
  header[2] = 9;
  return as_bytes(header);
}

const std::string kCompressed = stored_as<uint16_t>(ids_of(65536, 1000));  // as good as any bytes

}  // namespace

TEST_CASE("files of other formats are refused as what they are", "[data][token_content]") {
  const auto [start, name] = GENERATE(table<std::string, std::string>({
      {"\x93NUMPY\1\0"s, "numpy.save"},
      {"PK\3\4\x2d\0\0\0\0\0"s, "ZIP"},
      {"PK\3\4\0\0\0\x08\0\0"s, "ZIP"},
      {"\x1f\x8b\x08\x08\x01\x02\x03\x04\0\x03"s, "gzip"},
      {"\x1f\x8b\x08\0\0\0\0\0\x02\xff"s, "gzip"},
      {"\x28\xb5\x2f\xfd"s, "zstd"},
      {"\xfd"
       "7zXZ\0"s,
       "xz"},
      {"BZh91AY&SY"s, "bzip2"},
      {"PAR1"s, "Parquet"},
      {"ARROW1\0\0"s, "Arrow"},
      {"\xff\xff\xff\xff\x88\1\0\0\x10\0\0\0"s, "Arrow"},
      {"\x89HDF\r\n\x1a\n"s, "HDF5"},
      {"\x7f"
       "ELF\2\1\1"s,
       "program"},
      {"\x50\0\0\0\0\0\0\0{\"a\":"s, "safetensors"},
      {"\x80\x04\x95\x10\0\0\0\0\0\0\0]"s, "pickle"},
      {"LITPKDS\1\0\0\0\0\0\0\0\x08"s, "LitGPT"},
      {"', 'fortran_order': False, 'shape': (999,), }       \n"s, "numpy.save"},
      {"9,), }       \n"s, "numpy.save"},
      {"            \n"s, "numpy.save"},
      {"BIN.TOK\n\2\0\0\0\4\0\0\0"s, "LLMQ"},
      {"MMIDIDX\0\0\1"s, "Megatron"},
      {"PARKAIMG\1\0"s, "images"},
      {"PARKAPIX\1\0"s, "images"},
      {"\xff\xfe" +
           stored_as<uint16_t>({'t', 'e', 'x', 't', ' ', 'o', 'f', ' ', '2', ' ', 'b', 'y', 't', 'e', 's', '\n'}),
       "UTF-16"},
      {llm_c_file(20240520, 1), ".bin"},
      {llm_c_file(20240801, 7), ".bin"},
      {llm_c_file(20240326, 5), "llm.c"},
      {llm_c_file(20240522, 1), "llm.c"},
  }));
  CAPTURE(name);
  CHECK(refusal(start + kCompressed).find(name) != std::string::npos);
  // An odd number of bytes must not be what is told of it.
  CHECK(refusal(start + kCompressed + "x").find(name) != std::string::npos);
}

TEST_CASE("files that end inside of a magic number are refused or taken", "[data][token_content]") {
  const std::string whole =
      GENERATE("BZh91AY&SY"s, "PK\3\4\x2d\0\0\0\0\0"s, "\x1f\x8b\x08\x08\x01\x02\x03\x04\0\x03"s,
               "\x50\0\0\0\0\0\0\0{\"a\":"s, "BIN.TOK\n\2\0\0\0"s, "\xff\xfet\0e\0x\0t\0"s);
  for (size_t length = 1; length < whole.size(); ++length) CHECK_NOTHROW(refusal(whole.substr(0, length)));
}

TEST_CASE("the mask of a token file is none", "[data][token_content]") {
  const TemporaryFolder folder;
  write_file(folder / "t.npy.mask", std::string(100, '\1') + std::string(100, '\0'));
  TokenFile(folder / "t.npy.mask", TokenType::kUint16);  // one mark again and again may be ids
  write_tokens(folder / "t.npy", std::vector<uint16_t>(200, 1));
  const Error error = error_of([&] { TokenFile(folder / "t.npy.mask", TokenType::kUint16); });
  CHECK((error.code() == ExitCode::kBadInput && contains(error, "mask")));
}

TEST_CASE("ids that begin as a magic number does are ids", "[data][token_content]") {
  const std::string ids = stored_as<uint16_t>(ids_of(50257, 1000));
  const std::string start = GENERATE("\x1f\x8b"s, "\x1f\x8b\x08\x44"s, "PK"s, "BZ"s, "PA"s, "\x28\xb5"s,
                                     "\x7f"
                                     "E"s,
                                     "\x80\x04"s, "\xff\xff"s, "\x88\xd8\x34\1\1\0\0\0"s);
  CHECK(refusal(start + ids).empty());
}

TEST_CASE("text is refused, and ids are none", "[data][token_content]") {
  const auto repeated = [](const std::string& line, size_t bytes) {
    std::string text;
    while (text.size() < bytes) text += line;
    return text;
  };
  for (const size_t bytes : {size_t{40}, size_t{3000}, size_t{100'001}}) {
    CAPTURE(bytes);
    for (const auto& [line, name] : {std::pair{"{\"text\": \"one\"}\n", "JSON"},
                                     {"[1, 2, 3, 40, 50,\n", "JSON"},
                                     {"<!DOCTYPE html><html>\n", "HTML"},
                                     {"Plain English, with\ta tab.\r\n", "parka prepare"},
                                     {"Gr\xc3\xbc\xc3\x9f"
                                      "e, \xe4\xbd\xa0\xe5\xa5\xbd \xf0\x9f\x98\x80\n",
                                      "parka prepare"}}) {
      CHECK(refusal(repeated(line, bytes)).find(name) != std::string::npos);
      CHECK(refusal(repeated(line, bytes), TokenType::kUint32).find(name) != std::string::npos);
    }
    const std::string pointer = repeated("version https://git-lfs.github.com/spec/v1\noid\n", bytes);
    CHECK(refusal(pointer).find("git lfs pull") != std::string::npos);
    CHECK(refusal(repeated("na\xefve caf\xe9, and thirty letters of ASCII\n", bytes)).find("text") !=
          std::string::npos);  // Latin-1
    // A letter in two bytes is an id of a tokenizer of bytes.
    const std::string text = repeated("Plain English.\n", bytes);
    CHECK(refusal(stored_as<uint16_t>({text.begin(), text.end()})).empty());
  }
}

TEST_CASE("ids of all vocabularies are no other format", "[data][token_content]") {
  const int64_t vocab_size = GENERATE(5, 257, 32000, 50257, 65536);
  const size_t count = GENERATE(3, 16, 100, 3000, 50'000);
  CAPTURE(vocab_size, count);
  const std::vector<int64_t> ids = ids_of(vocab_size, count);
  CHECK(refusal(stored_as<uint16_t>(ids), TokenType::kUint16, vocab_size).empty());
  CHECK(refusal(stored_as<uint32_t>(ids), TokenType::kUint32, vocab_size).empty());
  CHECK(refusal(stored_as<uint32_t>(ids_of(256000, count)), TokenType::kUint32, 256000).empty());
  // Vocabularies in no order of frequency, and ids that are all alike.
  std::mt19937 random(3);
  std::vector<int64_t> order(static_cast<size_t>(vocab_size)), mixed, even;
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random);
  for (const int64_t id : ids) {
    mixed.push_back(order[static_cast<size_t>(id)]);
    even.push_back(random() % vocab_size);
  }
  CHECK(refusal(stored_as<uint16_t>(mixed), TokenType::kUint16, vocab_size).empty());
  CHECK(refusal(stored_as<uint16_t>(even), TokenType::kUint16, vocab_size).empty());
}

TEST_CASE("padding and parts that are not written say nothing", "[data][token_content]") {
  std::vector<int64_t> ids = ids_of(50257, 40'000);
  const auto [begin, end] =
      GENERATE(table<size_t, size_t>({{0, 20'000}, {0, 39'000}, {10'000, 40'000}, {0, 40'000}}));
  const int64_t padding = GENERATE(0, 0x2020, 50256);
  std::fill(ids.begin() + static_cast<int64_t>(begin), ids.begin() + static_cast<int64_t>(end), padding);
  CHECK(refusal(stored_as<uint16_t>(ids)).empty());
}

TEST_CASE("ids of another width than they are read with are refused", "[data][token_content]") {
  const size_t count = GENERATE(100, 3000, 50'000);
  const int64_t vocab_size = GENERATE(5, 257, 50257);
  std::vector<int64_t> ids = ids_of(vocab_size, count);
  if (count > 3000) std::fill(ids.begin(), ids.begin() + 20'000, 0);  // padding hides nothing
  CAPTURE(count, vocab_size);
  CHECK(refusal(stored_as<uint32_t>(ids)).find("data.token_dtype=uint32") != std::string::npos);
  CHECK(refusal(stored_as<int64_t>(ids)).find("64 bits") != std::string::npos);
  CHECK(refusal(stored_as<int64_t>(ids), TokenType::kUint32).find("64 bits") != std::string::npos);
}

TEST_CASE("a shard of samples is refused, and ids that begin as its number of them are not",
          "[data][token_content]") {
  const std::string text = GENERATE(""s, "{\"column_names\": [\"tokens\"]}"s);
  std::vector<uint32_t> offsets = {20, static_cast<uint32_t>(4 + 4 * 21 + text.size())};
  for (int i = 0; i < 20; ++i) offsets.push_back(offsets.back() + 1024);
  const std::string shard = as_bytes(offsets) + text + stored_as<uint16_t>(ids_of(50257, 20 * 512));
  CHECK(refusal(shard).find("MDS") != std::string::npos);
  CHECK(refusal(shard, TokenType::kUint32).find("MDS") != std::string::npos);
  CHECK(refusal(shard + "12").empty());
}

TEST_CASE("ids as floating-point numbers are refused", "[data][token_content]") {
  const size_t count = GENERATE(100, 50'000);
  const std::vector<int64_t> ids = ids_of(50257, count);
  std::vector<uint16_t> halves, bfloats;
  for (const int64_t id : ids) {
    int exponent = 0;
    const double mantissa = std::frexp(static_cast<double>(id), &exponent);  // 0.5 and more
    halves.push_back(
        id == 0 ? 0 : static_cast<uint16_t>(((exponent + 14) << 10) | static_cast<int>((mantissa * 2 - 1) * 1024)));
    bfloats.push_back(static_cast<uint16_t>(std::bit_cast<uint32_t>(static_cast<float>(id)) >> 16));
  }
  const TokenType type = GENERATE(TokenType::kUint16, TokenType::kUint32);
  for (const std::string& bytes :
       {as_bytes(halves), as_bytes(bfloats), stored_as<float>(ids), stored_as<double>(ids)}) {
    CHECK(refusal(bytes, type).find("floating-point") != std::string::npos);
  }
}

TEST_CASE("floating-point numbers of weights and embeddings are refused, and ids within narrow bounds are not",
          "[data][token_content]") {
  std::mt19937 random(5);
  std::normal_distribution<double> normal;
  const size_t count = GENERATE(1024, 50'000);
  const auto halves_of = [](const std::vector<double>& values) {
    std::vector<uint16_t> halves;
    for (const double value : values) {
      int exponent = 0;
      const double mantissa = std::frexp(std::abs(value), &exponent);
      const int bits = exponent < -13 ? 0 : ((exponent + 14) << 10) | static_cast<int>((mantissa * 2 - 1) * 1024);
      halves.push_back(static_cast<uint16_t>(bits | (std::signbit(value) ? 0x8000 : 0)));
    }
    return halves;
  };
  for (const auto& [spread, is_signed, is_even] : {std::tuple{0.02, true, false},
                                                   {0.05, true, false},
                                                   {1.0, true, false},
                                                   {1.0, false, false},
                                                   {1.0, true, true},
                                                   {1.0, false, true}}) {
    CAPTURE(spread, is_signed, is_even, count);
    std::vector<double> values(count);
    for (double& value : values) {
      value = spread * (is_even ? static_cast<double>(random()) / 2147483648.0 - 1 : normal(random));
      if (!is_signed) value = std::abs(value);
    }
    const std::vector<float> floats(values.begin(), values.end());
    std::vector<uint16_t> bfloats;
    for (const float value : floats) bfloats.push_back(static_cast<uint16_t>(std::bit_cast<uint32_t>(value) >> 16));
    for (const std::string& bytes :
         {as_bytes(halves_of(values)), as_bytes(bfloats), as_bytes(floats), as_bytes(values)}) {
      CHECK(refusal(bytes, TokenType::kUint16, 65536).find("floating-point") != std::string::npos);
      CHECK_FALSE(refusal(bytes, TokenType::kUint32).empty());
    }
  }
  // As codes of pictures or sounds are, and ids of vocabularies that begin with the rare ones.
  for (const auto& [first, width] : {std::pair{16000, 512}, {15360, 1024}, {15000, 2048}, {30000, 8192}}) {
    std::vector<int64_t> codes(count), reversed = ids_of(65536, count);
    for (int64_t& code : codes) code = first + static_cast<int64_t>(random() % static_cast<unsigned>(width));
    for (int64_t& id : reversed) id = 65535 - id;
    CHECK(refusal(stored_as<uint16_t>(codes), TokenType::kUint16, 65536).empty());
    CHECK(refusal(stored_as<uint16_t>(reversed), TokenType::kUint16, 65536).empty());
  }
}

TEST_CASE("positions of tokens are refused", "[data][token_content]") {
  for (const int64_t length : {16, 1000, 1024, 40'000}) {
    std::vector<int64_t> positions(50'000);
    for (size_t i = 0; i < positions.size(); ++i) positions[i] = static_cast<int64_t>(i) % length;
    CHECK_FALSE(refusal(stored_as<uint16_t>(positions)).empty());
    CHECK_FALSE(refusal(stored_as<uint32_t>(positions), TokenType::kUint32).empty());
    for (size_t i = 0; i < positions.size(); i += 4) positions[i] = 7;  // ids may count up for a while
    CHECK(refusal(stored_as<uint16_t>(positions)).empty());
  }
}

TEST_CASE("a header of numpy.save() behind raw ids is told where it ends a run", "[data][token_content]") {
  const std::string header =
      "\x93NUMPY\1\0v\0{'descr': '<i4', 'fortran_order': False, 'shape': (60000,), }      \n"s;
  const TemporaryFolder folder;
  const std::vector<int64_t> ids = ids_of(1000, 20'001);
  for (const auto& array : {stored_as<int32_t>(ids), stored_as<uint16_t>(ids)}) {
    write_file(folder / "t.npy", stored_as<uint16_t>(ids) + header + array);
    const TokenFile file(folder / "t.npy", TokenType::kUint16);
    std::vector<int32_t> read(21'000);
    const auto error = error_of([&] { file.read(0, 21'000, 1024, read.data()); });
    CHECK(contains(error, "token 20001 is id"));
    CHECK(contains(error, "numpy"));
  }
}

TEST_CASE("ids of 8 bits are refused", "[data][token_content]") {
  const int64_t vocab_size = GENERATE(5, 65, 200);
  CHECK(refusal(stored_as<uint8_t>(ids_of(vocab_size, 20'000))).find("8 bits") != std::string::npos);
}

TEST_CASE("a mask under any name is refused", "[data][token_content]") {
  const TokenType type = GENERATE(TokenType::kUint16, TokenType::kUint32);
  const size_t count = GENERATE(40, 3000, 50'000);
  CHECK(refusal(stored_as<uint8_t>(ids_of(2, count)), type).find("mask") != std::string::npos);
  CHECK(refusal(stored_as<uint8_t>(ids_of(4, count)), type).find("mask") != std::string::npos);
}

TEST_CASE("ids of 32 bits beyond 65536 are not taken for twice as many", "[data][token_content]") {
  const int64_t vocab_size = GENERATE(70'000, 128'256, 262'144);
  const std::vector<int64_t> ids = ids_of(vocab_size, 8000);
  CHECK(refusal(stored_as<uint32_t>(ids)).find("data.token_dtype=uint32") != std::string::npos);
  CHECK(refusal(stored_as<int64_t>(ids)).find("64 bits") != std::string::npos);
}

TEST_CASE("ids beyond the vocabulary are refused when a file is opened", "[data][token_content]") {
  const std::vector<int64_t> ids = ids_of(50257, 50'000);
  // Ids of 16 bits in pairs are large numbers.
  CHECK(refusal(stored_as<uint16_t>(ids), TokenType::kUint32, 128'256).find("data.token_dtype") !=
        std::string::npos);
  CHECK(refusal(stored_as<uint16_t>(ids), TokenType::kUint16, 32'000).find("model.vocab_size") !=
        std::string::npos);
  std::vector<int64_t> late = ids;
  late.back() = 60'000;
  CHECK(refusal(stored_as<uint16_t>(late), TokenType::kUint16, 50'257).find("token 49999 is id 60000") !=
        std::string::npos);
}

TEST_CASE("text in UTF-16 is refused by its characters, and ids are not", "[data][token_content]") {
  const auto text_of = [](const std::vector<int>& letters, int comma) {
    std::mt19937 random(3);
    std::vector<int64_t> text;
    for (int i = 0; i < 6000; ++i) {
      const bool is_between = random() % 7 == 0;
      text.push_back(is_between ? comma
                                : letters[0] + static_cast<int>(random() % static_cast<unsigned>(letters[1])));
    }
    return text;
  };
  const std::vector<int64_t> english = text_of({'a', 26}, ' '), russian = text_of({0x430, 32}, ' '),
                             hindi = text_of({0x905, 70}, ' '), chinese = text_of({0x4e00, 20000}, 0xff0c),
                             korean = text_of({0xac00, 11000}, ' ');
  for (const auto& text : {english, russian, hindi, chinese, korean}) {
    CHECK_FALSE(refusal(stored_as<uint16_t>(text), TokenType::kUint16, 50304).empty());
    CHECK_FALSE(refusal("\xff\xfe" + stored_as<uint16_t>(text)).empty());
  }
  CHECK(refusal(stored_as<uint16_t>(english), TokenType::kUint16, 272).empty());  // of bytes
  CHECK(refusal(stored_as<uint16_t>(english)).empty());
  for (const int64_t vocab_size : {20000, 32000, 50257, 65536}) {
    CHECK(refusal(stored_as<uint16_t>(ids_of(vocab_size, 6000)), TokenType::kUint16, vocab_size).empty());
  }
}

TEST_CASE("labels with -100 are refused, and ids that reach so far are not", "[data][token_content]") {
  for (const size_t every : {1, 2, 9, 19}) {
    std::vector<int64_t> labels = ids_of(50000, 5000);
    for (size_t i = 0; i < labels.size(); i += every) labels[i] = -100;
    CHECK_FALSE(refusal(stored_as<int16_t>(labels), TokenType::kUint16, 65536).empty());
    CHECK_FALSE(refusal(stored_as<int32_t>(labels), TokenType::kUint32).empty());
  }
  std::vector<int64_t> ids = ids_of(65536, 5000);
  for (size_t i = 0; i < ids.size(); i += 40) ids[i] = 65436;  // as the end of short documents
  CHECK(refusal(stored_as<uint16_t>(ids), TokenType::kUint16, 65536).empty());
}

TEST_CASE("ids with the upper byte first are refused, whatever the vocabulary", "[data][token_content]") {
  for (const int64_t vocab_size : {272, 4096, 32000, 50257, 60000, 65536}) {
    std::vector<int64_t> ids = ids_of(vocab_size, 6000), swapped = ids;
    for (int64_t& id : swapped) id = id % 256 * 256 + id / 256;
    CHECK(refusal(stored_as<uint16_t>(ids), TokenType::kUint16, 65536).empty());
    CHECK_FALSE(refusal(stored_as<uint16_t>(swapped), TokenType::kUint16, 65536).empty());
  }
}

TEST_CASE("the id that fills a part of a file is found", "[data][token_content]") {
  const TemporaryFolder folder;
  const auto repeated_in = [&](const std::vector<int64_t>& ids) {
    write_file(folder / "t.npy", stored_as<uint16_t>(ids));
    return TokenFile(folder / "t.npy", TokenType::kUint16).most_repeated();
  };
  for (const size_t whole : {4000, 30000}) {
    for (const int32_t id : {0, 7, 258}) {
      std::vector<int64_t> ids = ids_of(300, whole);
      CHECK(repeated_in(ids).share == 0);
      std::fill(ids.begin() + static_cast<std::ptrdiff_t>(whole / 2), ids.end(), id);
      const TokenFile::Repeated found = repeated_in(ids);
      CHECK(found.id == id);
      CHECK(found.share > 0.45);
      CHECK(found.share < 0.55);
    }
  }
}
