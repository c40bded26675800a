#include "engine/files/json_text.h"

#include <ctime>
#include <string>

#include "engine/files/safetensors.h"
#include "tests/support/catch.h"
#include "tests/support/refusal.h"

using namespace parka;
using nlohmann::json;
using parka::test::refusal;

namespace {

// {"t0": MEMBER, "t1": MEMBER, ...}
std::string object_of(int64_t count, const std::string& member) {
  std::string text = "{";
  for (int64_t i = 0; i < count; ++i) text += fmt::format("{}\"t{}\":{}", i == 0 ? "" : ",", i, member);
  return text + "}";
}

double cpu_seconds(const std::function<void()>& action) {
  const std::clock_t begin = std::clock();
  action();
  return static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC;
}

}  // namespace

TEST_CASE("JSON is read in time that grows as its text", "[engine][files]") {
  const std::string kinds[] = {object_of(80000, R"({"dtype":"U8","shape":[0],"data_offsets":[0,0]})"),
                               "[" + object_of(80000, "[]") + "]", object_of(80000, R"({"a":{},"b":[[]]})")};
  for (const std::string& text : kinds) {
    CAPTURE(text.substr(0, 60));
    // Ten seconds are an allowance for a busy machine: what is quadratic takes minutes.
    CHECK(cpu_seconds([&] { CHECK(parse_json_text(text, "x") == json::parse(text)); }) < 10);
    CHECK(cpu_seconds([&] { CHECK(parse_json_if_valid(text) == json::parse(text)); }) < 10);
    CHECK(cpu_seconds([&] { CHECK(parse_ordered_json_if_valid(text).dump() == text); }) < 10);
  }
  std::vector<SafetensorsEntry> tensors;
  for (int i = 0; i < 80000; ++i)
    tensors.push_back({.name = fmt::format("blocks.{}", i), .dtype = DType::kU8, .shape = {0}});
  CHECK(cpu_seconds([&] {
          const std::string start = encode_safetensors_header(tensors, {{"format", "pt"}});
          CHECK(parse_safetensors_header(as_bytes(start), static_cast<int64_t>(start.size()), "x").tensors.size() ==
                80000);
        }) < 10);
}

TEST_CASE("JSON is read as the library reads it", "[engine][files]") {
  for (const char* text : {"null", "true", "-1", "18446744073709551615", "1.5e3", "\"a\\u00e9\\n\"", "[]", "{}",
                           "[1,[2,{\"a\":[]}],\"\"]", "{\"b\":1,\"a\":{\"c\":null,\"b\":[{},{\"a\":-0.0}]}}",
                           "\xEF\xBB\xBF{\"a\":1}"}) {
    CAPTURE(text);
    CHECK(parse_json_text(text, "x") == json::parse(text));
    CHECK(parse_json_if_valid(text) == json::parse(text));
    CHECK(parse_ordered_json_if_valid(text) == nlohmann::ordered_json::parse(text));
  }
  CHECK(parse_json_text("[1, /* two */ 2] // three", "x") == json{1, 2});
  CHECK(parse_ordered_json_if_valid(R"({"b":1,"a":2})").dump() == R"({"b":1,"a":2})");
}

TEST_CASE("what is no JSON is refused, or discarded where it may be anything", "[engine][files]") {
  for (const std::string text :
       {"", "{", "[1,]", "{\"a\":1}x", "// a\n1", "\"\xff\"", "{\"a\":1,\"a\":2}", "1e999"}) {
    CAPTURE(text);
    CHECK(!refusal([&] { parse_json_text(text, "x", JsonComments::kRefused); }).empty());
    CHECK(parse_json_if_valid(text).is_discarded());
    CHECK(parse_ordered_json_if_valid(text).is_discarded());
  }
  CHECK(parse_json_if_valid(std::string(100000, '[')).is_discarded());
}

TEST_CASE("members that nobody looks at are not kept", "[engine][files]") {
  const std::string text = R"({"model":{"vocab":{"a":1},"merges":[["a","b"]]},"added":[{"model":1}],"x":2})";
  CHECK(parse_json_if_valid(text, {"model"}) == json::parse(R"({"added":[{"model":1}],"x":2})"));
  CHECK(parse_json_if_valid(text, {"model", "x", "added"}) == json::object());
  CHECK(parse_json_if_valid(R"([{"model":1}])", {"model"}) == json::parse(R"([{"model":1}])"));
}
