#include "core/log/log.h"

#include <string>

#include "tests/support/catch.h"

using namespace parka;

TEST_CASE("a line for a terminal has no control characters", "[core]") {
  CHECK(as_line("plain, \xc3\xa9 and \xe2\x82\xac") == "plain, \xc3\xa9 and \xe2\x82\xac");
  CHECK(as_line("a\nb\r\tc") == "a b  c");
  CHECK(as_line("red \x1b[31m and\x07 \x7f") == "red \\x1b[31m and\\x07 \\x7f");
  CHECK(as_line("\xc2\x9b"
                "31m\xc2\xa0") ==
        "\\x9b"
        "31m\xc2\xa0");
  CHECK(as_line(std::string("a\0b", 3)) == "a\\x00b");
  CHECK(as_line("half \xc2") == "half \xc2");
}

TEST_CASE("of a long line the middle is left out, and no half of a character", "[core]") {
  for (const std::string piece : {"x", "\xc3\xa9", "\xe2\x82\xac", "\xf0\x9f\x98\x80", "abc "}) {
    std::string name;
    while (name.size() < 10000) name += piece;
    const std::string line = as_line("begin " + name + " end");
    CHECK(line.size() < 4100);
    CHECK(line.starts_with("begin " + piece));
    CHECK(line.ends_with(piece + " end"));
    const size_t cut = line.find(" ... ");
    REQUIRE(cut != std::string::npos);
    CHECK((static_cast<unsigned char>(line[cut + 5]) & 0xC0) != 0x80);
  }
  const std::string whole(4000, 'x');
  CHECK(as_line(whole) == whole);
}
