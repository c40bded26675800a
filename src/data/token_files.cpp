#include "data/token_files.h"

#include <algorithm>
#include <array>
#include <bit>
#include <filesystem>
#include <iterator>
#include <limits>
#include <span>
#include <string_view>
#include <utility>

#include "core/error.h"

namespace parka {
namespace {

static_assert(std::endian::native == std::endian::little, "token files are little-endian and are read as they are");

int64_t size_of(TokenType type) { return type == TokenType::kUint16 ? 2 : 4; }

// numpy.save() writes a header whose size is a whole number of tokens: it would be trained on without a trace.
void refuse_numpy_header(const ReadOnlyFile& file) {
  constexpr std::string_view kMagic = "\x93NUMPY";
  std::array<char, kMagic.size()> start{};
  if (file.size() < static_cast<int64_t>(start.size())) return;
  file.read(0, std::as_writable_bytes(std::span(start)));
  if (std::string_view(start.data(), start.size()) != kMagic) return;
  throw_bad_input("{}: has the header of numpy.save(); write raw ids, with ndarray.tofile() or prepare_data.py",
                  file.path());
}

// Widens ids to int32. Returns the index of the first id that is not below vocab_size, or ids.size().
template <typename Token>
size_t widen(std::span<const Token> ids, int64_t vocab_size, int32_t* out) {
  for (size_t i = 0; i < ids.size(); ++i) {
    if (int64_t{ids[i]} >= vocab_size) return i;
    out[i] = static_cast<int32_t>(ids[i]);
  }
  return ids.size();
}

template <typename Token>
void read_tokens(const ReadOnlyFile& file, int64_t first_token, int64_t count, int64_t vocab_size, int32_t* out) {
  std::vector<Token> ids(static_cast<size_t>(count));
  file.read(first_token * static_cast<int64_t>(sizeof(Token)), std::as_writable_bytes(std::span(ids)));
  const size_t bad = widen(std::span<const Token>(ids), vocab_size, out);
  if (bad < ids.size()) {
    throw_bad_input(
        "{}: token {} is id {}, but the vocabulary has {} ids; check model.vocab_size and data.token_dtype",
        file.path(), first_token + static_cast<int64_t>(bad), ids[bad], vocab_size);
  }
}

// FNV-1a, 64 bits (Fowler, Noll, Vo): no more is asked of it than that a changed file gives another value.
class Fnv1a {
 public:
  void add(std::span<const std::byte> bytes) {
    for (std::byte b : bytes) value_ = (value_ ^ std::to_integer<uint64_t>(b)) * 0x100000001b3u;
  }
  void add(int64_t number) { add(std::as_bytes(std::span(&number, 1))); }
  uint64_t value() const { return value_; }

 private:
  uint64_t value_ = 0xcbf29ce484222325u;
};

void add_file(Fnv1a& hash, const ReadOnlyFile& file) {
  constexpr int64_t kEdge = 4096;
  const std::string name = std::filesystem::path(file.path()).filename().string();
  hash.add(static_cast<int64_t>(name.size()));
  hash.add(std::as_bytes(std::span(name)));
  hash.add(file.size());
  std::vector<std::byte> edge(static_cast<size_t>(std::min(kEdge, file.size())));
  for (const int64_t offset : {int64_t{0}, file.size() - static_cast<int64_t>(edge.size())}) {
    file.read(offset, edge);
    hash.add(edge);
  }
}

}  // namespace

TokenFiles::TokenFiles(const std::vector<std::string>& paths, TokenType type, int64_t sequence_length,
                       int64_t vocab_size)
    : type_(type), sequence_length_(sequence_length), vocab_size_(vocab_size) {
  PARKA_REQUIRE(sequence_length > 0);
  PARKA_REQUIRE(vocab_size > 0 && vocab_size <= int64_t{std::numeric_limits<int32_t>::max()} + 1);
  if (paths.empty()) throw_bad_input("no token files are given; list them in the config's data section");
  const int64_t token_size = size_of(type);
  int64_t end_sequence = 0;
  entries_.reserve(paths.size());
  for (const std::string& path : paths) {
    ReadOnlyFile file(path);
    if (file.size() % token_size != 0) {
      throw_bad_input(
          "{}: {} bytes are not a whole number of {}-byte tokens; check data.token_dtype, or copy it again", path,
          file.size(), token_size);
    }
    const int64_t tokens = file.size() / token_size;
    if (tokens < sequence_length) {
      throw_bad_input("{}: {} tokens are less than one sequence of {}; leave it out or lower data.sequence_length",
                      path, tokens, sequence_length);
    }
    refuse_numpy_header(file);
    end_sequence += tokens / sequence_length;
    entries_.push_back({std::move(file), end_sequence});
  }
}

int64_t TokenFiles::num_sequences() const { return entries_.back().end_sequence; }

int64_t TokenFiles::num_tokens() const { return num_sequences() * sequence_length_; }

void TokenFiles::read(int64_t sequence, int32_t* out) const {
  PARKA_REQUIRE(sequence >= 0 && sequence < num_sequences());
  const auto entry = std::upper_bound(entries_.begin(), entries_.end(), sequence,
                                      [](int64_t s, const Entry& e) { return s < e.end_sequence; });
  const int64_t begin_sequence = entry == entries_.begin() ? 0 : std::prev(entry)->end_sequence;
  const int64_t first_token = (sequence - begin_sequence) * sequence_length_;
  switch (type_) {
    case TokenType::kUint16:
      return read_tokens<uint16_t>(entry->file, first_token, sequence_length_, vocab_size_, out);
    case TokenType::kUint32:
      return read_tokens<uint32_t>(entry->file, first_token, sequence_length_, vocab_size_, out);
  }
}

uint64_t TokenFiles::fingerprint() const {
  Fnv1a hash;
  hash.add(sequence_length_);
  hash.add(size_of(type_));
  for (const Entry& entry : entries_) add_file(hash, entry.file);
  return hash.value();
}

}  // namespace parka
