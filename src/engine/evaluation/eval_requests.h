#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/config_fields.h"
#include "data/image_files.h"
#include "data/image_references.h"

namespace parka {

// A model chooses the continuation of a document with the largest
//   acc       log p(continuation | context)
//   len_norm  the same over the number of characters of the continuation
//   pmi_dc    log p(continuation | context) - log p(continuation | domain context)
enum class TaskMetric : uint8_t { kAcc, kLenNorm, kPmiDc };
template <>
struct EnumNames<TaskMetric> {
  static constexpr EnumName<TaskMetric> kAll[] = {
      {TaskMetric::kAcc, "acc"}, {TaskMetric::kLenNorm, "len_norm"}, {TaskMetric::kPmiDc, "pmi_dc"}};
};

struct TaskChoice {
  std::vector<int32_t> context, continuation;
  std::vector<int32_t> domain;        // context of pmi_dc; empty for other metrics
  int64_t num_characters, num_bytes;  // of the continuation's text without the leading space
};

// An image in the task's file of pixels.
struct TaskImage {
  int64_t image;
  uint64_t checksum;  // XXH3-64 of its pixels
};

struct TaskDocument {
  std::vector<TaskChoice> choices;
  int64_t label;                  // the right one
  std::vector<TaskImage> images;  // whose slots each context has, in this order
};

// The requests of a multiple-choice task, written by parka prepare-eval; docs/evaluation.md has the format.
struct EvalTask {
  std::string path, name;
  TaskMetric metric;
  std::vector<TaskDocument> documents;
  ImageRules images = {};                        // of a task with images
  std::shared_ptr<const PixelFile> pixels = {};  // likewise: the file <path>.pixels
  std::string tokenizer = {};                    // see described_tokenizer()
  std::string tokens = {};                       // see checksum_of_tokens(); empty in older files
};

// Reads a request file for a model of this vocabulary and context. Throws Error(kBadInput), which names file and
// line, for a wrong format, unknown token ids, continuations longer than the context, and images of other rules.
EvalTask read_requests(const std::string& path, int64_t vocab_size, int64_t sequence_length,
                       const ImageRules& images = {});

}  // namespace parka
