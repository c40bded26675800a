#include "engine/products/product_scratch.h"

#include <algorithm>
#include <array>
#include <cstddef>

namespace parka {
namespace {

constexpr int64_t kAlignment = 256;

std::array<TensorView*, 5> tensors_of(Gemm& a) { return {&a.a.data, &a.a.scale, &a.b.data, &a.b.scale, &a.out}; }

// Where the tensors of a product begin in memory that is aligned to kAlignment; behind them, where the last one
// ends.
std::array<int64_t, 6> places_of(Gemm a) {
  std::array<int64_t, 6> places{};
  int64_t end = 0;
  size_t i = 0;
  for (const TensorView* t : tensors_of(a)) {
    places[i++] = end + static_cast<int64_t>(reinterpret_cast<uintptr_t>(t->data) % kAlignment);
    if (!t->empty()) end = ceil_div(places[i - 1] + t->bytes(), kAlignment) * kAlignment;
  }
  places[i] = end;
  return places;
}

std::vector<Gemm> gemms_of(const std::vector<RecordedProduct>& products) {
  std::vector<Gemm> gemms;
  gemms.reserve(products.size());
  for (const RecordedProduct& product : products) gemms.push_back(product.gemm);
  return gemms;
}

}  // namespace

ProductScratch::ProductScratch(Device& device, const std::vector<Gemm>& products, int64_t workspace_bytes)
    : device_(device) {
  int64_t bytes = 0;
  for (const Gemm& a : products) {
    workspace_bytes = std::max(workspace_bytes, workspace_of(a));
    bytes = std::max(bytes, places_of(a).back());
  }
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

Gemm ProductScratch::place(const Gemm& a) const {
  const auto places = places_of(a);
  Gemm placed = a;
  size_t i = 0;
  for (TensorView* t : tensors_of(placed)) {
    if (!t->empty()) t->data = static_cast<std::byte*>(memory_) + places[i];
    ++i;
  }
  return placed;
}

std::vector<GemmChoice> tune_products(Device& device, const std::vector<RecordedProduct>& products,
                                      const GemmTuneOptions& options) {
  const ProductScratch scratch(device, gemms_of(products));
  for (const RecordedProduct& product : products) gemm(device, scratch.place(product.gemm));
  return tune_gemms(device, options);
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

}  // namespace parka
