#pragma once
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "core/error.h"
#include "tests/support/temporary_folder.h"

// Fuzz targets: each gives bytes that a user or a file may bring to one of Parka's parsers. Whatever they are, the
// parser accepts them or refuses them as bad input, and nothing else happens.
//
// A target is one file, FUZZ_TARGET(name) and a body that reads `input`. It is built twice: with clang as a program
// of libFuzzer's (scripts/fuzz.sh), and into the test suite, which runs it on fuzz/seeds/<name> and on damaged
// copies of what lies there (tests/fuzz/damaged_seeds.h).
namespace parka::fuzz {

// Something that no input may cause. Not an Error, so that nothing takes it for a refusal.
class Finding : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};

inline void require(bool condition, const std::string& what) {
  if (!condition) throw Finding(what);
}

// A refusal is Error(kBadInput) with a message of one line.
void check_refusal(const Error& error);

// Whether `read` accepts. Exceptions other than a refusal pass through, and are findings.
template <typename Read>
bool accepts(const Read& read) {
  try {
    read();
    return true;
  } catch (const Error& error) {
    check_refusal(error);
    return false;
  }
}

// For what must be accepted: what was written by Parka's own writers.
template <typename Read>
void require_accepted(const char* what, const Read& read) {
  try {
    read();
  } catch (const Error& error) {
    throw Finding(std::string(what) + ": " + error.what());
  }
}

// The parts of an input that stands for several files, which lines "%%" divide; those that are missing are empty.
std::vector<std::string_view> parts_of(std::string_view input, size_t count);

// A folder of this process alone. Targets give their files fixed names in it, so that nothing has to be removed.
const test::TemporaryFolder& folder();
// Gives a file in it this content, or removes it where there is none; returns its path.
std::string place_file(const std::string& name, std::string_view content);

}  // namespace parka::fuzz

#ifdef PARKA_FUZZ_TESTS
#include "tests/fuzz/damaged_seeds.h"
#include "tests/support/catch.h"
#define FUZZ_TARGET(name)                                                                                    \
  static void target_##name(std::string_view input);                                                         \
  TEST_CASE("damaged input is refused: " #name) { parka::test::run_on_damaged_seeds(#name, target_##name); } \
  static void target_##name(std::string_view input)
#else
#define FUZZ_TARGET(name)                                                       \
  static void target_##name(std::string_view input);                            \
  extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {     \
    target_##name(std::string_view(reinterpret_cast<const char*>(data), size)); \
    return 0;                                                                   \
  }                                                                             \
  static void target_##name(std::string_view input)
#endif
