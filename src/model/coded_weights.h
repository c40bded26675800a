#pragma once
#include <array>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "core/memory/memory_plan.h"
#include "core/parameter.h"
#include "core/tensor.h"
#include "kernels/device/arena.h"
#include "kernels/device/device.h"
#include "model/model_config.h"

namespace parka {

inline constexpr int64_t kBlock4Bit = 64;  // bitsandbytes' default

// A tensor that a coded weight is stored in.
struct CodeTensor {
  std::string_view suffix;  // of its name, after that of the weight: ".codes"
  TensorView view;
};

// Frozen weights that are stored as codes (ParameterInfo::base), without a copy in the compute format: those in 4
// bits themselves, and for all of them one buffer as large as the largest, in the compute format. A weight is
// staged there before it is encoded, and decoded to there before a GEMM reads it. With two buffers, which the
// weights of a block take by turns, one that is decoded stays until the next but one is: backward that runs a
// block again finds the last weight that forward has read.
//
// 4 bits are bitsandbytes' NF4 and FP4 with double quantization (kernels/ops/quantize/quantize_4bit.h): blocks of
// 64 elements of the flat weight, scales in 8 bits, 0.516 bytes for an element. Each matrix of an expert has scales
// of its own, and a multiple of 64 elements.
class CodedWeights {
 public:
  // Declares category "coded weights", and the buffer ("workspace"), if any is coded. There are two buffers if
  // backward `runs_again` forward of blocks.
  CodedWeights(const std::vector<ParameterInfo>& parameters, DType compute, bool runs_again, MemoryPlan& plan);
  void bind(const Arena& arena);

  // The first elements of its buffer, as a matrix of the weight's shape, to be written.
  TensorView buffer(size_t i) const;
  // Has weights decoded anew: to be called where others have used the buffers' memory, and where a recorded pass
  // begins, which cannot know what they hold.
  void forget_decoded() const { held_ = {kNothing, kNothing}; }
  // Sets elements `first` and following of the buffer, rounded to nearest, ties to even.
  void stage(Device& device, size_t i, std::span<const float> values, int64_t first) const;
  // For weights in 4 bits: codes from the buffer, and the buffer from codes.
  void encode(Device& device, size_t i) const;
  TensorView decode(Device& device, size_t i) const;
  // The tensors in which a weight in 4 bits is stored.
  std::vector<CodeTensor> tensors(size_t i) const;

 private:
  static constexpr int kNumBuffers = 2;
  static constexpr size_t kNothing = SIZE_MAX;
  struct Ids {
    int buffer = 0;
    TensorId codes, absmax, nested_absmax, offset;
  };
  struct Codes {
    TensorView codes, absmax, nested_absmax, offset;
  };
  std::vector<ParameterInfo> parameters_;
  std::vector<Ids> ids_;
  std::array<TensorId, kNumBuffers> buffer_ids_;
  TensorId absmax_id_, map_id_;
  std::vector<Codes> codes_;
  std::array<TensorView, kNumBuffers> buffers_;
  mutable std::array<size_t, kNumBuffers> held_ = {kNothing, kNothing};  // the weights that are decoded there
  TensorView absmax_;  // fp32 scales of the weight that is being encoded
  TensorView map_;     // dynamic_map()
};

// The values of a weight once it is coded: rounded to the compute format, encoded and decoded on the CPU.
std::vector<float> coded_values(const ParameterInfo& parameter, BaseFormat base, const PrecisionConfig& precision,
                                std::span<const float> values);

}  // namespace parka
