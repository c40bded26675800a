#pragma once
#include <cstdint>
#include <string>

#include <nlohmann/json.hpp>

#include "engine/config/config_io.h"
#include "tests/support/temporary_folder.h"

namespace parka::test {

inline constexpr int64_t kStepSequence = 16;

// A small model of four blocks, and tokens to train it on, for steps of `micro_batches` on each of `ranks`.
// `is_llama`: with RMSNorm, fewer key/value heads, and a head apart from the embedding.
inline Config step_config(const std::string& folder, const std::string& recipe, int64_t stage, bool is_llama,
                          int64_t micro_batches, int64_t ranks) {
  write_file(folder + "/train.npy", std::string(100 * kStepSequence * 2, '\1'));
  nlohmann::json model = {{"vocab_size", 272},
                          {"d_model", 48},
                          {"num_layers", 4},
                          {"num_heads", 3},
                          {"d_ffn", 80},
                          {"norm", is_llama ? "rmsnorm" : "layernorm"},
                          {"tie_embeddings", !is_llama}};
  if (is_llama) model["num_kv_heads"] = 1;
  return parse_config({{"model", model},
                       {"precision", {{"recipe", recipe}}},
                       {"data", {{"train", {folder + "/train.npy"}}, {"sequence_length", kStepSequence}}},
                       {"training", {{"global_batch_size", micro_batches * ranks}, {"micro_batch_size", 1}}},
                       {"distributed", {{"zero_stage", stage}}}},
                      "test");
}

}  // namespace parka::test
