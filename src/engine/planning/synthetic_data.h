#pragma once
#include <string>

#include "engine/config/config.h"

namespace parka {

// A temporary token file for measuring speed on, removed at the end: ids with the skew of text, where a few are
// most of all tokens (log-uniform, the same on every machine). Without images: a model with a tower computes blank
// ones, as many as with data.
class SyntheticTokens {
 public:
  explicit SyntheticTokens(const Config& config);
  ~SyntheticTokens();
  SyntheticTokens(const SyntheticTokens&) = delete;
  SyntheticTokens& operator=(const SyntheticTokens&) = delete;

  // `config` with this file to train on and nothing else that touches a disk. Documents are separate only where an
  // id ends them.
  Config apply(Config config) const;

 private:
  std::string path_;
  TokenType type_;
};

}  // namespace parka
