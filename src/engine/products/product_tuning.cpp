#include "engine/products/product_tuning.h"

#include "engine/products/product_scratch.h"

namespace parka {

std::vector<GemmChoice> tune_products(Device& device, const std::vector<RecordedProduct>& products,
                                      GemmTuneOptions options) {
  for (const RecordedProduct& product : products) options.counts[key_of(product.gemm)] = product.count;
  const std::vector<Gemm> gemms = gemms_of(products);
  std::vector<GemmChoice> choices;
  {
    const ProductScratch scratch(device, gemms);
    for (const Gemm& a : gemms) gemm(device, scratch.place(a));
    choices = tune_gemms(device, options);
  }
  if (!choices.empty()) replace_gemm_algorithms(device, choices);
  return choices;
}

}  // namespace parka
