#pragma once
#include <cstdint>
#include <vector>

#include "comm/communicator.h"
#include "engine/evaluation/eval_requests.h"
#include "engine/evaluation/evaluation.h"
#include "kernels/device/device.h"
#include "model/model.h"

namespace parka {

// The results of a model in a task. Scores are shares of documents for which the model chose the right
// continuation; of equal ones it chooses the first.
struct TaskResult {
  double score = 0;          // by the task's own metric
  double acc = 0;            // by TaskMetric::kAcc
  double len_norm = 0;       // by TaskMetric::kLenNorm
  double bits_per_byte = 0;  // of the right continuations, mean over documents
  struct Document {
    int64_t index;                                              // in the task
    std::vector<double> log_likelihood, domain_log_likelihood;  // by choice, nats; the latter of pmi_dc only
  };
  std::vector<Document> documents;
};

// Evaluates `max_documents` of the task, spread evenly (0: all of them), in batches of up to `shape`'s tokens
// and images. Contexts that do not fit are cut on the left, images in them too. Ranks share the batches as in
// evaluate_loss. Throws Error(kBadInput) for a document of more images than `shape` has.
TaskResult evaluate_task(Device& device, Model& model, const EvalTask& task, const BatchShape& shape,
                         int64_t max_documents, Communicator& communicator,
                         const BeforeEvaluationBatch& before_each = {});

}  // namespace parka
