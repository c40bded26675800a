#include "kernels/ops/attention/attention.h"
#include "model/layers/attention.h"

// Attention to sequences that C ranks share, each of which has L of their tokens. Between the two exchanges a rank
// has all S = C L tokens, with a C-th of the heads.
namespace parka {
namespace {

// The layouts of a tensor's memory [T, cols].
struct Layouts {
  const BatchShape& shape;
  int64_t cols;

  int64_t ranks() const { return shape.context_size; }
  // The elements at the beginning of t, as many.
  TensorView within(const TensorView& t) const { return {t.data, t.dtype, {shape.num_tokens(), cols}}; }
  TensorView parts(const TensorView& t) const {
    return t.reshaped({shape.num_sequences, ranks(), shape.sequence_length, cols / ranks()});
  }
  // The layout of all_to_all: part p of a sequence goes to rank p, or comes from it.
  TensorView blocks(const TensorView& t) const {
    return t.reshaped({shape.num_sequences, ranks(), shape.sequence_length * cols / ranks()});
  }
  // The slices of all ranks of one part: the rows of whole sequences.
  TensorView whole(const TensorView& t) const { return t.reshaped({shape.num_whole_tokens(), cols / ranks()}); }
};

}  // namespace

void Attention::attend_in_context(const StepContext& step, const TensorView& qkv, const TensorView& out) const {
  const int64_t T = step.num_tokens();
  const Layouts of_qkv{step.shape, d_qkv()}, of_out{step.shape, d_heads()};
  const TensorView sent = step.tensor(parts_, T, d_qkv()), received = step.tensor(whole_, T, d_qkv());
  split_heads(step.device,
              {.x = qkv, .parts = of_qkv.parts(sent), .num_heads = num_heads_, .num_kv_heads = num_kv_heads_});
  step.context->all_to_all(step.device, of_qkv.blocks(sent), of_qkv.blocks(received));
  const TensorView out_sent = step.tensor(parts_, T, d_heads()), out_received = step.tensor(whole_, T, d_heads());
  attention_forward(step.device, forward_arguments(step, of_qkv.whole(received), of_out.whole(out_sent)));
  step.context->all_to_all(step.device, of_out.blocks(out_sent), of_out.blocks(out_received));
  merge_heads(step.device,
              {.parts = of_out.parts(out_received), .x = out, .num_heads = num_heads_, .num_kv_heads = 0});
}

// No buffer but those of one rank: the slices of qkv, attention and d_attention, which nobody reads again, are
// replaced by the heads of whole sequences. d_qkv's memory is what is sent, until it is written.
void Attention::attend_backward_in_context(const StepContext& step, const TensorView& qkv,
                                           const TensorView& attention, const TensorView& d_attention,
                                           const TensorView& d_qkv) const {
  const Layouts of_qkv{step.shape, this->d_qkv()}, of_out{step.shape, d_heads()};
  const auto exchange = [&](const Layouts& layouts, const TensorView& x, int64_t kv_heads) {
    const TensorView sent = layouts.within(d_qkv);
    split_heads(step.device,
                {.x = x, .parts = layouts.parts(sent), .num_heads = num_heads_, .num_kv_heads = kv_heads});
    step.context->all_to_all(step.device, layouts.blocks(sent), layouts.blocks(x));
  };
  exchange(of_qkv, qkv, num_kv_heads_);
  exchange(of_out, attention, 0);
  exchange(of_out, d_attention, 0);
  const AttentionBackward arguments = backward_arguments(step, of_qkv.whole(qkv), of_out.whole(attention),
                                                         of_out.whole(d_attention), of_qkv.whole(d_qkv));
  step.samples.add_attention(step.device, block_, arguments);
  attention_backward(step.device, arguments);
  step.context->all_to_all(step.device, of_qkv.blocks(d_qkv), of_qkv.blocks(qkv));
  merge_heads(step.device,
              {.parts = of_qkv.parts(qkv), .x = d_qkv, .num_heads = num_heads_, .num_kv_heads = num_kv_heads_});
}

}  // namespace parka
