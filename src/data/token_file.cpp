#include "data/token_file.h"

#include <algorithm>
#include <array>
#include <bit>
#include <filesystem>
#include <iterator>
#include <map>

#include "core/error.h"
#include "data/token_content.h"

namespace parka {
namespace {

static_assert(std::endian::native == std::endian::little, "token files are little-endian and are read as they are");

// The start of an index of Megatron's MMapIndexedDataset: magic, version (uint64), type of an id
// (uint8), sequences and document marks (uint64 each). Then follow the length of each sequence (int32), the byte in
// .bin at which each begins (int64), and the sequences that documents begin with (int64), the number of sequences
// last.
constexpr std::string_view kIndexMagic("MMIDIDX\0\0", 9);
constexpr int64_t kIndexHeaderBytes = 9 + 8 + 1 + 8 + 8;

constexpr int64_t kLlmCHeaderBytes = 256 * 4;

template <typename T>
T read_value(const ReadOnlyFile& file, int64_t offset) {
  T value{};
  file.read(offset, std::as_writable_bytes(std::span(&value, 1)));
  return value;
}

bool ends_with(const std::string& path, std::string_view extension) {
  return std::filesystem::path(path).extension() == extension;
}

std::string with_extension(const std::string& path, std::string_view extension) {
  return std::filesystem::path(path).replace_extension(extension).string();
}

// Behind document marks an index may have the mode of each sequence (int8), as of data with images: 0 is text.
void refuse_modes(const ReadOnlyFile& index, int64_t first) {
  constexpr int64_t kPiece = 1 << 18;
  std::vector<uint8_t> modes;
  for (; first < index.size(); first += kPiece) {
    modes.resize(static_cast<size_t>(std::min(kPiece, index.size() - first)));
    index.read(first, std::as_writable_bytes(std::span(modes)));
    if (std::ranges::all_of(modes, [](uint8_t mode) { return mode == 0; })) continue;
    throw_bad_input("{}: has sequences of several modes, as Megatron's data with images; make files of text alone",
                    index.path());
  }
}

bool is_llm_c_magic(int32_t magic) { return magic == 20240520 || magic == 20240801; }

// Widens ids to int32. Returns the index of the first id that is not below vocab_size, or ids.size().
template <typename Token>
size_t widen(std::span<const Token> ids, int64_t vocab_size, int32_t* out) {
  for (size_t i = 0; i < ids.size(); ++i) {
    if (int64_t{ids[i]} >= vocab_size) return i;
    out[i] = static_cast<int32_t>(ids[i]);
  }
  return ids.size();
}

// True if an array of numpy.save() begins near a byte, as where files were joined.
bool is_near_numpy(const ReadOnlyFile& file, int64_t byte) {
  constexpr int64_t kReach = 256;
  const int64_t begin = std::max<int64_t>(0, byte - kReach);
  std::string bytes(static_cast<size_t>(std::min(file.size(), byte + kReach) - begin), '\0');
  file.read(begin, std::as_writable_bytes(std::span(bytes)));
  return bytes.find("\x93NUMPY") != bytes.npos;
}

template <typename Token>
void read_tokens(const ReadOnlyFile& file, int64_t first_byte, int64_t first_token, int64_t count,
                 int64_t vocab_size, int32_t* out) {
  std::vector<Token> ids(static_cast<size_t>(count));
  file.read(first_byte + first_token * static_cast<int64_t>(sizeof(Token)), std::as_writable_bytes(std::span(ids)));
  const size_t bad = widen(std::span<const Token>(ids), vocab_size, out);
  if (bad < ids.size()) {
    const int64_t token = first_token + static_cast<int64_t>(bad);
    throw_bad_input("{}: token {} is id {}, but the vocabulary has {} ids; {}", file.path(), token, ids[bad],
                    vocab_size,
                    is_near_numpy(file, first_byte + token * static_cast<int64_t>(sizeof(Token)))
                        ? "a header of numpy.save() is there, as where files were joined: join raw ids alone"
                        : "set model.vocab_size to that of the tokenizer, or check data.token_dtype");
  }
}

}  // namespace

int64_t size_of(TokenType type) { return type == TokenType::kUint16 ? 2 : 4; }

std::string_view name_of(TokenFormat format) {
  switch (format) {
    case TokenFormat::kRaw: return "raw";
    case TokenFormat::kMegatron: return "Megatron";
    case TokenFormat::kLlmC: return "llm.c";
  }
  throw_internal("{} is not a token format", static_cast<int>(format));
}

TokenFile::TokenFile(const std::string& path, TokenType raw_type, int64_t vocab_size)
    : tokens_(ends_with(path, ".idx") ? with_extension(path, ".bin") : path), type_(raw_type) {
  const bool asks_for_index = ends_with(path, ".idx"), is_bin = ends_with(tokens_.path(), ".bin");
  if (is_bin && !asks_for_index && tokens_.size() >= 8 && is_llm_c_magic(read_value<int32_t>(tokens_, 0))) {
    open_llm_c();
  } else if (asks_for_index || (is_bin && file_exists(with_extension(path, ".idx")))) {
    open_megatron();
  } else {
    open_raw(vocab_size);
  }
}

void TokenFile::open_raw(int64_t vocab_size) {
  const int64_t token_size = size_of(type_);
  check_raw_content(tokens_, type_, vocab_size);
  if (tokens_.size() % token_size != 0) {
    throw_bad_input(
        "{}: {} bytes are not a whole number of {}-byte tokens; check data.token_dtype, or copy it again", path(),
        tokens_.size(), token_size);
  }
  num_tokens_ = tokens_.size() / token_size;
  sample_ids(vocab_size);
}

std::vector<std::vector<int32_t>> TokenFile::sample_ids(int64_t vocab_size) const {
  const int64_t token_size = size_of(type_);
  std::vector<std::vector<int32_t>> pages;
  for (const FilePage& page : sample_pages(num_tokens_ * token_size)) {
    std::vector<int32_t>& ids = pages.emplace_back(static_cast<size_t>(page.bytes / token_size));
    read(page.offset / token_size, std::ssize(ids), vocab_size, ids.data());
  }
  return pages;
}

TokenFile::Repeated TokenFile::most_repeated() const {
  constexpr int64_t kLeast = 16;  // which no text has
  std::map<int32_t, int64_t> repeated;
  int64_t all = 0;
  for (const std::vector<int32_t>& ids : sample_ids(kAnyVocabulary)) {
    all += std::ssize(ids);
    for (auto begin = ids.begin(); begin != ids.end();) {
      const auto end = std::find_if(begin, ids.end(), [&](int32_t id) { return id != *begin; });
      if (end - begin >= kLeast) repeated[*begin] += end - begin;
      begin = end;
    }
  }
  const auto most = std::ranges::max_element(repeated, {}, [](const auto& run) { return run.second; });
  if (most == repeated.end()) return {};
  return {most->first, static_cast<double>(most->second) / static_cast<double>(all)};
}

void TokenFile::open_llm_c() {
  format_ = TokenFormat::kLlmC;
  if (tokens_.size() < kLlmCHeaderBytes) {
    throw_bad_input("{}: begins like a file of llm.c but ends within the header; make it again", path());
  }
  const auto magic = read_value<int32_t>(tokens_, 0), version = read_value<int32_t>(tokens_, 4);
  const bool wide = magic == 20240801;
  const int32_t known_version = wide ? 7 : 1;
  if (version != known_version) {
    throw_bad_input("{}: is an llm.c file {} of version {}, but only version {} can be read; make it again", path(),
                    magic, version, known_version);
  }
  type_ = wide ? TokenType::kUint32 : TokenType::kUint16;
  first_byte_ = kLlmCHeaderBytes;
  num_tokens_ = read_value<int32_t>(tokens_, 8);
  if (num_tokens_ < 0 || tokens_.size() != first_byte_ + num_tokens_ * size_of(type_)) {
    throw_bad_input("{}: its header says {} tokens of {} bytes, but {} bytes follow it; copy it again", path(),
                    num_tokens_, size_of(type_), tokens_.size() - first_byte_);
  }
}

void TokenFile::open_megatron() {
  format_ = TokenFormat::kMegatron;
  ReadOnlyFile file(with_extension(path(), ".idx"));
  const std::string& name = file.path();
  std::array<char, kIndexMagic.size()> magic{};
  if (file.size() >= kIndexHeaderBytes) file.read(0, std::as_writable_bytes(std::span(magic)));
  if (std::string_view(magic.data(), magic.size()) != kIndexMagic || read_value<uint64_t>(file, 9) != 1) {
    throw_bad_input("{}: is not a Megatron index (MMIDIDX, version 1); make it again, or rename {}", name, path());
  }
  const int code = read_value<uint8_t>(file, 17);
  if (code != 8 && code != 4) {
    throw_bad_input("{}: its token ids have Megatron's type {}; only uint16 (8) and int32 (4) can be read", name,
                    code);
  }
  type_ = code == 8 ? TokenType::kUint16 : TokenType::kUint32;
  const auto sequences = read_value<uint64_t>(file, 18), marks = read_value<uint64_t>(file, 26);
  const auto file_bytes = static_cast<uint64_t>(file.size());
  const bool too_many = sequences > file_bytes || marks > file_bytes;
  const uint64_t listed = static_cast<uint64_t>(kIndexHeaderBytes) + 12 * sequences + 8 * marks;
  if (too_many || (file_bytes != listed && file_bytes != listed + sequences)) {
    throw_bad_input("{}: its {} bytes are not an index of {} sequences and {} document marks; copy it again", name,
                    file.size(), sequences, marks);
  }
  if (file_bytes != listed) refuse_modes(file, static_cast<int64_t>(listed));
  index_.emplace(Index{std::move(file), static_cast<int64_t>(sequences), static_cast<int64_t>(marks)});
  int64_t last_length = 0;
  for_each_sequence([&](int64_t length) {
    num_tokens_ += length;
    last_length = length;
  });
  const int64_t token_size = size_of(type_);
  bool fits = num_tokens_ * token_size == tokens_.size();
  if (fits && index_->num_sequences > 0) {
    const int64_t pointers = kIndexHeaderBytes + 4 * index_->num_sequences;
    fits = read_value<int64_t>(index_->file, pointers) == 0 &&
           read_value<int64_t>(index_->file, pointers + 8 * (index_->num_sequences - 1)) ==
               (num_tokens_ - last_length) * token_size;
  }
  if (!fits) {
    throw_bad_input("{}: lists {} tokens of {} bytes, but {} has {} bytes; the two files do not belong together",
                    index_->file.path(), num_tokens_, token_size, path(), tokens_.size());
  }
}

template <typename F>
void TokenFile::for_each_sequence(const F& f) const {
  constexpr int64_t kPiece = 1 << 18;
  std::vector<int32_t> lengths;
  for (int64_t begin = 0; begin < index_->num_sequences; begin += kPiece) {
    lengths.resize(static_cast<size_t>(std::min(kPiece, index_->num_sequences - begin)));
    index_->file.read(kIndexHeaderBytes + 4 * begin, std::as_writable_bytes(std::span(lengths)));
    for (const int32_t length : lengths) {
      if (length < 0)
        throw_bad_input("{}: has a sequence of {} tokens; make it again", index_->file.path(), length);
      f(int64_t{length});
    }
  }
}

std::vector<int64_t> TokenFile::read_document_starts() const {
  PARKA_REQUIRE(index_.has_value());
  std::vector<int64_t> marks(static_cast<size_t>(index_->num_document_marks));
  index_->file.read(kIndexHeaderBytes + 12 * index_->num_sequences, std::as_writable_bytes(std::span(marks)));
  const bool in_order = std::is_sorted(marks.begin(), marks.end());
  if (!in_order || (!marks.empty() && (marks.front() < 0 || marks.back() > index_->num_sequences))) {
    throw_bad_input("{}: its document marks are not in order or exceed its {} sequences; make it again",
                    index_->file.path(), index_->num_sequences);
  }
  // From sequences to tokens, in place.
  size_t next = 0;
  int64_t sequence = 0, token = 0;
  for_each_sequence([&](int64_t length) {
    while (next < marks.size() && marks[next] == sequence) marks[next++] = token;
    token += length;
    ++sequence;
  });
  while (next < marks.size()) marks[next++] = token;
  marks.erase(std::unique(marks.begin(), marks.end()), marks.end());
  if (!marks.empty() && marks.back() == num_tokens_) marks.pop_back();
  return marks;
}

void TokenFile::read(int64_t first, int64_t count, int64_t vocab_size, int32_t* out) const {
  PARKA_REQUIRE(first >= 0 && count >= 0 && first + count <= num_tokens_);
  switch (type_) {
    case TokenType::kUint16: return read_tokens<uint16_t>(tokens_, first_byte_, first, count, vocab_size, out);
    case TokenType::kUint32: return read_tokens<uint32_t>(tokens_, first_byte_, first, count, vocab_size, out);
  }
}

void TokenFile::open_mask() {
  const std::string mask_path = path() + ".mask";
  if (!file_exists(mask_path)) {
    throw_bad_input(
        "{}: no such file; data.loss_mask, or data.documents without data.document_start or document_end, needs a mask "
        "file beside each token file (parka prepare --chat makes them)",
        mask_path);
  }
  ReadOnlyFile file(mask_path);
  if (file.size() != num_tokens_) {
    throw_bad_input("{}: its {} bytes are not one for each of the {} tokens of {}; make both again", mask_path,
                    file.size(), num_tokens_, path());
  }
  mask_.emplace(std::move(file));
}

void TokenFile::read_marks(int64_t first, int64_t count, uint8_t* out) const {
  PARKA_REQUIRE(mask_.has_value());
  const std::span<uint8_t> marks(out, static_cast<size_t>(count));
  mask_->read(first, std::as_writable_bytes(marks));
  const auto bad = std::find_if(marks.begin(), marks.end(),
                                [](uint8_t mark) { return mark > (kMarkTarget | kMarkDocumentStart); });
  if (bad == marks.end()) return;
  throw_bad_input("{}: byte {} is {}; a mark is 0 to 3 (docs/data.md); make the file again", mask_->path(),
                  first + std::distance(marks.begin(), bad), *bad);
}

std::vector<const ReadOnlyFile*> TokenFile::files() const {
  std::vector<const ReadOnlyFile*> all = {&tokens_};
  if (index_) all.push_back(&index_->file);
  if (mask_) all.push_back(&*mask_);
  return all;
}

}  // namespace parka
