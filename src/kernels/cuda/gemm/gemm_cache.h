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
  // Of a product that suits cuBLASLt.
  explicit PreparedGemm(const Gemm& a);
  ~PreparedGemm();
  PreparedGemm(const PreparedGemm&) = delete;
  PreparedGemm& operator=(const PreparedGemm&) = delete;

  // The library's candidates for operands aligned as those of `a`, its favourite first; none for what it does not
  // support.
  std::vector<cublasLtMatmulAlgo_t> candidates(cublasLtHandle_t handle, const Gemm& a, int max_count) const;
  // Whether the library can run `algorithm` on this product within the workspace.
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

// The products that have been run, by key, and the algorithms that `parka tune` has chosen.
class GemmCache final : public KeptByOps {
 public:
  GemmCache();
  ~GemmCache() override;

  cublasLtHandle_t handle() const { return handle_; }
  // Null for fp8 products that cuBLASLt does not support.
  const PreparedGemm* prepare(const Gemm& a);
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
  std::map<std::string, cublasLtMatmulAlgo_t> chosen_;
};

inline GemmCache& gemms_of(CudaDevice& device) { return static_cast<GemmCache&>(device.kept_by_gemm()); }

}  // namespace parka::cuda
