#pragma once
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "core/accumulation.h"
#include "core/tensor.h"

// The description of a micro-batch.
namespace parka {

// The number of tokens of one forward. Row t of an activation is position t % sequence_length of sequence t /
// sequence_length. In slices of sequences the c-th of the ranks has the positions from c * sequence_length on.
struct BatchShape {
  int64_t num_sequences = 0;
  int64_t sequence_length = 0;
  bool separate_documents = false;  // attention stays within documents, whose beginnings come with the batch
  int64_t images_per_sequence = 0;  // room for images, which every batch of a model with a tower fills up
  int64_t padding = 0;       // rows after the last sequence that belong to none, for GEMMs that want multiples
  int64_t context_size = 1;  // ranks that share each sequence (model/layers/peer_exchange.h)
  int64_t whole_length() const { return sequence_length * context_size; }
  int64_t num_images() const { return num_sequences * images_per_sequence; }
  int64_t num_sequence_tokens() const { return num_sequences * sequence_length; }
  int64_t num_tokens() const { return num_sequence_tokens() + padding; }
  int64_t num_whole_tokens() const { return num_tokens() * context_size; }  // of all ranks that share the sequences
  bool operator==(const BatchShape&) const = default;
};

// The images of a sequence: pixels [count, 3, size, size], and for each row that an image is to have the position
// in the sequence in whose place it is, or -1, [count, ImageEmbedding::num_slots()].
struct SequenceImages {
  int64_t count = 0;  // at most those of a sequence of the largest batch
  const uint8_t* pixels = nullptr;
  const int32_t* positions = nullptr;
};

// What the routers of a mixture of experts add to the loss of a micro-batch, in gradients that are sums over the
// micro-batches of a step: the weights already have the micro-batch's share of it.
struct RouterLosses {
  double balance = 0;      // weight of the balance loss
  bool is_pooled = false;  // transformers' form, of counts and scores of all blocks; false: one for each block
  double z = 0;            // weight of the mean over tokens of logsumexp(logits)^2, of each block
  bool operator==(const RouterLosses&) const = default;
};

struct LossOptions {
  float grad_scale;  // usually 1 / number of targets in the optimizer step
  float z_loss = 0;
  TensorView grad_factor = {};  // [1] fp32, in: multiplies grad_scale, and may change where that is recorded
  TensorView sums = {};         // [Model::num_sums()] fp32, in/out: see there; empty: not wanted
  RouterLosses router = {};
};

// What the router of a block did in a step, over all micro-batches and ranks; NaN in a block without experts.
struct ExpertUse {
  double load = kNone;     // slots of the busiest expert, over their mean
  double idle = kNone;     // share of experts without a slot
  double entropy = kNone;  // of the experts' shares of slots, 1 where all are equal
  double balance_loss = kNone, z_loss = kNone;
  double rank_load = kNone;        // slots of the busiest rank, over their mean: 1 where none divide the experts
  std::vector<double> loads = {};  // slots of each expert, over their mean

  static constexpr double kNone = std::numeric_limits<double>::quiet_NaN();
};

// A number that a step reports: a key of its record in metrics.jsonl.
struct StepScalar {
  std::string name;
  double value;
};

}  // namespace parka
