#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "core/config_fields.h"
#include "core/dtype.h"
#include "kernels/ops/optimizer/adamw.h"
#include "kernels/ops/optimizer/muon.h"

namespace parka {

enum class ScheduleKind : uint8_t { kCosine, kLinear, kWsd, kConstant };

struct ScheduleConfig {
  ScheduleKind kind = ScheduleKind::kCosine;
  int64_t warmup_steps = 0;
  double warmup_start = 0.1;
  int64_t total_steps = 0;
  double final_fraction = 0.1;
  int64_t decay_steps = 0;

  bool operator==(const ScheduleConfig&) const = default;

  template <typename Visitor>
  void fields(Visitor& visit) {
    visit("kind", kind,
          "cosine, linear, wsd (warm-up, stable, linear decay at the end) or constant; all with warm-up", kHashed);
    visit("warmup_steps", warmup_steps,
          "Steps of linear warm-up; in a file also a share of all steps, such as \"3%\"", IntegerRange{}, kHashed);
    visit("warmup_start", warmup_start, "Fraction of lr at which warm-up starts (OLMo: 0.1, Llama: 0)",
          RealRange{0.0, 1.0}, kHashed);
    visit("total_steps", total_steps, "Step at which the schedule reaches its end; 0 means training.steps",
          IntegerRange{}, kHashed);
    visit("final_fraction", final_fraction, "Fraction of lr at the end of the schedule", RealRange{0.0, 1.0},
          kHashed);
    visit("decay_steps", decay_steps,
          "wsd only: length of the final decay; 0 means a tenth of total_steps, or what warm-up leaves of them",
          IntegerRange{}, kHashed);
  }
};

enum class StateFormat : uint8_t { kFp32, kBf16, kFp8, kFp8Expanded };

// Muon orthogonalizes the momentum of each matrix of a block; AdamW updates the rest.
enum class OptimizerKind : uint8_t { kAdamw, kMuon };

struct OptimizerConfig {
  OptimizerKind kind = OptimizerKind::kAdamw;
  Orthogonalization orthogonalization = Orthogonalization::kNewtonSchulz;
  double lr = 4e-4;
  double beta1 = 0.9;
  double beta2 = 0.95;
  double eps = 1e-5;
  double weight_decay = 0.1;
  bool decay_embeddings = false;
  double clip_norm = 1.0;
  int64_t clip_warmup_steps = 0;
  StateFormat states = StateFormat::kFp32;
  MasterForm master = MasterForm::kFp32;
  bool offload = false;
  DType gradient = DType::kF32;
  bool release_gradients = false;
  std::vector<std::string> frozen;
  std::vector<std::string> lr_patterns;
  std::vector<double> lr_factors;
  ScheduleConfig schedule;

  bool operator==(const OptimizerConfig&) const = default;

  template <typename Visitor>
  void fields(Visitor& visit) {
    constexpr RealRange decay_rate{0.0, 1.0, /*max_excluded=*/true};
    visit(
        "kind", kind,
        "adamw, or muon: matrices of blocks by Muon, whose updates have AdamW's size (Moonlight), the rest by AdamW",
        kHashed | kConvertedOnResume | kStepTime);
    visit("orthogonalization", orthogonalization,
          "For kind = muon, the coefficients of its five steps: newton_schulz or polar_express", kHashed);
    visit("lr", lr, "Peak learning rate", RealRange{}, kHashed);
    visit("beta1", beta1, "Decay of the first moment", decay_rate, kHashed);
    visit("beta2", beta2, "Decay of the second moment", decay_rate, kHashed);
    visit("eps", eps, "Added to the square root of the second moment; 1e-8 is usual", RealRange{1e-30, 1.0},
          kHashed);
    visit("weight_decay", weight_decay, "Decoupled weight decay of linear weights; norms are never decayed",
          RealRange{}, kHashed);
    visit("decay_embeddings", decay_embeddings, "Also decay the embedding (and so a tied head)", kHashed);
    visit("clip_norm", clip_norm, "Global gradient norm above which gradients are scaled down; 0: no clipping",
          RealRange{}, kHashed);
    visit("clip_warmup_steps", clip_warmup_steps,
          "While step <= this, the limit is ten times clip_norm (OLMo-7B: 1000)", IntegerRange{}, kHashed);
    visit("states", states, "Format of the moments: fp32, bf16, fp8, or fp8_expanded (dynamic range expansion)",
          kHashed | kConvertedOnResume | kStepTime);
    visit(
        "master", master,
        "Master weights: fp32 (16 bits beside a bf16 weight), fp24_split (24 bits), bf16_sr (stochastic rounding), "
        "or none (if and only if precision.compute = fp32)",
        kHashed | kConvertedOnResume | kStepTime);
    visit(
        "offload", offload,
        "Keep moments and masters of matrices in host memory, where they pass through buffers on the device to each "
        "update (same bits)",
        kRunTime);
    visit("gradient", gradient, "Number format that gradients are accumulated in",
          one_of(DType::kF32, DType::kBF16), kHashed | kStepTime);
    visit("release_gradients", release_gradients,
          "Update the weights of each block as soon as backward has their gradients, and use the gradients' memory "
          "again; steps of one micro-batch only. Clips by the gradient norm of the step before",
          kHashed | kStepTime);
    visit(
        "frozen", frozen,
        "Names of parameters that are not trained, with * for any text (blocks.0.*): they have no gradients, masters "
        "or moments",
        kHashed | kFixedOnResume | kStepTime);
    visit("lr_patterns", lr_patterns,
          "Names of parameters with a learning rate of their own, likewise; the last that matches counts", kHashed);
    visit("lr_factors", lr_factors, "Their learning rates relative to that of the run, one for each of lr_patterns",
          RealRange{}, kHashed);
    visit("schedule", schedule, "Learning rate over the steps");
  }
};

template <>
struct EnumNames<OptimizerKind> {
  static constexpr EnumName<OptimizerKind> kAll[] = {{OptimizerKind::kAdamw, "adamw"},
                                                     {OptimizerKind::kMuon, "muon"}};
};
template <>
struct EnumNames<Orthogonalization> {
  static constexpr EnumName<Orthogonalization> kAll[] = {{Orthogonalization::kNewtonSchulz, "newton_schulz"},
                                                         {Orthogonalization::kPolarExpress, "polar_express"}};
};
template <>
struct EnumNames<ScheduleKind> {
  static constexpr EnumName<ScheduleKind> kAll[] = {{ScheduleKind::kCosine, "cosine"},
                                                    {ScheduleKind::kLinear, "linear"},
                                                    {ScheduleKind::kWsd, "wsd"},
                                                    {ScheduleKind::kConstant, "constant"}};
};
template <>
struct EnumNames<StateFormat> {
  static constexpr EnumName<StateFormat> kAll[] = {{StateFormat::kFp32, "fp32"},
                                                   {StateFormat::kBf16, "bf16"},
                                                   {StateFormat::kFp8, "fp8"},
                                                   {StateFormat::kFp8Expanded, "fp8_expanded"}};
};
template <>
struct EnumNames<MasterForm> {
  static constexpr EnumName<MasterForm> kAll[] = {{MasterForm::kFp32, "fp32"},
                                                  {MasterForm::kFp24Split, "fp24_split"},
                                                  {MasterForm::kBf16Sr, "bf16_sr"},
                                                  {MasterForm::kNone, "none"}};
};

}  // namespace parka
