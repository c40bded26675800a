#pragma once
#include <string_view>

#include "kernels/ops/optimizer/adamw.h"

// What the steps of all optimizers have in common: weights with their masters, and moments.
namespace parka {

// The weights of AdamwStep or MuonStep, whose fields these are.
struct SteppedWeights {
  TensorView weight, master;
  MasterForm master_form;
  TensorView weight_amax;
  uint64_t seed, step, first_element;

  template <typename Step>
  explicit SteppedWeights(const Step& a)
      : weight(a.weight),
        master(a.master),
        master_form(a.master_form),
        weight_amax(a.weight_amax),
        seed(a.seed),
        step(a.step),
        first_element(a.first_element) {}
};

// Throw Error(kInternal) unless the tensors have N elements in formats that fit together.
void check_weights(std::string_view op, const SteppedWeights& a, int64_t N);
void check_moment(std::string_view op, std::string_view name, const MomentView& moment, int64_t N);

double bytes_of(const MomentView& moment);

}  // namespace parka
