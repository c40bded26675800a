#pragma once
#include <array>
#include <cstdint>
#include <functional>

#include "kernels/ops/optimizer/step_tensors.h"

// Optimizers step group by group: they read 128 elements of every tensor as fp32, update and write them back.
namespace parka::cpu {

using GroupValues = std::array<float, kMomentGroup>;

// Elements [begin, begin + count) of a tensor: one group.
struct GroupRange {
  int64_t begin, count;
  int64_t group() const { return begin / kMomentGroup; }
};

// On all threads.
void for_each_group(int64_t numel, const std::function<void(const GroupRange&)>& body);

void read_moment(const MomentView& moment, const GroupRange& range, float* out);
void write_moment(const float* x, const GroupRange& range, bool is_second, const MomentView& moment);

// Masters, as exactly as they are kept.
void read_weights(const SteppedWeights& a, const GroupRange& range, float* w);
void write_weights(const SteppedWeights& a, const GroupRange& range, const float* w);
// Raises weight_amax, where it is wanted, to the weights of a group as they are stored. Groups may be at it at the
// same time; the maximum does not depend on their order.
void raise_weight_amax(const SteppedWeights& a, const GroupRange& range);

}  // namespace parka::cpu
