#include "engine/products/product_scratch.h"

#include <algorithm>
#include <cstddef>
#include <memory>

namespace parka {
namespace {

constexpr int64_t kAlignment = 256;

std::vector<TensorView*> tensors_of(Gemm& a) { return {&a.a.data, &a.a.scale, &a.b.data, &a.b.scale, &a.out}; }

// Gives each tensor a place in `memory`, aligned to kAlignment, unless it is null. Returns where the last one ends.
int64_t lay_out(const std::vector<TensorView*>& tensors, std::byte* memory) {
  int64_t end = 0;
  for (TensorView* t : tensors) {
    if (t->empty()) continue;
    const int64_t place = end + static_cast<int64_t>(reinterpret_cast<uintptr_t>(t->data) % kAlignment);
    end = ceil_div(place + t->bytes(), kAlignment) * kAlignment;
    if (memory != nullptr) t->data = memory + place;
  }
  return end;
}

int64_t scratch_bytes(Gemm a) { return lay_out(tensors_of(a), nullptr); }

int64_t most_bytes(const std::vector<Gemm>& products) {
  int64_t most = 0;
  for (const Gemm& a : products) most = std::max(most, scratch_bytes(a));
  return most;
}

int64_t most_workspace(const std::vector<Gemm>& products) {
  int64_t most = 0;
  for (const Gemm& a : products) most = std::max(most, workspace_of(a));
  return most;
}

}  // namespace

std::vector<Gemm> gemms_of(const std::vector<RecordedProduct>& products) {
  std::vector<Gemm> gemms;
  gemms.reserve(products.size());
  for (const RecordedProduct& product : products) gemms.push_back(product.gemm);
  return gemms;
}

ProductScratch::ProductScratch(Device& device, const std::vector<Gemm>& products) : device_(device) {
  const int64_t bytes = most_bytes(products), workspace_bytes = most_workspace(products);
  memory_ = device.allocate(bytes);
  device.fill_zero(memory_, bytes);
  workspace_ = device.allocate(workspace_bytes);
  device.set_workspace(workspace_, workspace_bytes);
}

ProductScratch::~ProductScratch() {
  device_.set_workspace(nullptr, 0);
  device_.release(workspace_);
  device_.release(memory_);
}

Gemm ProductScratch::place(Gemm a) const {
  lay_out(tensors_of(a), static_cast<std::byte*>(memory_));
  return a;
}

double seconds_of_products(Device& device, const std::vector<RecordedProduct>& products) {
  const ProductScratch scratch(device, gemms_of(products));
  double seconds = 0;
  for (const RecordedProduct& product : products) {
    const Gemm a = scratch.place(product.gemm);
    gemm(device, a);  // libraries set themselves up
    const std::unique_ptr<Mark> begin = device.mark();
    gemm(device, a);
    seconds += static_cast<double>(product.count) * device.mark()->seconds_since(*begin);
  }
  return seconds;
}

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
