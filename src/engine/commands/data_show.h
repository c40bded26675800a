#pragma once
#include <string>

#include "data/token_files.h"

namespace parka {

// Prints sequences of token files as a model is trained on them, in the order of the files: their text, or ids
// where no tokenizer is found, with its targets and the beginnings of documents marked at the left.
class SequencePrinter {
 public:
  // `tokenizer`: folder of the tokenizer; empty: the one beside each token file. Prints `count` sequences at most.
  SequencePrinter(int64_t count, std::string tokenizer) : left_(count), tokenizer_(std::move(tokenizer)) {}

  // Throws Error(kBadInput) as TokenFiles does, and for a tokenizer that cannot be used.
  void print(const TokenFiles& files);
  bool is_done() const { return left_ == 0; }

 private:
  int64_t left_;
  std::string tokenizer_;
};

}  // namespace parka
