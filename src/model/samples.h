#pragma once
#include "core/memory/memory_plan.h"
#include "kernels/device/arena.h"
#include "kernels/device/device.h"
#include "kernels/ops/attention/attention.h"
#include "kernels/ops/swiglu/swiglu.h"
#include "model/quantized_tensors.h"

namespace parka {

struct SampleNeeds;

// The observer of what a micro-batch quantizes, and of its attention. Layers call it where codes have just been
// made. Some originals are in memory there; others are computed again for the first rows, by the same ops, in a
// buffer of telemetry's own. Nothing that layers read is written.
class Samples {
 public:
  Samples() = default;  // takes none
  Samples(int64_t rows, const TensorView& statistics, const TensorView& attention, const TensorView& buffer,
          const TensorView& ones)
      : rows_(rows), statistics_(statistics), attention_(attention), buffer_(buffer), ones_(ones) {}

  // True if it observes what is quantized. Otherwise only add() and add_attention() may be called.
  bool active() const { return rows_ > 0 && !statistics_.empty(); }
  // Adds the statistics of how a block's tensor `q`, [T, C], was made of `x`, by its first rows; `x` may have only
  // these. Does nothing if `q` is not quantized. `is_more`: the block's tensor has other parts, which were added
  // before, as those of other experts.
  void add(Device& device, int64_t block, QuantizedTensor which, const TensorView& x, const ScaledView& q,
           bool is_more = false) const;
  // Adds what the op has quantized: up | gate, as it was `projected`, act(gate), the product; or its gradient.
  void add(Device& device, int64_t block, const SwigluForward& a, const TensorView& projected,
           bool is_more = false) const;
  void add(Device& device, int64_t block, const SwigluBackward& a, bool is_more = false) const;
  // The same by all rows.
  void add_whole(Device& device, int64_t block, QuantizedTensor which, const TensorView& x, const ScaledView& q,
                 bool is_more = false) const;

  // Adds the statistics of a block's attention in backward, by its first rows. For every format.
  void add_attention(Device& device, int64_t block, const AttentionBackward& a) const;

  // The rows that count. Empty views stay empty.
  TensorView first_rows(const TensorView& x) const { return x.empty() ? x : x.rows(0, rows_); }
  ScaledView first_rows(const ScaledView& x) const;
  // fp32 [rows, cols] for an original that is computed again.
  TensorView buffer(int64_t cols) const;
  TensorView ones(int64_t cols) const;  // bf16 [rows, cols], as many as the widest of a model wants at most

 private:
  int64_t rows_ = 0;
  TensorView statistics_, attention_, buffer_, ones_;
};

// The memory of samples ("telemetry").
class SampleBuffers {
 public:
  // Before plan.finish(); for up to `tokens` of a micro-batch. Without `quantizes` of attention alone.
  void declare(int64_t num_blocks, int64_t tokens, bool quantizes, const SampleNeeds& needs, MemoryPlan& plan);
  void bind(Device& device, const Arena& arena);
  // Clears the statistics, and takes those of a micro-batch of `tokens`. Takes none where nothing was declared.
  Samples start(Device& device, int64_t tokens) const;
  // fp32 [blocks * kNumQuantizedTensors, QuantizationTotals::kCount]
  const TensorView& statistics() const { return statistics_; }
  // fp32 [blocks, AttentionTotals::kCount]
  const TensorView& attention() const { return attention_; }

 private:
  TensorId statistics_id_, attention_id_, buffer_id_, ones_id_;
  TensorView statistics_, attention_, buffer_, ones_;
};

}  // namespace parka
