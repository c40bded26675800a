#include "engine/commands/argument_values.h"

#include <cmath>

#include "core/error.h"
#include "engine/config/data_sources.h"
#include "tests/support/catch.h"

using namespace parka;

namespace {

template <typename Parse>
std::string refusal(const Parse& parse) {
  try {
    parse();
  } catch (const Error& error) {
    CHECK(error.code() == ExitCode::kBadInput);
    return error.what();
  }
  return "";
}

}  // namespace

TEST_CASE("numbers on the command line are finite and whole texts", "[engine][arguments]") {
  CHECK(parse_finite("-1.5e-3") == -1.5e-3);
  for (const char* text : {"", "x", "1x", "1 2", "inf", "nan", "1e999"}) CHECK_FALSE(parse_finite(text));
}

TEST_CASE("short forms of arguments are written out", "[engine][arguments]") {
  using Words = std::vector<std::string>;
  CHECK(expand_arguments({"train", "x.json", "--optimizer.lr=1e-3", "--json"}) ==
        Words{"train", "x.json", "--set", "optimizer.lr=1e-3", "--json"});
  CHECK(expand_arguments({"--optimizer.lr", "-1", "train"}) == Words{"--set", "optimizer.lr=-1", "train"});
  CHECK(expand_arguments({"--data.train=[\"a=b\"]", "--data.eval="}) ==
        Words{"--set", "data.train=[\"a=b\"]", "--set", "data.eval="});
  CHECK(expand_arguments({"help", "train"}) == Words{"train", "--help"});
  CHECK(expand_arguments({"train", "help"}) == Words{"train", "help"});
  for (const Words& unchanged : {Words{}, Words{"--prompt=a.b", "--out", "x.json", "-a.b", "--", "--a.b=1"},
                                 Words{"--.b=1"}, Words{"--data/x.json"}}) {
    CHECK(expand_arguments(unchanged) == unchanged);
  }
  for (const Words& refused : {Words{"--optimizer.lr"}, Words{"--optimizer.lr", "--json"}}) {
    CHECK(refusal([&] { expand_arguments(refused); }).find("write --optimizer.lr=VALUE") != std::string::npos);
  }
}

TEST_CASE("a size of memory may have a unit", "[engine][arguments]") {
  CHECK(without_gigabytes("80GB") == "80");
  CHECK(std::abs(parse_finite(without_gigabytes("24 GiB")).value() - 25.769803776) < 1e-9);
  for (const char* text : {"80", "", "GB", "xGB", "80XB"}) CHECK(without_gigabytes(text) == text);
}

TEST_CASE("lists of tokens are read whole or refused", "[engine][arguments]") {
  CHECK((parse_token_list("1,2,-3") == std::vector<int32_t>{1, 2, -3}));
  for (const char* text : {"", "1,", ",1", "1, 2", "2147483648", "x"}) {
    CHECK(refusal([&] { parse_token_list(text); }).find("--prompt-tokens") != std::string::npos);
  }
}

TEST_CASE("sizes of files are read in units of 1000 and of 1024", "[engine][arguments]") {
  CHECK(parse_byte_size("300000") == 300000);
  CHECK(parse_byte_size("5GB") == 5'000'000'000);
  CHECK(parse_byte_size("1.5kib") == 1536);
  for (const char* text : {"", "5XB", "-1GB", "0", "0.5", "1e18", "inf", "nanGB", "GB"}) {
    CHECK(refusal([&] { parse_byte_size(text); }).find("--shard-size") != std::string::npos);
  }
}

TEST_CASE("a refused set is quoted on one line", "[engine][arguments]") {
  CHECK(refusal([] { parse_sets({"a\n\033[2J"}, "--sets"); }).find("\"a\\x0a\\x1b[2J\" is not") !=
        std::string::npos);
}
