#include "tests/fuzz/damaged_seeds.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cctype>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <new>
#include <random>
#include <string>
#include <vector>

#include "tests/support/catch.h"
#include "tests/support/temporary_folder.h"

namespace {

// A size that a file claims must be checked before memory is taken for it.
constexpr size_t kLargestAllocation = size_t{64} << 20;
std::atomic<bool> limited = false;

void* allocate(size_t size) {
  if (limited && size > kLargestAllocation) throw std::bad_alloc();
  if (void* const memory = std::malloc(std::max<size_t>(size, 1))) return memory;
  throw std::bad_alloc();
}

void* allocate_or_null(size_t size) noexcept {
  try {
    return allocate(size);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

}  // namespace

// All of them: AddressSanitizer has its own of each one that is not here, and they must fit together.
void* operator new(size_t size) { return allocate(size); }
void* operator new[](size_t size) { return allocate(size); }
void* operator new(size_t size, const std::nothrow_t&) noexcept { return allocate_or_null(size); }
void* operator new[](size_t size, const std::nothrow_t&) noexcept { return allocate_or_null(size); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, size_t) noexcept { std::free(memory); }
void operator delete(void* memory, const std::nothrow_t&) noexcept { std::free(memory); }
void operator delete[](void* memory, const std::nothrow_t&) noexcept { std::free(memory); }

namespace parka::test {
namespace {

namespace fs = std::filesystem;

constexpr size_t kDamagedCopies = 2000;

class Damage {
 public:
  explicit Damage(const std::vector<std::string>& seeds) : seeds_(seeds) {}

  std::string next() {
    std::string text = seeds_[below(seeds_.size())];
    const size_t times = below(2) == 0 ? 1 : 2 + below(2);
    for (size_t i = 0; i < times; ++i) once(text);
    return text;
  }

 private:
  // Not std::uniform_int_distribution, whose numbers differ from one library to the next.
  size_t below(size_t limit) { return limit == 0 ? 0 : random_() % limit; }

  void once(std::string& text) {
    const size_t at = below(text.size()), length = 1 + below(16);
    switch (below(12)) {  // a number in five of them
      case 0: flip(text, at); break;
      case 1: text.resize(at); break;
      case 2: text.erase(std::min(at, text.size()), length); break;
      case 3: text.insert(at, text.substr(at, length)); break;
      case 4: text.insert(at, 1, static_cast<char>(random_())); break;
      case 5: overwrite(text, at); break;
      case 6: mix(text, at); break;
      default: replace_number(text, at);
    }
  }

  void flip(std::string& text, size_t at) {
    if (!text.empty()) text[at] = static_cast<char>(text[at] ^ (1 << below(8)));
  }

  // A binary number of 4 or 8 bytes, where such numbers mostly lie.
  void overwrite(std::string& text, size_t at) {
    constexpr std::array<uint64_t, 7> kNumbers = {
        0, ~uint64_t{0}, uint64_t{1} << 60, uint64_t{1} << 63, INT64_MAX, uint64_t{1} << 31, 0x7fffffffffff};
    const uint64_t number = kNumbers[below(kNumbers.size())];
    const size_t size = below(2) == 0 ? 4 : 8;
    at -= at % 2;
    if (at + size <= text.size()) std::memcpy(text.data() + at, &number, size);
  }

  void mix(std::string& text, size_t at) {
    const std::string& other = seeds_[below(seeds_.size())];
    text = text.substr(0, at) + other.substr(below(other.size()));
  }

  // The number in digits at `at` or behind it: another one, or one more, which limits must see.
  void replace_number(std::string& text, size_t at) {
    constexpr std::array<const char*, 14> kNumbers = {"0",
                                                      "-1",
                                                      "1.5",
                                                      "1e300",
                                                      "-1e300",
                                                      "1e999",
                                                      "2147483648",
                                                      "9223372036854775807",
                                                      "9223372036854775808",
                                                      "18446744073709551615",
                                                      "4611686018427387904",
                                                      "null",
                                                      "\"x\"",
                                                      "[]"};
    const auto is_digit = [](unsigned char c) { return std::isdigit(c) != 0; };
    const auto from = text.begin() + static_cast<std::ptrdiff_t>(at);
    auto begin = std::find_if(from, text.end(), is_digit);
    while (begin != text.begin() && is_digit(static_cast<unsigned char>(*std::prev(begin)))) --begin;
    const auto end = std::find_if_not(begin, text.end(), is_digit);
    const std::string number(begin, end);
    const bool is_short = !number.empty() && number.size() < 18;
    const std::string next = is_short ? std::to_string(std::stoll(number) + 1) : "1";
    text.replace(begin, end, below(3) == 0 ? next : kNumbers[below(kNumbers.size())]);
  }

  const std::vector<std::string>& seeds_;
  std::mt19937_64 random_{20240917};
};

std::vector<std::string> read_seeds(const std::string& name) {
  std::vector<std::string> paths, seeds;
  for (const auto& entry : fs::directory_iterator(std::string(PARKA_SOURCE_DIR) + "/fuzz/seeds/" + name)) {
    paths.push_back(entry.path().string());
  }
  std::sort(paths.begin(), paths.end());
  for (const std::string& path : paths) seeds.push_back(read_file(path));
  return seeds;
}

// What the target throws; empty where it throws nothing.
std::string run(const std::function<void(std::string_view)>& target, const std::string& input) {
  std::string thrown;
  limited = true;
  try {
    // A copy that ends where its memory ends, so that AddressSanitizer sees a read behind it.
    const std::vector<char> exact(input.begin(), input.end());
    target({exact.data(), exact.size()});
  } catch (const std::exception& error) {
    thrown = std::string("threw ") + error.what();
  }
  limited = false;
  return thrown;
}

}  // namespace

void run_on_damaged_seeds(const std::string& name, const std::function<void(std::string_view)>& target) {
  std::vector<std::string> inputs = read_seeds(name);
  REQUIRE_FALSE(inputs.empty());
  Damage damage(inputs);
  std::vector<std::string> damaged;
  for (size_t i = 0; i < kDamagedCopies; ++i) damaged.push_back(damage.next());
  inputs.insert(inputs.end(), damaged.begin(), damaged.end());
  inputs.emplace_back();
  for (const std::string& input : inputs) {
    const std::string thrown = run(target, input);
    if (thrown.empty()) continue;
    const std::string path = (fs::temp_directory_path() / ("parka_fuzz_" + name)).string();
    write_file(path, input);
    FAIL("the input in " << path << " " << thrown);
  }
}

}  // namespace parka::test
