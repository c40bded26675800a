#include "engine/files/safetensors.h"

#include <cstring>
#include <random>
#include <string>

#include "core/error.h"
#include "engine/files/file_io.h"
#include "tests/engine/checkpoint_fixture.h"

using namespace parka;
using namespace parka::test;

namespace {

std::string encode(const std::vector<HostTensor>& tensors, const SafetensorsMetadata& metadata = {}) {
  std::vector<const HostTensor*> pointers;
  for (const HostTensor& tensor : tensors) pointers.push_back(&tensor);
  std::string file;
  write_safetensors(pointers, metadata, [&](ByteSpan bytes) {
    file.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  });
  return file;
}

SafetensorsHeader parse(const std::string& file) {
  return parse_safetensors_header(as_bytes(file), static_cast<int64_t>(file.size()), "test.safetensors");
}

// A file with the given JSON text and `data_bytes` zeros.
std::string with_header(const std::string& json, size_t data_bytes) {
  std::string file(8, '\0');
  const uint64_t length = json.size();
  std::memcpy(file.data(), &length, sizeof(length));
  return file + json + std::string(data_bytes, '\0');
}

bool lies_in_file(const SafetensorsHeader& header, const std::string& file) {
  int64_t end = header.num_bytes;
  for (const SafetensorsEntry& tensor : header.tensors) {
    if (tensor.offset != end || tensor.num_bytes != num_bytes_of(tensor.dtype, tensor.shape)) return false;
    end += tensor.num_bytes;
  }
  return end == static_cast<int64_t>(file.size());
}

// True when the parser accepts `file` with a sound result, false when it refuses it as bad input. Any other outcome
// ends the test.
bool accepts(const std::string& file) {
  try {
    const SafetensorsHeader header = parse(file);
    REQUIRE(lies_in_file(header, file));
    return true;
  } catch (const Error& e) {
    REQUIRE(e.code() == ExitCode::kBadInput);
    return false;
  }
}

}  // namespace

TEST_CASE("safetensors files hold exactly the bytes that the format says", "[engine][safetensors]") {
  HostTensor codes{"c", DType::kE4M3, {3}, {std::byte{1}, std::byte{2}, std::byte{3}}};
  HostTensor weight{"w", DType::kBF16, {1, 2}, {std::byte{4}, std::byte{5}, std::byte{6}, std::byte{7}}};
  // The wider elements come first, the header is padded so that the data begins at a multiple of 8.
  const std::string json = R"({"__metadata__":{"format":"pt"},)"
                           R"("w":{"dtype":"BF16","shape":[1,2],"data_offsets":[0,4]},)"
                           R"("c":{"dtype":"F8_E4M3","shape":[3],"data_offsets":[4,7]}})";
  const std::string padded = json + std::string((8 - json.size() % 8) % 8, ' ');
  std::string expected(8, '\0');
  expected[0] = static_cast<char>(padded.size());
  expected += padded + "\4\5\6\7\1\2\3";
  CHECK(encode({codes, weight}, {{"format", "pt"}}) == expected);
}

TEST_CASE("safetensors read back what was written, in every dtype", "[engine][safetensors]") {
  const std::vector<HostTensor> tensors = small_contents(1).tensors;
  const std::string file = encode(tensors, {{"a", "b\n"}, {"format", "pt"}});
  const SafetensorsHeader header = parse(file);
  CHECK(header.metadata == SafetensorsMetadata{{"a", "b\n"}, {"format", "pt"}});
  REQUIRE(header.tensors.size() == tensors.size());
  int wrong = 0;
  for (const HostTensor& tensor : tensors) {
    const auto found = std::find_if(header.tensors.begin(), header.tensors.end(),
                                    [&](const SafetensorsEntry& e) { return e.name == tensor.name; });
    REQUIRE(found != header.tensors.end());
    wrong += found->dtype != tensor.dtype || found->shape != tensor.shape;
    wrong += found->offset % size_of(tensor.dtype) != 0;
    wrong += file.compare(static_cast<size_t>(found->offset), static_cast<size_t>(found->num_bytes),
                          reinterpret_cast<const char*>(tensor.bytes.data()), tensor.bytes.size()) != 0;
  }
  CHECK(wrong == 0);
  CHECK(parse(encode({})).tensors.empty());
}

TEST_CASE("safetensors are read from a file without its data", "[engine][safetensors]") {
  const TemporaryFolder folder;
  const std::string content = encode(small_contents(1).tensors);
  write_file(folder / "good", content);
  write_file(folder / "cut", content.substr(0, 40));
  write_file(folder / "tiny", "abc");
  CHECK(read_safetensors_header(InputFile(folder / "good")).tensors.size() == small_contents(1).tensors.size());
  for (const char* name : {"cut", "tiny"}) {
    const Error error = error_of([&] { read_safetensors_header(InputFile(folder / name)); });
    CHECK(error.code() == ExitCode::kBadInput);
    CHECK(mentions(error.what(), folder / name));
  }
}

TEST_CASE("safetensors with a defect are refused for that defect", "[engine][safetensors]") {
  const auto [json, data_bytes, reason] = GENERATE(table<std::string, int, std::string>({
      {"", 0, "does not begin with '{'"},
      {"[]", 0, "does not begin with '{'"},
      {"{", 0, "syntax error"},
      {"{}x", 0, "syntax error"},
      {"{} // comment", 0, "syntax error"},
      {R"({"a":{"dtype":"F32","shape":[1e999],"data_offsets":[0,4]}})", 4, "number overflow"},
      {"{\"a\":" + std::string(1000, '['), 0, "nested deeper"},
      {"{}", 1, "tensors end at byte 10, the file at 11"},
      {R"({"a":3})", 0, "tensor \"a\""},
      {R"({"a":{}})", 0, "must be an object"},
      {R"({"a":{"dtype":"U8","shape":[1],"offsets":[0,1]}})", 1, "data_offsets"},
      {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"x":1}})", 1, "must be an object"},
      {R"({"a":{"dtype":"F64","shape":[1],"data_offsets":[0,8]}})", 8, "dtype \"F64\""},
      {R"({"a":{"dtype":8,"shape":[1],"data_offsets":[0,1]}})", 1, "dtype"},
      {R"({"a":{"dtype":"U8","shape":1,"data_offsets":[0,1]}})", 1, "shape must be a list"},
      {R"({"a":{"dtype":"U8","shape":[-1],"data_offsets":[0,1]}})", 1, "shape must be a list"},
      {R"({"a":{"dtype":"U8","shape":[1.0],"data_offsets":[0,1]}})", 1, "shape must be a list"},
      {R"({"a":{"dtype":"U8","shape":[9223372036854775808],"data_offsets":[0,1]}})", 1, "shape must be a list"},
      {R"({"a":{"dtype":"U8","shape":[4294967296,4294967297],"data_offsets":[0,1]}})", 1,
       "not what dtype and shape"},
      {R"({"a":{"dtype":"F32","shape":[4611686018427387905],"data_offsets":[0,4]}})", 4,
       "not what dtype and shape"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}})", 4, "not what dtype and shape"},
      {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1,2]}})", 1, "data_offsets"},
      {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[1,0]}})", 1, "data_offsets"},
      {R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}})", 1, "cut short"},
      {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,9223372036854775807]}})", 1, "data_offsets"},
      {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})", 2, "the one before it ends at"},
      {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]})"
       R"(,"b":{"dtype":"U8","shape":[1],"data_offsets":[2,3]}})",
       3, "the one before it ends at"},
      {R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]})"
       R"(,"b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}})",
       3, "the one before it ends at"},
      {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})", 2, "tensors end at"},
      {R"({"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]})"
       R"(,"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}})",
       0, "a: given twice"},
      {R"({"a":{"dtype":"U8","dtype":"U8","shape":[0],"data_offsets":[0,0]}})", 0, "a.dtype: given twice"},
      {R"({"__metadata__":3})", 0, "__metadata__ must be an object"},
      {R"({"__metadata__":{"a":3}})", 0, "__metadata__ \"a\" must be a string"},
      {"{\"a\xff\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}}", 0, "syntax error"},
  }));
  const std::string file = with_header(json, static_cast<size_t>(data_bytes));
  const Error error = error_of([&] { parse(file); });
  CAPTURE(json, error.what());
  CHECK(error.code() == ExitCode::kBadInput);
  CHECK(mentions(error.what(), reason));
  CHECK(mentions(error.what(), "test.safetensors"));
}

TEST_CASE("safetensors headers with an impossible length are refused", "[engine][safetensors]") {
  const std::string good = encode(small_contents(1).tensors);
  for (const uint64_t length : {uint64_t{0}, uint64_t{1} << 63, ~uint64_t{0}, uint64_t{good.size()} - 7}) {
    std::string file = good;
    std::memcpy(file.data(), &length, sizeof(length));
    CHECK_FALSE(accepts(file));
  }
  // Not even looked at beyond the format's limit, whatever the file's size.
  std::string file = good;
  const uint64_t length = 100'000'001;
  std::memcpy(file.data(), &length, sizeof(length));
  const Error error = error_of([&] { parse_safetensors_header(as_bytes(file), int64_t{1} << 40, "big"); });
  CHECK(mentions(error.what(), "claims a header of 100000001 bytes"));
}

TEST_CASE("safetensors cut anywhere are refused", "[engine][safetensors]") {
  const std::string good = encode(small_contents(1).tensors);
  int accepted = 0;
  for (size_t size = 0; size < good.size(); ++size) accepted += accepts(good.substr(0, size));
  CHECK(accepted == 0);
  CHECK(accepts(good));
}

TEST_CASE("messages about safetensors stay one short line whatever the names in the file",
          "[engine][safetensors]") {
  const std::string name = "\\n\\u001b" + std::string(100'000, 'x');
  const Error error = error_of([&] { parse(with_header("{\"" + name + "\":1}", 0)); });
  CHECK(std::string(error.what()).size() < 300);
  CHECK_FALSE(mentions(error.what(), "\n"));
  CHECK_FALSE(mentions(error.what(), "\x1b"));
}

TEST_CASE("randomly mutated safetensors never do worse than be refused", "[engine][safetensors]") {
  const std::string good = encode(small_contents(1).tensors, {{"format", "pt"}});
  const size_t header_end = static_cast<size_t>(parse(good).num_bytes);
  const std::vector<std::string> pieces = {"0",
                                           "-1",
                                           "9223372036854775807",
                                           "18446744073709551616",
                                           "1e9",
                                           "[",
                                           "]",
                                           "{",
                                           "}",
                                           "\"",
                                           ",",
                                           ":",
                                           "[]",
                                           "{}",
                                           "null",
                                           "\"U8\"",
                                           "\\u",
                                           "\"shape\""};
  std::mt19937_64 random(42);
  int num_accepted = 0, num_refused = 0;
  for (int round = 0; round < 6000; ++round) {
    std::string file = good;
    for (uint64_t edits = 1 + random() % 3; edits > 0; --edits) {
      const size_t at = random() % std::min(header_end, file.size());
      switch (random() % 5) {
        case 0: file[at] = static_cast<char>(file[at] ^ (1 << random() % 8)); break;
        case 1: file.erase(at, 1 + random() % 4); break;
        case 2: file.insert(at, pieces[random() % pieces.size()]); break;
        case 3: file.replace(at, 1, pieces[random() % pieces.size()]); break;
        case 4: file.insert(at, file.substr(random() % file.size(), random() % 60)); break;
      }
    }
    // Half of the time with the length made right, so that the mutation reaches the JSON.
    if (random() % 2 == 0 && file.size() > 8 + good.size() - header_end) {
      const uint64_t length = file.size() - 8 - (good.size() - header_end);
      std::memcpy(file.data(), &length, sizeof(length));
    }
    (accepts(file) ? num_accepted : num_refused) += 1;
  }
  // Both happen: a changed letter of a name is still a valid file.
  CHECK(num_accepted > 50);
  CHECK(num_refused > 3000);
}

TEST_CASE("tensors that contradict themselves are not written", "[engine][safetensors]") {
  const HostTensor good = random_tensor("a", DType::kF32, {2}, 1);
  HostTensor short_one = good, reserved = good, not_utf8 = good, negative = good;
  short_one.bytes.pop_back();
  reserved.name = "__metadata__";
  not_utf8.name = "\xff";
  negative.shape = {-1, -2};
  for (const auto& tensors :
       std::vector<std::vector<HostTensor>>{{good, good}, {short_one}, {reserved}, {not_utf8}, {negative}}) {
    CHECK(error_of([&] { encode(tensors); }).code() == ExitCode::kInternal);
  }
}
