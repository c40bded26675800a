#pragma once
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "data/read_only_file.h"

namespace parka {

// How a token file stores a token id.
enum class TokenType : uint8_t { kUint16, kUint32 };

int64_t size_of(TokenType type);

// Formats of token files, all little-endian (docs/data.md):
enum class TokenFormat : uint8_t {
  kRaw,       // ids and nothing else; OLMo calls such files ".npy"
  kMegatron,  // x.bin with ids only, and x.idx beside it: type, and lengths of sequences and documents
  kLlmC,      // a header of 256 int32 (magic number, version, tokens), then ids
};
std::string_view name_of(TokenFormat format);

// A mask file has one byte for each token, the sum of these marks.
inline constexpr uint8_t kMarkTarget = 1;         // to be predicted: counts in the loss
inline constexpr uint8_t kMarkDocumentStart = 2;  // the first of a document

inline constexpr int64_t kAnyVocabulary = int64_t{1} << 31;  // of all ids that there can be

// One token file. Threads may read at the same time.
class TokenFile {
 public:
  // The format is Megatron's if `path` ends in .idx, or ends in .bin and a file .idx lies beside it. It is llm.c's
  // if `path` ends in .bin and the file begins with one of llm.c's magic numbers. Otherwise it is raw, with ids of
  // `raw_type`. Throws Error(kBadInput), naming the file and what to do, if the file is missing, cannot be read or
  // contradicts itself; also if a raw one cannot be of such ids, by what check_raw_content() and ids that are not
  // below `vocab_size` tell of a few of its pages.
  TokenFile(const std::string& path, TokenType raw_type, int64_t vocab_size = kAnyVocabulary);

  const std::string& path() const { return tokens_.path(); }
  TokenFormat format() const { return format_; }
  TokenType type() const { return type_; }
  int64_t num_tokens() const { return num_tokens_; }

  // Writes `count` ids from token `first` on to `out`. Throws Error(kBadInput) naming file, position and id if one
  // is not below vocab_size, Error(kIo) if reading fails.
  void read(int64_t first, int64_t count, int64_t vocab_size, int32_t* out) const;

  // Opens the mask file, whose name is the token file's with .mask added. Throws Error(kBadInput) if there is none
  // or it does not have one byte per token.
  void open_mask();
  bool has_mask() const { return mask_.has_value(); }
  // The marks of `count` tokens from `first` on. Throws Error(kBadInput) naming the position of a byte that is not
  // a sum of marks.
  void read_marks(int64_t first, int64_t count, uint8_t* out) const;

  // True if the file itself says where documents begin, without looking at ids: Megatron's do.
  bool has_document_index() const { return index_.has_value(); }
  // The tokens that documents begin with, in order: 8 bytes of memory for each. Throws Error(kBadInput) for an
  // index that contradicts itself.
  std::vector<int64_t> read_document_starts() const;

  // The id that the largest share of tokens on a few pages have in long runs, as padding and what was never written
  // are.
  struct Repeated {
    int32_t id = 0;
    double share = 0;
  };
  Repeated most_repeated() const;

  // The ids on sample_pages(), which must be below vocab_size.
  std::vector<std::vector<int32_t>> sample_ids(int64_t vocab_size) const;

  // All files that decide what is read: tokens, index, mask.
  std::vector<const ReadOnlyFile*> files() const;

 private:
  struct Index {
    ReadOnlyFile file;
    int64_t num_sequences, num_document_marks;
  };

  void open_megatron();
  void open_llm_c();
  void open_raw(int64_t vocab_size);
  // Calls f(length) for each sequence in the index.
  template <typename F>
  void for_each_sequence(const F& f) const;

  ReadOnlyFile tokens_;
  TokenFormat format_ = TokenFormat::kRaw;
  TokenType type_;
  int64_t first_byte_ = 0;  // where ids begin
  int64_t num_tokens_ = 0;
  std::optional<Index> index_;
  std::optional<ReadOnlyFile> mask_;
};

}  // namespace parka
