#pragma once
#include <string>
#include <unordered_map>
#include <vector>

#include "core/formats_4bit.h"
#include "engine/files/json.h"
#include "engine/huggingface/huggingface_weights.h"

// Models whose linear weights bitsandbytes has quantized to 4 bits, as transformers' save_pretrained writes them:
// the codes under the weight's name, beside them ".absmax", ".quant_map" and a JSON text ".quant_state.*"; with
// 8-bit scales ".nested_absmax" and ".nested_quant_map" too (kernels/ops/quantize/quantize_4bit.h).
namespace parka {

// True if a config.json says so. Throws Error(kBadInput), beginning with `where`, for other kinds of quantization.
bool is_bitsandbytes_config(const json& config, const std::string& where);

// A weight in 4 bits.
struct BitsAndBytesWeight {
  Format4Bit format = Format4Bit::kNf4;
  int64_t block_size = 64;
  bool is_fp16 = false;  // bitsandbytes decodes it to that; its tensor's dtype is fp32 then
  float offset = 0;
  HuggingFaceWeights::Place codes, absmax;
  HuggingFaceWeights::Place nested_absmax, nested_map;  // where absmax is in 8 bits
};

// Puts those of a model in the place of their tensors: each weight keeps the tensor of its name, with the dtype and
// shape that it is decoded to. By name. Throws Error(kBadInput) where tensors are missing or do not fit.
std::unordered_map<std::string, BitsAndBytesWeight> take_bitsandbytes_weights(HuggingFaceWeights& weights);

// The values of such a weight of `count` elements, as bitsandbytes decodes it to `decoded`: bf16, fp16 or fp32.
std::vector<float> decode_bitsandbytes(const HuggingFaceWeights& weights, const BitsAndBytesWeight& weight,
                                       DType decoded, int64_t count);

}  // namespace parka
