#include "data/token_content.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cctype>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <numeric>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "core/error.h"
#include "data/token_file.h"

namespace parka {
namespace {

using std::string_view_literals::operator""sv;

template <typename T>
T value_at(std::string_view bytes, size_t offset) {
  T value{};
  if (offset + sizeof(T) <= bytes.size()) std::memcpy(&value, bytes.data() + offset, sizeof(T));
  return value;
}

uint8_t byte_at(std::string_view bytes, size_t offset) { return value_at<uint8_t>(bytes, offset); }

// Some ids have the bytes of a short magic number: such a format needs more that holds of each of its files.
bool is_gzip(std::string_view head) {
  const uint8_t method = byte_at(head, 2), flags = byte_at(head, 3), effort = byte_at(head, 8),
                system = byte_at(head, 9);
  return head.size() >= 18 && head.starts_with("\x1f\x8b") && method == 8 && flags < 0x20 &&
         (effort == 0 || effort == 2 || effort == 4) && (system <= 13 || system == 255);
}

bool is_zip(std::string_view head) {
  const auto version = value_at<uint16_t>(head, 4), method = value_at<uint16_t>(head, 8);
  return head.starts_with("PK\3\4") && version <= 63 && method < 100;
}

bool is_bzip2(std::string_view head) {
  return head.size() > 4 && head.starts_with("BZh") &&
         (head.substr(4).starts_with("\x31\x41\x59\x26\x53\x59") ||
          head.substr(4).starts_with("\x17\x72\x45\x38\x50\x90"));
}

bool is_zstd(std::string_view head) {
  const auto magic = value_at<uint32_t>(head, 0);
  return magic == 0xfd2fb528u || (magic & 0xfffffff0u) == 0x184d2a50u;  // the latter begins what pzstd writes
}

bool is_elf(std::string_view head) {
  const uint8_t width = byte_at(head, 4), order = byte_at(head, 5);
  return head.starts_with(
             "\x7f"
             "ELF") &&
         (width == 1 || width == 2) && (order == 1 || order == 2);
}

// A length of 8 bytes, and then a JSON object that long.
bool is_safetensors(std::string_view head, int64_t file_bytes) {
  const auto length = value_at<uint64_t>(head, 0);
  return length >= 2 && length < static_cast<uint64_t>(file_bytes) && head.substr(8).starts_with("{\"");
}

// A message: its marker, the length of its description, and the offset in there of a table.
bool is_arrow_stream(std::string_view head, int64_t file_bytes) {
  const auto length = value_at<uint32_t>(head, 4), table = value_at<uint32_t>(head, 8);
  return head.starts_with("\xff\xff\xff\xff") && length >= 16 && length % 8 == 0 &&
         length < static_cast<uint64_t>(file_bytes) && table >= 4 && table < length && table % 4 == 0;
}

bool is_pickle(std::string_view head, int64_t file_bytes) {
  const auto frame = value_at<uint64_t>(head, 3);
  return (head.starts_with("\x80\x04\x95") || head.starts_with("\x80\x05\x95")) && frame > 0 &&
         frame < static_cast<uint64_t>(file_bytes);
}

// The samples of a shard of MosaicML's, as of litdata's chunks, begin at as many offsets of 32 bits as it has
// samples, and the last one ends at one more, where the file does.
bool is_shard(const ReadOnlyFile& file, std::string_view head) {
  constexpr int64_t kMostText = 1 << 16;  // bytes in JSON that say of what a sample consists
  const int64_t samples = value_at<uint32_t>(head, 0), first = value_at<uint32_t>(head, 4), last = 4 + 4 * samples;
  if (samples < 1 || first < last + 4 || first > last + 4 + kMostText || last + 4 > file.size()) return false;
  uint32_t end = 0;
  file.read(last, std::as_writable_bytes(std::span(&end, 1)));
  return end == file.size();
}

// The end of a line in which numpy.save() describes an array, whose beginning is cut off.
bool is_rest_of_numpy(std::string_view head) {
  constexpr size_t kLeast = 8;
  const std::string_view line = head.substr(0, head.substr(0, 128).find('\n'));
  const auto is_printable = [](char byte) { return byte >= ' ' && byte <= '~'; };
  if (line.size() < kLeast || line.size() > 128 || !std::ranges::all_of(line, is_printable)) return false;
  return line.find("'fortran_order'") != line.npos || line.find("), }") != line.npos ||
         line.find_first_not_of(' ') == line.npos;
}

// A token file's mask has its name with .mask added.
bool is_mask(const std::string& path) {
  constexpr std::string_view kEnd = ".mask";
  return path.ends_with(kEnd) && file_exists(path.substr(0, path.size() - kEnd.size()));
}

// The magic number of a file of llm.c or 0: its header is 256 numbers, the last half of them 0.
int32_t llm_c_magic(std::string_view head) {
  constexpr size_t kHeader = 1024;
  constexpr std::array<int32_t, 7> kMagic = {20240326, 20240327, 20240328, 20240520, 20240522, 20240527, 20240801};
  const auto magic = value_at<int32_t>(head, 0), version = value_at<int32_t>(head, 4);
  if (head.size() < kHeader || std::ranges::find(kMagic, magic) == kMagic.end() || version < 1 || version > 99)
    return 0;
  const std::string_view rest = head.substr(kHeader / 2, kHeader / 2);
  return std::ranges::all_of(rest, [](char byte) { return byte == 0; }) ? magic : 0;
}

constexpr std::string_view kDecompress = "decompress it, and make token files of it if it is text";
constexpr std::string_view kPrepare = "make token files of its text with parka prepare";
constexpr std::string_view kWriteIds = "write the ids in it as raw ids, as numpy's astype() and tofile() do";
constexpr std::string_view kWriteIntegers = "write them as uint16 or uint32, as numpy's astype() and tofile() do";
constexpr std::string_view kTokensAlone = "name the token file alone, beside which it lies";
constexpr std::string_view kNoIds = "list token files; parka prepare makes them";

struct Format {
  std::string_view what, remedy;
};

Format format_of(const ReadOnlyFile& file, std::string_view head) {
  const int64_t file_bytes = file.size();
  struct Magic {
    std::string_view bytes;
    Format format;
  };
  static constexpr Magic kMagic[] = {
      {"\x93NUMPY"sv, {"has the header of numpy.save()", "write raw ids, with ndarray.tofile() or parka prepare"}},
      {"PAR1"sv, {"is Parquet", kPrepare}},
      {"ARROW1\0\0"sv, {"is an Arrow file", kPrepare}},
      {"\xfd"
       "7zXZ\0"sv,
       {"is compressed with xz", kDecompress}},
      {"\x04\x22\x4d\x18"sv, {"is compressed with lz4", kDecompress}},
      {"\x89HDF\r\n\x1a\n"sv, {"is HDF5", kWriteIds}},
      {"\x80\x02\x8a\x0al\xfc\x9c\x46\xf9 j\xa8P\x19"sv, {"is of torch.save()", kWriteIds}},
      {"LITPKDS"sv, {"is a packed file of LitGPT", kWriteIds}},
      {"BIN.TOK\n"sv,
       {"is a token file of LLMQ", "write the ids behind its header of 1,024 bytes to a file of their own"}},
      {"MMIDIDX\0\0"sv, {"is an index of Megatron", "name it .idx, as the .bin that it belongs to"}},
      {"PARKAIMG"sv, {"says where images are in a token file", kTokensAlone}},
      {"PARKAPIX"sv, {"has pixels of images", kTokensAlone}},
      {"GGUF"sv, {"is a model in GGUF", kNoIds}},
      {"SQLite format 3\0"sv, {"is a database of SQLite", kPrepare}},
      {"%PDF-"sv, {"is PDF", kPrepare}},
      {"\x89PNG\r\n\x1a\n"sv, {"is a PNG picture", kNoIds}},
      {"\xff\xd8\xff\xe0\0\x10JFIF"sv, {"is a JPEG picture", kNoIds}},
  };
  const auto found = std::ranges::find_if(kMagic, [&](const Magic& m) { return head.starts_with(m.bytes); });
  if (found != std::end(kMagic)) return found->format;
  if (is_gzip(head)) return {"is compressed with gzip", kDecompress};
  if (is_zstd(head)) return {"is compressed with zstd", kDecompress};
  if (is_bzip2(head)) return {"is compressed with bzip2", kDecompress};
  if (is_zip(head)) return {"is a ZIP archive, as numpy.savez() and torch.save() write", kWriteIds};
  if (head.size() > 262 && head.substr(257).starts_with("ustar")) return {"is a tar archive", "unpack it"};
  if (is_elf(head)) return {"is a program", kNoIds};
  if (is_safetensors(head, file_bytes)) return {"is safetensors", kWriteIds};
  if (is_arrow_stream(head, file_bytes)) return {"is an Arrow stream", kPrepare};
  if (is_pickle(head, file_bytes)) return {"is a pickle of Python", kWriteIds};
  if (is_shard(file, head)) return {"is a shard of samples, as of MosaicML's MDS or of litdata", kWriteIds};
  if (is_rest_of_numpy(head)) return {"begins within the header of numpy.save()", kWriteIds};
  const int32_t magic = llm_c_magic(head);
  if (magic == 20240520 || magic == 20240801) return {"is a token file of llm.c", "rename it to end in .bin"};
  if (magic != 0) return {"is a file of llm.c, but of no tokens for training", kNoIds};
  return {};
}

// True if characters in UTF-8 are whole, but for those that a page cuts.
bool is_utf8(std::string_view page) {
  const auto is_inside = [](char byte) { return (static_cast<uint8_t>(byte) & 0xc0) == 0x80; };
  size_t i = 0;
  while (i < std::min<size_t>(page.size(), 3) && is_inside(page[i])) ++i;
  while (i < page.size()) {
    const auto first = static_cast<uint8_t>(page[i++]);
    if (first < 0x80) continue;
    if (first < 0xc2 || first > 0xf4) return false;
    for (int more = first < 0xe0 ? 1 : first < 0xf0 ? 2 : 3; more > 0 && i < page.size(); --more, ++i) {
      if (!is_inside(page[i])) return false;
    }
  }
  return true;
}

// In UTF-8, or nearly all ASCII. Ids have control characters among their bytes, small ones 0.
bool is_text_page(std::string_view page) {
  constexpr size_t kLeast = 32;  // bytes, which ids are by chance in one file of 10^8 or fewer
  int64_t ascii = 0;
  for (const char c : page) {
    const auto byte = static_cast<uint8_t>(c);
    const bool is_space = (byte >= '\t' && byte <= '\r') || byte == 0x1b;  // the latter colours a log
    if ((byte < 0x20 && !is_space) || byte == 0x7f) return false;
    ascii += byte < 0x80;
  }
  return page.size() >= kLeast && (10 * ascii >= 9 * static_cast<int64_t>(page.size()) || is_utf8(page));
}

Format format_of_text(std::string_view head) {
  const auto first = std::ranges::find_if(head, [](char c) { return std::isspace(static_cast<uint8_t>(c)) == 0; });
  const char begin = first == head.end() ? ' ' : *first;
  if (begin == '{' || begin == '[') return {"is JSON", kPrepare};
  if (begin == '<') return {"is HTML or XML, perhaps an error that was downloaded", "download it again"};
  return {"is text", kPrepare};
}

double decode_half(uint16_t bits) {
  const int exponent = bits >> 10, fraction = bits & 0x3ff;  // with the sign
  if (exponent == 0) return fraction == 0 ? 0 : 0.5;         // which is no whole number
  return exponent >= 31 ? -1 : std::ldexp(1024 + fraction, exponent - 25);
}

// True if all numbers are whole as `decode` reads them, and are not all alike. Ids, as integers, are then 0 or
// rare.
template <typename Word, typename Decode>
bool are_whole(const std::vector<std::string>& pages, const Decode& decode) {
  constexpr int64_t kLeast = 32;
  constexpr size_t kLeastValues = 3;
  int64_t others = 0;  // than 0
  std::set<double> values;
  for (const std::string_view page : pages) {
    for (size_t i = 0; i + sizeof(Word) <= page.size(); i += sizeof(Word)) {
      const double value = decode(value_at<Word>(page, i));
      if (!(value >= 0 && value < static_cast<double>(kAnyVocabulary) && value == std::floor(value))) return false;
      others += value != 0;
      if (values.size() < kLeastValues) values.insert(value);
    }
  }
  return others >= kLeast && values.size() >= kLeastValues;
}

bool are_floats(const std::vector<std::string>& pages) {
  return are_whole<uint16_t>(pages, decode_half) ||
         are_whole<uint16_t>(pages, [](uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }) ||
         are_whole<uint32_t>(pages, [](uint32_t bits) { return std::bit_cast<float>(bits); }) ||
         are_whole<uint64_t>(pages, [](uint64_t bits) { return std::bit_cast<double>(bits); });
}

// True if the last 16 of every 16 * stride bits are those of floating-point numbers that are dense about 0, as
// weights, embeddings and random numbers are: half as many of the smallest ones reach a power of two less far. Half
// as many of the smallest ids reach half as far, and ids of text do not leave the beginning out.
bool are_dense_floats(const std::vector<std::string>& pages, size_t stride, int fraction_bits) {
  constexpr size_t kLeast = 256;
  constexpr double kLeastStep = 0.6, kMostStep = 1.65, kMostAboveMedian = 5;
  std::vector<double> exponents;
  for (const std::string_view page : pages) {
    for (size_t i = stride; 2 * i <= page.size(); i += stride) {
      const int bits = value_at<uint16_t>(page, 2 * (i - 1)) & 0x7fff;
      if (bits != 0) exponents.push_back(std::ldexp(bits, -fraction_bits));
    }
  }
  if (exponents.size() < kLeast) return false;
  std::ranges::sort(exponents);
  const auto reach = [&](double share) {
    return exponents[static_cast<size_t>(share * static_cast<double>(exponents.size()))];
  };
  for (const double share : {0.5, 0.25, 0.125}) {
    const double step = reach(share) - reach(share / 2);
    if (step < kLeastStep || step > kMostStep) return false;
  }
  return reach(1.0 / 16) >= std::ldexp(4096, -fraction_bits) && reach(0.99) - reach(0.5) <= kMostAboveMedian;
}

// True if nearly each id is one more than that before it, as the positions of tokens are.
template <typename T>
bool are_positions(const std::vector<std::string>& pages) {
  constexpr int64_t kLeast = 256;
  int64_t pairs = 0, rising = 0;
  for (const std::string_view page : pages) {
    for (size_t i = sizeof(T); i + sizeof(T) <= page.size(); i += sizeof(T)) {
      ++pairs;
      rising += value_at<T>(page, i) == value_at<T>(page, i - sizeof(T)) + uint64_t{1};
    }
  }
  return pairs >= kLeast && 10 * rising >= 9 * pairs;
}

// True if the bytes are marks of a mask, and not ids: those have large numbers nowhere but in their lower bytes.
// Such ids as a byte of 1 behind another makes are no vocabulary.
bool are_marks(const std::vector<std::string>& pages, TokenType type) {
  constexpr size_t kLeast = 32;
  size_t bytes = 0;
  bool has_upper = false;
  std::set<uint32_t> ids;
  for (const std::string_view page : pages) {
    bytes += page.size();
    for (size_t i = 0; i < page.size(); ++i) {
      if (byte_at(page, i) > (kMarkTarget | kMarkDocumentStart)) return false;
      has_upper = has_upper || (byte_at(page, i) != 0 && i % static_cast<size_t>(size_of(type)) != 0);
    }
    for (size_t i = 0; i + 2 <= page.size(); i += 2) ids.insert(value_at<uint16_t>(page, i));
  }
  return bytes >= kLeast && has_upper && ids.size() >= 3;
}

// Calls f(id) for each id but 0, as of padding.
template <typename T, typename F>
void for_each_id(const std::vector<std::string>& pages, const F& f) {
  for (const std::string_view page : pages) {
    for (size_t i = 0; i + sizeof(T) <= page.size(); i += sizeof(T)) {
      if (const T id = value_at<T>(page, i); id != 0) f(id);
    }
  }
}

// How often each byte is the lower or the upper one of ids of 16 bits, but where both are the same, as in padding.
struct BytesOfIds {
  std::array<int64_t, 256> lower{}, upper{};
  int64_t ids = 0;

  explicit BytesOfIds(const std::vector<std::string>& pages) {
    for_each_id<uint16_t>(pages, [&](uint16_t id) {
      if (id % 256 == id / 256) return;
      ++ids;
      ++lower[id % 256];
      ++upper[id / 256];
    });
  }
};

// True if the two bytes of ids of 16 bits are of one distribution, which is not even: then each is an id. For text
// in a larger vocabulary the lower one has all values alike, and in a smaller one the upper one is 0.
bool are_bytes(const BytesOfIds& bytes) {
  constexpr double kLeast = 1024, kMostValues = 224;
  double values = 0, chi_square = 0;
  for (size_t byte = 0; byte < bytes.lower.size(); ++byte) {
    const auto both = static_cast<double>(bytes.lower[byte] + bytes.upper[byte]);
    const auto difference = static_cast<double>(bytes.lower[byte] - bytes.upper[byte]);
    if (both == 0) continue;
    ++values;
    chi_square += difference * difference / both;
  }
  // Its mean and deviation where both are of one distribution.
  const double most = values + 4 * std::sqrt(2 * values);
  return static_cast<double>(bytes.ids) >= kLeast && values >= 3 && values <= kMostValues && chi_square <= most;
}

// True if the lower bytes of ids of 16 bits are the upper ones: the frequent ids of a vocabulary have few upper
// bytes in common, and lower ones of all values.
bool are_swapped(const BytesOfIds& bytes) {
  constexpr int64_t kLeast = 256, kLeastValues = 16;
  const auto pairs_alike = [](const auto& counts) {
    return std::accumulate(counts.begin(), counts.end(), int64_t{0},
                           [](int64_t sum, int64_t count) { return sum + count * count; });
  };
  const auto is_there = [](int64_t count) { return count > 0; };
  const auto values = std::ranges::count_if(bytes.upper, is_there);
  // All values up to the greatest that is no exception, and not those of a few multiples of 256.
  const auto is_frequent = [&](int64_t count) { return 100 * count > bytes.ids; };
  const auto end = std::find_if(bytes.lower.rbegin(), bytes.lower.rend(), is_frequent).base();
  const bool are_all = 2 * std::count_if(bytes.lower.begin(), end, is_there) > end - bytes.lower.begin();
  return bytes.ids >= kLeast && values >= kLeastValues && are_all &&
         pairs_alike(bytes.lower) > 2 * pairs_alike(bytes.upper);
}

// True if ids are code units of UTF-16: characters of one script, and spaces or commas among them.
bool are_characters(const std::vector<std::string>& pages, int64_t least, bool needs_spaces) {
  constexpr std::pair<int, int> kOfAllScripts[] = {{0x9, 0xd},       {0x20, 0x7e},     {0xa0, 0x24f},
                                                   {0x2000, 0x206f}, {0x3000, 0x30ff}, {0x4e00, 0x9fff},
                                                   {0xac00, 0xd7a3}, {0xfe00, 0xffef}};
  int64_t ids = 0, characters = 0, between = 0;
  std::array<int64_t, 256> others{};  // by their upper byte, which the characters of a script have in common
  for_each_id<uint16_t>(pages, [&](uint16_t id) {
    const bool is_known = std::ranges::any_of(
        kOfAllScripts, [&](const auto& range) { return id >= range.first && id <= range.second; });
    ++ids;
    ++(is_known ? characters : others[id / 256]);
    between += id == ' ' || id == '\n' || id == 0x3001 || id == 0x3002 || id == 0xff0c;
  });
  characters += *std::max_element(others.begin() + 1, others.end());
  return ids >= least && 50 * characters >= 49 * ids && (!needs_spaces || 50 * between >= ids);
}

// Ids of a tokenizer are characters only in a small vocabulary, as of bytes, so a mark of byte order is wanted
// there.
bool is_utf16(std::string_view head, const std::vector<std::string>& pages, int64_t vocab_size) {
  constexpr int64_t kLeast = 256, kLeastWithMark = 16, kLargeVocabulary = 1 << 14;
  if (head.starts_with("\xff\xfe"))
    return are_characters({std::string(head.substr(0, 2 * kLeastWithMark))}, kLeastWithMark, false);
  return vocab_size > kLargeVocabulary && vocab_size < kAnyVocabulary && are_characters(pages, kLeast, true);
}

// True if ids are labels: -100 is what transformers and PyTorch pass over, and no token is so frequent.
template <typename T>
bool are_labels(const std::vector<std::string>& pages) {
  constexpr int64_t kLeast = 16;
  int64_t ids = 0, ignored = 0;
  for_each_id<T>(pages, [&](T id) {
    ++ids;
    ignored += id == static_cast<T>(-100);
  });
  return ignored >= kLeast && 20 * ignored >= ids;
}

// By the statistics of its numbers.
Format format_of_numbers(const ReadOnlyFile& file, TokenType type, int64_t vocab_size,
                         const std::vector<std::string>& pages, std::string_view head) {
  const bool is_ones = pages.empty() && head.front() == 1;  // ids of 257, or of 16843009, again and again
  const bool is_named = std::filesystem::path(file.path()).filename().string().find("mask") != std::string::npos;
  if (are_marks(pages, type) || (is_ones && is_named)) {
    return {"has no byte above 3, as a mask", "list token files, and put a mask beside each (docs/data.md)"};
  }
  const bool is_16 = type == TokenType::kUint16;
  if (is_utf16(head, pages, is_16 ? vocab_size : 0)) {
    return {"is text in UTF-16, or each of its ids is a character",
            "write it in UTF-8, and make token files of that"};
  }
  if (is_16 ? are_labels<uint16_t>(pages) : are_labels<uint32_t>(pages)) {
    return {"has -100 for what is not to be learnt, as labels",
            "list the ids, and put a mask beside (docs/data.md)"};
  }
  if (are_floats(pages)) return {"has ids as floating-point numbers", kWriteIntegers};
  if (are_dense_floats(pages, 1, 10) || are_dense_floats(pages, 1, 7) || are_dense_floats(pages, 2, 7) ||
      are_dense_floats(pages, 4, 4)) {
    return {"has floating-point numbers, as weights and embeddings are", kNoIds};
  }
  if (is_16 ? are_positions<uint16_t>(pages) : are_positions<uint32_t>(pages)) {
    return {"has numbers that count up, as positions of tokens", "list the file of ids"};
  }
  const BytesOfIds bytes(pages);
  if (is_16 && are_bytes(bytes)) return {"has ids of 8 bits", kWriteIntegers};
  if (is_16 && are_swapped(bytes)) {
    return {"has ids with the upper byte first, or text in UTF-16",
            "write ids as numpy's astype('<u2') and tofile() do"};
  }
  return {};
}

// The ids of pages taken for pairs, the lower half of an id of twice the width and the upper.
struct HalvesOfIds {
  int64_t pairs = 0;  // that are not 0, as where a file is padded
  uint32_t greatest_upper = 0;
  bool second_pairs_are_zero = true;  // of each two: the upper halves of ids of four times the width
  std::set<uint32_t> lower;
};

template <typename T>
HalvesOfIds halves_of(const std::vector<std::string>& pages) {
  HalvesOfIds halves;
  for (const std::string_view page : pages) {
    for (size_t i = 0; (2 * i + 2) * sizeof(T) <= page.size(); ++i) {
      const uint32_t lower = value_at<T>(page, 2 * i * sizeof(T)),
                     upper = value_at<T>(page, (2 * i + 1) * sizeof(T));
      if (lower == 0 && upper == 0) continue;
      ++halves.pairs;
      halves.greatest_upper = std::max(halves.greatest_upper, upper);
      halves.second_pairs_are_zero = halves.second_pairs_are_zero && i % 2 == 0;
      halves.lower.insert(lower);
    }
  }
  return halves;
}

// Ids of more bits than they are read with have their upper halves at every second place: 0, or, of a vocabulary
// beyond 65536, a few small numbers beside lower halves of all kinds. No text has either by chance.
void check_width(const ReadOnlyFile& file, TokenType type, const std::vector<std::string>& pages) {
  constexpr int64_t kLeastPairs = 32, kManyPairs = 256;
  constexpr size_t kLeastValues = 3, kManyValues = 64;
  constexpr uint32_t kGreatestUpper = 3;  // vocabularies of up to 262144
  const bool is_16 = type == TokenType::kUint16;
  const HalvesOfIds halves = is_16 ? halves_of<uint16_t>(pages) : halves_of<uint32_t>(pages);
  const bool all_zero =
      halves.greatest_upper == 0 && halves.pairs >= kLeastPairs && halves.lower.size() >= kLeastValues;
  const bool all_small = is_16 && halves.greatest_upper <= kGreatestUpper && halves.pairs >= kManyPairs &&
                         halves.lower.size() >= kManyValues;
  if (!all_zero && !all_small) return;
  if (!is_16 || halves.second_pairs_are_zero) {
    throw_bad_input("{}: has ids of 64 bits, and would be read as {}; {}", file.path(), is_16 ? "uint16" : "uint32",
                    kWriteIntegers);
  }
  throw_bad_input("{}: has ids of 32 bits, and would be read as uint16; set data.token_dtype=uint32, or --dtype",
                  file.path());
}

}  // namespace

std::vector<FilePage> sample_pages(int64_t file_bytes) {
  constexpr int64_t kPage = 4096, kPages = 4, kAlignment = 16;
  if (file_bytes <= kPages * kPage) return {{0, file_bytes}};
  std::vector<FilePage> pages;
  for (int64_t i = 0; i < kPages; ++i) {
    const int64_t offset = (file_bytes - kPage) / (kPages - 1) * i;
    pages.push_back({offset / kAlignment * kAlignment, kPage});
  }
  return pages;
}

void check_raw_content(const ReadOnlyFile& file, TokenType type, int64_t vocab_size) {
  std::vector<std::string> pages;
  for (const FilePage& page : sample_pages(file.size())) {
    std::string& bytes = pages.emplace_back(static_cast<size_t>(page.bytes), '\0');
    file.read(page.offset, std::as_writable_bytes(std::span(bytes)));
  }
  const std::string head = pages.front();
  // A page of one byte again and again, as where a file has not been written yet, says nothing.
  std::erase_if(pages, [](const std::string& page) {
    return std::ranges::all_of(page, [&](char byte) { return byte == page.front(); });
  });
  Format format = format_of(file, head);
  if (format.what.empty() && is_mask(file.path())) format = {"is the mask of a token file", kTokensAlone};
  if (format.what.empty() && !pages.empty() && std::ranges::all_of(pages, is_text_page)) {
    format = format_of_text(head);
  }
  if (format.what.empty() && !head.empty()) format = format_of_numbers(file, type, vocab_size, pages, head);
  if (!format.what.empty()) throw_bad_input("{}: {}; {}", file.path(), format.what, format.remedy);
  check_width(file, type, pages);
}

}  // namespace parka
