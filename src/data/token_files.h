#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "data/document_ids.h"
#include "data/image_files.h"
#include "data/token_file.h"

namespace parka {

// Which tokens of a sequence are targets, and which tokens they attend to.
struct ExampleRules {
  bool loss_mask = false;           // only tokens with kMarkTarget in the mask files are targets
  bool separate_documents = false;  // tokens attend only to their own document
  DocumentIds document_ids = {};    // where none is given, documents begin where Megatron's index or the mask says
  ImageRules images = {};           // their slots are never targets

  // True if index or mask, and not ids, say where documents begin.
  bool finds_marked_documents() const { return separate_documents && !document_ids.any(); }
  bool operator==(const ExampleRules&) const = default;
};

// The files that an entry of the config's lists stands for: the file of that name; or, if there is none, Megatron's
// whose name it is without .bin and .idx; or, if the entry has *, ? or [...], all files that match, in sorted
// order. Of Megatron's files these are the .bin files; files of masks and images never match. Throws
// Error(kBadInput), unless it `may_be_absent`, if nothing matches, or what an editor or a download has left, or a
// mask of no file beside it.
std::vector<std::string> expand_source(const std::string& source, bool may_be_absent = false);

// A list of token files as one array of sequences of S tokens. Sequence i of a file is its tokens
// [S*i, S*(i+1)); the remainder of each file is dropped, so that no sequence spans two files. Files are in the
// order given.
class TokenFiles {
 public:
  // Each of `sources` stands for one file or several, see expand_source(). Throws Error(kBadInput), naming the file
  // and what to do, if the list is empty, nothing matches a pattern, a file is missing, cannot be read, is shorter
  // than one sequence, lacks what `rules` need or has images without rules for them.
  TokenFiles(const std::vector<std::string>& sources, TokenType raw_type, int64_t sequence_length,
             int64_t vocab_size, const ExampleRules& rules = {});

  int64_t sequence_length() const { return sequence_length_; }
  int64_t num_sequences() const;
  int64_t num_tokens() const;  // of the whole sequences: what an epoch can train on
  // The sequences of each source, which follow each other.
  const std::vector<int64_t>& source_sequences() const { return source_sequences_; }
  const ExampleRules& rules() const { return rules_; }
  // True if sequences differ in their number of targets.
  bool targets_vary() const { return rules_.loss_mask || rules_.separate_documents || rules_.images.any(); }

  // Writes the sequence_length() ids of sequence `sequence` to `out`. Threads may read at the same time. Throws
  // Error(kBadInput) naming file, position and id if an id is not below vocab_size, Error(kIo) if reading fails.
  void read(int64_t sequence, int32_t* out) const;

  // A sequence as a model is trained on it; S elements each.
  struct Example {
    int32_t* tokens;
    int32_t* targets;  // the token after each token; kIgnoreTarget at the end of the sequence, where the mask does
                       // not mark it, before image slots, and at the end of a document if documents are separate
    int32_t* first_keys;  // the position at which each token's document begins; null unless documents are separate
  };
  // Returns the number of targets. Throws as read() does, and Error(kBadInput) naming file and token if image slots
  // are not where the images are.
  int64_t read_example(int64_t sequence, const Example& out) const;
  // The number of the first source in whose sequences no token is a target, which training cannot learn from. Reads
  // each source up to its first target; throws as read_example() does.
  std::optional<size_t> source_without_targets() const;
  // Likewise that of a source in which neither ids nor marks nor an index tell documents apart, though rules() ask
  // for it. Short ones may be a single document where ids tell.
  std::optional<size_t> source_without_documents() const;

  // What a few sequences tell of all: the share of tokens that are targets, about how long documents are, 0 where
  // none begins, whether nearly all that have targets and others begin with targets, the share of sequences without
  // targets, and the share of targets in long runs of one id. Throws as read_example() does.
  struct Estimate {
    double targets, document_length;
    bool begins_with_targets;
    double without_targets, repeated;
  };
  Estimate estimate() const;

  // The images with slots in a sequence, in order, if rules() has images. Threads may read at the same time.
  std::vector<ImagePlace> images_of(int64_t sequence) const;
  // The most that one sequence has; 0 if rules() has no images.
  int64_t most_images() const;
  // Writes uint8 [3, size, size] to `out`. Throws as PixelFile::read() does.
  void read_pixels(const ImagePlace& image, uint8_t* out) const { images_->read(image, out); }

  // A hash of all that defines a sequence number: sequence length, token type, and each file's name (without its
  // folder), size, first 4 KiB and last 4 KiB, of index and mask files and files of images too. A checkpoint keeps
  // it, to detect changed data on resuming. A changed token in the middle of a file is not detected: reading
  // terabytes would take too long.
  uint64_t fingerprint() const;

  // The same for each file separately, to tell which one changed.
  struct FileIdentity {
    std::string name;  // without its folder
    int64_t bytes;
    uint64_t fingerprint;
    bool operator==(const FileIdentity&) const = default;
  };
  std::vector<FileIdentity> identities() const;
  std::vector<const TokenFile*> token_files() const;
  std::vector<const ReadOnlyFile*> files() const;  // in the same order

 private:
  struct Entry {
    TokenFile file;
    int64_t end_sequence;                  // sequences of this file and of those before it
    std::vector<int64_t> document_starts;  // where they are needed and the index has them
  };

  void add_file(const std::string& path);
  // The file of a sequence, and the token of it with which the sequence begins.
  struct Place {
    const Entry& entry;
    int64_t first_token;
    size_t file;  // its number
  };
  Place find(int64_t sequence) const;
  bool shows_documents(int64_t sequence) const;
  template <typename Has>
  std::optional<size_t> first_source_without(const Has& has) const;
  void mark_documents(const Place& place, const int32_t* tokens, std::vector<uint8_t>& marks) const;

  std::vector<Entry> entries_;
  std::optional<ImageFiles> images_;  // if rules_ has any
  std::vector<int64_t> source_sequences_;
  TokenType raw_type_;
  int64_t sequence_length_;
  int64_t vocab_size_;
  ExampleRules rules_;
};

}  // namespace parka
