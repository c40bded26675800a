#pragma once
#include <vector>

#include "kernels/device/arena.h"
#include "kernels/device/device.h"
#include "model/formats.h"
#include "model/kv_cache.h"
#include "model/layers/peer_exchange.h"
#include "model/micro_batch.h"
#include "model/samples.h"
#include "model/unit_hooks.h"
#include "model/weights.h"

namespace parka {

// The rows' positions, for attention.
struct Positions {
  TensorView rotations = {};        // [S, D] the rotary table by positions; by rows with attends_to_cache()
  TensorView whole_rotations = {};  // [whole_length, D] that of all positions of a sequence; with a context
  // [num_whole_tokens] int32 of whole sequences, see AttentionForward; empty: rows see theirs from its beginning
  TensorView first_keys = {};
};

// Describes the batch at hand to layers, and finds their tensors. A view of buffers is cut to this batch, which may
// be shorter than the largest. Pass::load() makes it; layers keep nothing of it.
struct StepContext {
  Device& device;
  const Arena& arena;
  const ModelWeights& weights;
  UnitHooks* hooks = nullptr;       // nullptr: nobody is told
  PeerExchange* context = nullptr;  // with shape.context_size > 1
  PeerExchange* experts = nullptr;  // where ranks divide experts
  Samples samples = {};

  BatchShape shape = {};
  bool keep = false;                                            // forward is to leave what backward needs
  Positions positions = {};                                     // in blocks of full attention
  Positions windowed_positions = {};                            // in blocks with a window
  TensorView dropout_position = {};                             // Dropout::position; empty where nothing is dropped
  Positions side_positions = {}, side_windowed_positions = {};  // the same two in the blocks of a side network

  // Generation: forward appends the rows' keys and values to the cache.
  const KvCache* cache = nullptr;       // nullptr: they go nowhere
  const KvCache* side_cache = nullptr;  // of a side network
  bool newest_rows = false;  // each row is the newest token of a sequence; false: they are one from its beginning
  int64_t num_keys = 0;      // up to which such rows attend to the cache

  // Backward: by index in the parameter table; empty for frozen parameters.
  const std::vector<TensorView>* gradients = nullptr;
  Accumulation accumulation = Accumulation::kBegin;
  RouterLosses router_losses = {};

  int64_t num_tokens() const { return shape.num_tokens(); }
  bool attends_to_cache() const { return cache != nullptr && newest_rows; }
  bool adds_to_gradients() const { return accumulation == Accumulation::kContinue; }

  TensorView tensor(TensorId id, int64_t rows, int64_t cols) const;
  TensorView vector(TensorId id, int64_t count) const;
  // The rows of t [T, cols] that belong to sequences; and zeros in all others.
  TensorView rows_of_sequences(const TensorView& t) const { return t.rows(0, shape.num_sequence_tokens()); }
  void clear_padding(const TensorView& t) const;
  ScaledView matrix(const MatrixId& id, int64_t rows, int64_t cols) const { return id.view(arena, rows, cols); }

  // The gradient of a weight, for a GEMM that overwrites it or adds as adds_to_gradients() says.
  const TensorView& gradient(int weight) const { return (*gradients)[static_cast<size_t>(weight)]; }
  // The same for an op that only adds to it: zeros where accumulation begins; a vector where it is one row or
  // column. Empty for no weight, -1, and for one that is frozen.
  TensorView gradient_to_add_to(int weight) const;

  void before_forward(int unit) const {
    if (hooks != nullptr) hooks->before_forward(device, unit);
  }
  void before_backward(int unit) const {
    if (hooks != nullptr) hooks->before_backward(device, unit);
  }
  void after_backward(int unit) const {
    if (hooks != nullptr) hooks->after_backward(device, unit);
  }
};

}  // namespace parka
