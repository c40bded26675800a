#pragma once
#include <vector>

#include "engine/step/recorded_step.h"
#include "kernels/device/device.h"
#include "kernels/device/gemm_tuning.h"
#include "kernels/ops/gemm/gemm.h"

// GEMMs alone, outside of a run.
namespace parka {

std::vector<Gemm> gemms_of(const std::vector<RecordedProduct>& products);

// Memory of a device for one product at a time.
class ProductScratch {
 public:
  // For each of `products`, with the workspace that they take, which becomes the device's.
  ProductScratch(Device& device, const std::vector<Gemm>& products);
  ~ProductScratch();
  ProductScratch& operator=(ProductScratch&&) = delete;

  // The product with its tensors here, which are aligned as they were.
  Gemm place(Gemm a) const;

 private:
  Device& device_;
  void* memory_ = nullptr;
  void* workspace_ = nullptr;
};

// How long the products of a step take, one after the other, with the algorithms that the device uses.
double seconds_of_products(Device& device, const std::vector<RecordedProduct>& products);

// Runs each product of a step on memory of its own: of every key_of(), what tune_gemms() chooses.
std::vector<GemmChoice> tune_products(Device& device, const std::vector<RecordedProduct>& products,
                                      GemmTuneOptions options);

}  // namespace parka
