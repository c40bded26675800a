#include "engine/planning/synthetic_data.h"

#include <cmath>
#include <cstring>
#include <filesystem>
#include <vector>

#include <unistd.h>

#include "core/philox.h"
#include "engine/files/file_io.h"

namespace parka {
namespace {

constexpr int64_t kSteps = 2;  // worth of tokens; more steps are further epochs

template <typename T>
std::vector<T> tokens(int64_t count, int64_t vocab_size, int64_t image_token) {
  std::vector<T> ids(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    const double u = uniform_open(philox4x32(1, 2, static_cast<uint64_t>(i))[0]);
    ids[i] = static_cast<T>(std::pow(static_cast<double>(vocab_size), u) - 1.0);
    if (ids[i] == image_token) ids[i] = static_cast<T>(image_token == 0 ? 1 : 0);  // images are blank, in no place
  }
  return ids;
}

template <typename T>
void write_tokens(const std::string& path, int64_t count, const ModelConfig& model) {
  const std::vector<T> ids = tokens<T>(count, model.vocab_size, model.vision.image_token);
  OutputFile file(path);
  file.write(std::as_bytes(std::span(ids)));
  file.close();
}

}  // namespace

SyntheticTokens::SyntheticTokens(const Config& config)
    : path_((std::filesystem::temp_directory_path() / fmt::format("parka_bench_{}.npy", getpid())).string()),
      type_(config.model.vocab_size <= 65536 ? TokenType::kUint16 : TokenType::kUint32) {
  const int64_t count = kSteps * config.training.global_batch_size * config.data.sequence_length;
  if (type_ == TokenType::kUint16) {
    write_tokens<uint16_t>(path_, count, config.model);
  } else {
    write_tokens<uint32_t>(path_, count, config.model);
  }
}

SyntheticTokens::~SyntheticTokens() {
  std::error_code ignored;
  std::filesystem::remove(path_, ignored);
}

Config SyntheticTokens::apply(Config config) const {
  config.data.train = {path_};
  config.data.eval = {};
  config.data.weights = {};
  config.data.token_dtype = type_;
  config.data.loss_mask = false;
  if (!config.data.document_ids().any())
    config.data.documents = DocumentMode::kJoined;  // nothing else marks documents
  config.data.checksum = false;
  config.checkpoint.interval = 0;
  return config;
}

}  // namespace parka
