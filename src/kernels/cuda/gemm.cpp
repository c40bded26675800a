#include "kernels/cuda/gemm.h"

#include <algorithm>
#include <cstdint>
#include <utility>

#include "core/error.h"
#include "kernels/cuda/check.h"
#include "kernels/cuda/cuda_device.h"
#include "kernels/cuda/gemm_cache.h"
#include "kernels/cuda/workspace.h"
#include "kernels/op_cost.h"

namespace parka::cuda {
namespace {

cudaDataType_t cuda_type(DType dtype) {
  switch (dtype) {
    case DType::kF32: return CUDA_R_32F;
    case DType::kBF16: return CUDA_R_16BF;
    default: throw_internal("gemm: {} operands are not supported on the GPU", name_of(dtype));
  }
}

// The largest power of two up to 256 that divides the address.
uint32_t alignment_of(const TensorView& t) {
  constexpr uint32_t kLargest = 256;  // what cuBLASLt asks about
  const auto address = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(t.data) % kLargest);
  return address == 0 ? kLargest : address & (~address + 1u);
}

std::string key_of(const Gemm& a) {
  const uint32_t alignments[] = {alignment_of(a.a.data), alignment_of(a.b.data), alignment_of(a.out)};
  std::string key = cost_of(a).shape;
  if (*std::min_element(std::begin(alignments), std::end(alignments)) < 256) {
    key += fmt::format(" aligned {} {} {}", alignments[0], alignments[1], alignments[2]);
  }
  return key;
}

// A row-major tensor as the column-major matrix that it also is: its transpose.
cublasLtMatrixLayout_t layout_of(const TensorView& t) {
  cublasLtMatrixLayout_t layout = nullptr;
  const auto rows = static_cast<uint64_t>(t.dim[1]), cols = static_cast<uint64_t>(t.dim[0]);
  check(cublasLtMatrixLayoutCreate(&layout, cuda_type(t.dtype), rows, cols, t.dim[1]), "gemm");
  return layout;
}

template <typename T>
void set(cublasLtMatmulDesc_t product, cublasLtMatmulDescAttributes_t attribute, const T& value) {
  check(cublasLtMatmulDescSetAttribute(product, attribute, &value, sizeof(value)), "gemm");
}

class Preference {
 public:
  Preference() { check(cublasLtMatmulPreferenceCreate(&preference_), "gemm"); }
  ~Preference() { cublasLtMatmulPreferenceDestroy(preference_); }
  Preference(const Preference&) = delete;
  Preference& operator=(const Preference&) = delete;
  template <typename T>
  void set(cublasLtMatmulPreferenceAttributes_t attribute, const T& value) {
    check(cublasLtMatmulPreferenceSetAttribute(preference_, attribute, &value, sizeof(value)), "gemm");
  }
  operator cublasLtMatmulPreference_t() const { return preference_; }

 private:
  cublasLtMatmulPreference_t preference_ = nullptr;
};

}  // namespace

PreparedGemm::PreparedGemm(const Gemm& a) {
  check(cublasLtMatmulDescCreate(&product_, CUBLAS_COMPUTE_32F, CUDA_R_32F), "gemm");
  // b [N, K] is column-major [K, N] and must be transposed to come first; a [M, K], column-major [K, M], is as
  // wanted.
  set(product_, CUBLASLT_MATMUL_DESC_TRANSA, a.b_transposed ? CUBLAS_OP_N : CUBLAS_OP_T);
  set(product_, CUBLASLT_MATMUL_DESC_TRANSB, a.a_transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
  a_ = layout_of(a.b.data);
  b_ = layout_of(a.a.data);
  out_ = layout_of(a.out);
}

PreparedGemm::~PreparedGemm() {
  for (cublasLtMatrixLayout_t layout : {a_, b_, out_}) cublasLtMatrixLayoutDestroy(layout);
  cublasLtMatmulDescDestroy(product_);
}

std::vector<cublasLtMatmulAlgo_t> PreparedGemm::candidates(cublasLtHandle_t handle, const Gemm& a,
                                                           int max_count) const {
  Preference preference;
  preference.set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<uint64_t>(kGemmWorkspaceBytes));
  // Where the sum over k is split, its parts are added in fp32: some algorithms would add them in the output's
  // format.
  preference.set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, uint32_t{CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE});
  preference.set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignment_of(a.b.data));
  preference.set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignment_of(a.a.data));
  preference.set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, alignment_of(a.out));
  preference.set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignment_of(a.out));
  std::vector<cublasLtMatmulHeuristicResult_t> found(static_cast<size_t>(max_count));
  int count = 0;
  const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(handle, product_, a_, b_, out_, out_, preference,
                                                               max_count, found.data(), &count);
  if (status != CUBLAS_STATUS_SUCCESS || count == 0) {
    throw_internal("gemm {}: cuBLASLt has no algorithm for it ({})", cost_of(a).shape,
                   cublasLtGetStatusName(status));
  }
  std::vector<cublasLtMatmulAlgo_t> algorithms;
  for (int i = 0; i < count; ++i) {
    if (found[i].state == CUBLAS_STATUS_SUCCESS) algorithms.push_back(found[i].algo);
  }
  return algorithms;
}

bool PreparedGemm::accepts(cublasLtHandle_t handle, const cublasLtMatmulAlgo_t& algorithm) const {
  cublasLtMatmulHeuristicResult_t result = {};
  const cublasStatus_t status = cublasLtMatmulAlgoCheck(handle, product_, a_, b_, out_, out_, &algorithm, &result);
  return status == CUBLAS_STATUS_SUCCESS && static_cast<int64_t>(result.workspaceSize) <= kGemmWorkspaceBytes;
}

cublasStatus_t PreparedGemm::run(cublasLtHandle_t handle, const CudaDevice& device, const Gemm& a,
                                 const cublasLtMatmulAlgo_t& chosen) const {
  const float one = 1.0f, beta = a.accumulate ? 1.0f : 0.0f;
  void* workspace = device.workspace("gemm", kGemmWorkspaceBytes);
  return cublasLtMatmul(handle, product_, &one, a.b.data.data, a_, a.a.data.data, b_, &beta, a.out.data, out_,
                        a.out.data, out_, &chosen, workspace, static_cast<size_t>(kGemmWorkspaceBytes),
                        device.stream());
}

GemmCache::GemmCache() { check(cublasLtCreate(&handle_), "starting cuBLASLt"); }

GemmCache::~GemmCache() { cublasLtDestroy(handle_); }

const PreparedGemm& GemmCache::prepare(const Gemm& a) {
  const auto [found, is_new] = entries_.try_emplace(key_of(a), a);
  Entry& entry = found->second;
  entry.latest = a;
  entry.used = true;
  if (!is_new) return entry.prepared;
  const auto chosen = chosen_.find(found->first);
  if (chosen == chosen_.end()) {
    entry.prepared.algorithm = entry.prepared.candidates(handle_, a, 1).front();
  } else if (entry.prepared.accepts(handle_, chosen->second)) {
    entry.prepared.algorithm = chosen->second;
  } else {
    throw_bad_input("device.gemm_tuning: this cuBLASLt refuses the algorithm chosen for {}: run `parka tune` again",
                    found->first);
  }
  return entry.prepared;
}

void GemmCache::choose(std::map<std::string, cublasLtMatmulAlgo_t> chosen) {
  PARKA_REQUIRE(entries_.empty());
  chosen_ = std::move(chosen);
}

std::vector<Gemm> GemmCache::take_used() {
  std::vector<Gemm> used;
  for (auto& [key, entry] : entries_) {
    if (std::exchange(entry.used, false)) used.push_back(entry.latest);
  }
  return used;
}

void gemm(Device& device, const Gemm& a) {
  CudaDevice& gpu = as_cuda(device);
  const PreparedGemm& prepared = gpu.gemms().prepare(a);
  const cublasStatus_t status = prepared.run(gpu.gemms().handle(), gpu, a, prepared.algorithm);
  if (status != CUBLAS_STATUS_SUCCESS) {
    throw_internal("gemm {}: cuBLASLt: {}", cost_of(a).shape, cublasLtGetStatusName(status));
  }
}

}  // namespace parka::cuda
