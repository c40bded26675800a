#pragma once
#include <map>
#include <string>
#include <vector>

#include <cublasLt.h>

#include "kernels/device/cuda/cuda_device.h"
#include "kernels/ops/gemm/gemm.h"

namespace parka::cuda {

// All that cuBLASLt needs to know about one matrix product, made once and reused. cuBLASLt is column-major: it
// computes out^T [N, M] = B A^T, so our b is its A and our a is its B.
class PreparedGemm {
 public:
  // `a` must suit cuBLASLt.
  explicit PreparedGemm(const Gemm& a);
  ~PreparedGemm();
  PreparedGemm& operator=(PreparedGemm&&) = delete;

  // The library's candidates for operands aligned as those of `a`, its favourite first; none if unsupported.
  std::vector<cublasLtMatmulAlgo_t> candidates(cublasLtHandle_t handle, const Gemm& a, int max_count) const;
  // True if the library can run `algorithm` on this product within the workspace.
  bool accepts(cublasLtHandle_t handle, const cublasLtMatmulAlgo_t& algorithm) const;
  // Makes the scales of `a` those of the runs that follow: queues their layout where they need one. They lie in the
  // device's workspace, so nothing but runs of this product may come in between.
  void use_scales(CudaDevice& device, const Gemm& a) const;
  cublasStatus_t run(cublasLtHandle_t handle, const CudaDevice& device, const Gemm& a,
                     const cublasLtMatmulAlgo_t& algorithm) const;

  cublasLtMatmulAlgo_t algorithm{};  // what gemm() uses

 private:
  cublasLtMatmulDesc_t product_ = nullptr;
  cublasLtMatrixLayout_t a_ = nullptr, b_ = nullptr, out_ = nullptr;
};

// Products of bf16 matrices, `count` of one shape behind each other in each tensor:
//   out = factor * a b + addend_factor * addend, summed in fp32 and rounded once
// The bits of a product do not depend on how many there are: the algorithm is the same for every count, and none of
// its sums is divided. `out` is none of the other tensors. Tensors are aligned as a later matrix of them would be.
struct BatchedGemm {
  TensorView a;  // [count, M, K], or [count, K, M] if a_transposed
  TensorView b;  // [count, N, K], or [count, K, N] if b_transposed
  bool a_transposed = false, b_transposed = false;
  float factor = 1;
  TensorView addend = {};  // [count, M, N]; empty: nothing is added
  float addend_factor = 0;
  TensorView out;  // [count, M, N]
  // The block of out that is computed: from this row and column on, up to end_col, or to the end with 0. Multiples
  // of 8.
  int64_t first_row = 0, first_col = 0, end_col = 0;
};
void multiply_batch(CudaDevice& device, const BatchedGemm& a);

// What cuBLASLt needs to know about a BatchedGemm of any count.
class PreparedBatch {
 public:
  PreparedBatch(cublasLtHandle_t handle, const BatchedGemm& a);
  ~PreparedBatch();
  PreparedBatch(const PreparedBatch&) = delete;
  PreparedBatch& operator=(const PreparedBatch&) = delete;

  cublasStatus_t run(cublasLtHandle_t handle, const CudaDevice& device, const BatchedGemm& a) const;

 private:
  void set_count(int64_t count) const;

  cublasLtMatmulDesc_t product_ = nullptr;
  cublasLtMatrixLayout_t a_ = nullptr, b_ = nullptr, out_ = nullptr;
  cublasLtMatmulAlgo_t algorithm_{};
};

// The products that have been run, by key, and the algorithms that `parka tune` has chosen.
class GemmCache final : public KeptByOps {
 public:
  GemmCache();
  ~GemmCache() override;

  cublasLtHandle_t handle() const { return handle_; }
  // Null for fp8 products that cuBLASLt does not support.
  const PreparedGemm* prepare(const Gemm& a);
  const PreparedBatch& prepare(const BatchedGemm& a);
  // For products that have not been asked for yet.
  void choose(std::map<std::string, cublasLtMatmulAlgo_t> chosen);
  // For one that has been.
  void replace(const std::string& key, const cublasLtMatmulAlgo_t& algorithm);
  // Every supported product asked for since the last call of this or since the beginning, with its latest operands.
  std::vector<Gemm> take_used();

 private:
  struct Entry {
    explicit Entry(const Gemm& a) : prepared(a), latest(a) {}
    PreparedGemm prepared;
    Gemm latest;
    bool supported = true;
    bool used = true;
  };
  void choose_algorithm(const std::string& key, Entry& entry) const;

  cublasLtHandle_t handle_ = nullptr;
  std::map<std::string, Entry> entries_;
  std::map<std::string, PreparedBatch> batches_;
  std::map<std::string, cublasLtMatmulAlgo_t> chosen_;
};

inline GemmCache& gemms_of(CudaDevice& device) { return static_cast<GemmCache&>(device.kept_by_gemm()); }

}  // namespace parka::cuda
