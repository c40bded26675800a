#pragma once
#include <map>
#include <string>
#include <vector>

#include <cublasLt.h>

#include "kernels/ops/gemm.h"

namespace parka::cuda {

class CudaDevice;

// Everything cuBLASLt wants to know of one matrix product, made once and used whenever it comes again.
// cuBLASLt is column-major: it is asked for out^T [N, M] = B A^T, so our b is its A and our a its B.
class PreparedGemm {
 public:
  explicit PreparedGemm(const Gemm& a);
  ~PreparedGemm();
  PreparedGemm(const PreparedGemm&) = delete;
  PreparedGemm& operator=(const PreparedGemm&) = delete;

  // The library's candidates for operands aligned as those of `a`, its favourite first. Throws Error(kInternal)
  // when it has none.
  std::vector<cublasLtMatmulAlgo_t> candidates(cublasLtHandle_t handle, const Gemm& a, int max_count) const;
  // Whether the library can run `algorithm` on this product within the workspace.
  bool accepts(cublasLtHandle_t handle, const cublasLtMatmulAlgo_t& algorithm) const;
  cublasStatus_t run(cublasLtHandle_t handle, const CudaDevice& device, const Gemm& a,
                     const cublasLtMatmulAlgo_t& algorithm) const;

  cublasLtMatmulAlgo_t algorithm{};  // what gemm() uses

 private:
  cublasLtMatmulDesc_t product_ = nullptr;
  cublasLtMatrixLayout_t a_ = nullptr, b_ = nullptr, out_ = nullptr;
};

// The products that have been asked for, by description, and what `parka tune` has chosen for them.
class GemmCache {
 public:
  GemmCache();
  ~GemmCache();
  GemmCache(const GemmCache&) = delete;
  GemmCache& operator=(const GemmCache&) = delete;

  cublasLtHandle_t handle() const { return handle_; }
  const PreparedGemm& prepare(const Gemm& a);
  // For products that have not been asked for yet.
  void choose(std::map<std::string, cublasLtMatmulAlgo_t> chosen);
  // Every product asked for since the last call of this or since the beginning, with its latest operands.
  std::vector<Gemm> take_used();

 private:
  struct Entry {
    explicit Entry(const Gemm& a) : prepared(a), latest(a) {}
    PreparedGemm prepared;
    Gemm latest;
    bool used = true;
  };
  cublasLtHandle_t handle_ = nullptr;
  std::map<std::string, Entry> entries_;
  std::map<std::string, cublasLtMatmulAlgo_t> chosen_;
};

}  // namespace parka::cuda
