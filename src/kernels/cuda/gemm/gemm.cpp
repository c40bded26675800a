#include "kernels/ops/gemm/gemm.h"

#include <cstddef>
#include <cstdint>
#include <numeric>
#include <utility>

#include "core/error.h"
#include "kernels/cuda/gemm/gemm_cache.h"
#include "kernels/cuda/gemm/gemm_kernels.h"
#include "kernels/device/cuda/check.h"
#include "kernels/device/cuda/cublaslt.h"
#include "kernels/device/cuda/cuda_device.h"
#include "kernels/op/define.h"
#include "kernels/op/workspace.h"

namespace parka::cuda {
namespace {

constexpr int64_t kBlockScaleStride = 4;  // rows of 128x128 scales are multiples of this

cudaDataType_t cuda_type(DType dtype) {
  switch (dtype) {
    case DType::kF32: return CUDA_R_32F;
    case DType::kBF16: return CUDA_R_16BF;
    case DType::kE4M3: return CUDA_R_8F_E4M3;
    case DType::kE5M2: return CUDA_R_8F_E5M2;
    default: throw_internal("gemm: {} operands are not supported on the GPU", name_of(dtype));
  }
}

bool is_plain(const Gemm& a) { return a.a.scaling == Scaling::kNone; }
bool is_block_scaled(const ScaledView& x) { return x.scaling == Scaling::kGroup || x.scaling == Scaling::kBlock; }

int32_t scale_mode(const ScaledView& x) {
  switch (x.scaling) {
    case Scaling::kGroup: return CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F;
    case Scaling::kBlock: return CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F;
    default: return CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F;
  }
}

// How the scales of a block-scaled operand come to lie at `to`; nothing where they lie as wanted already.
ScaleLayout scale_layout(const ScaledView& x, float* to) {
  const int rows = static_cast<int>(x.scale.dim[0]), cols = static_cast<int>(x.scale.dim[1]);
  const bool transposed = x.scaling == Scaling::kGroup;
  const int stride = transposed ? rows : static_cast<int>(ceil_div(cols, kBlockScaleStride) * kBlockScaleStride);
  if (transposed ? rows == 1 || cols == 1 : stride == cols) return {};
  return {x.scale.as<float>(), to, rows, cols, stride, transposed};
}

// A row-major tensor, but for the last `padding` columns, as a column-major matrix: its transpose.
cublasLtMatrixLayout_t layout_of(const TensorView& t, int64_t padding = 0) {
  cublasLtMatrixLayout_t layout = nullptr;
  const auto rows = static_cast<uint64_t>(t.dim[1] - padding), cols = static_cast<uint64_t>(t.dim[0]);
  check(PARKA_CUBLASLT(cublasLtMatrixLayoutCreate)(&layout, cuda_type(t.dtype), rows, cols, t.dim[1]), "gemm");
  return layout;
}

template <typename T>
void set(cublasLtMatmulDesc_t product, cublasLtMatmulDescAttributes_t attribute, const T& value) {
  check(PARKA_CUBLASLT(cublasLtMatmulDescSetAttribute)(product, attribute, &value, sizeof(value)), "gemm");
}

void set_scales(cublasLtMatmulDesc_t product, const void* scale_a, const void* scale_b) {
  set(product, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, scale_b);
  set(product, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, scale_a);
}

class Preference {
 public:
  Preference() { check(PARKA_CUBLASLT(cublasLtMatmulPreferenceCreate)(&preference_), "gemm"); }
  ~Preference() { PARKA_CUBLASLT(cublasLtMatmulPreferenceDestroy)(preference_); }
  Preference& operator=(Preference&&) = delete;
  template <typename T>
  void set(cublasLtMatmulPreferenceAttributes_t attribute, const T& value) {
    check(PARKA_CUBLASLT(cublasLtMatmulPreferenceSetAttribute)(preference_, attribute, &value, sizeof(value)),
          "gemm");
  }
  operator cublasLtMatmulPreference_t() const { return preference_; }

 private:
  cublasLtMatmulPreference_t preference_ = nullptr;
};

// ---- Batches ----

// A block of each matrix of a tensor.
struct Block {
  const TensorView& t;
  int64_t row, col, rows, cols;

  void* data() const { return static_cast<std::byte*>(t.data) + (row * t.dim[2] + col) * size_of(t.dtype); }
  cublasLtMatrixLayout_t layout() const {
    const int64_t numel = t.dim[1] * t.dim[2];
    const cublasLtMatrixLayout_t layout = layout_of(TensorView(t.data, t.dtype, {rows, t.dim[2]}), t.dim[2] - cols);
    check(PARKA_CUBLASLT(cublasLtMatrixLayoutSetAttribute)(layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET,
                                                           &numel, sizeof(numel)),
          "gemm");
    return layout;
  }
};

Block block_of(const BatchedGemm& a, const TensorView& t) {
  return {t, a.first_row, a.first_col, t.dim[1] - a.first_row,
          (a.end_col > 0 ? a.end_col : t.dim[2]) - a.first_col};
}
Block operand(const TensorView& t, bool transposed, int64_t first, int64_t count) {
  return transposed ? Block{t, 0, first, t.dim[1], count} : Block{t, first, 0, count, t.dim[2]};
}
Block block_of_a(const BatchedGemm& a) {
  return operand(a.a, a.a_transposed, a.first_row, block_of(a, a.out).rows);
}
Block block_of_b(const BatchedGemm& a) {
  return operand(a.b, a.b_transposed, a.first_col, block_of(a, a.out).cols);
}

std::string key_of(const BatchedGemm& a) {
  const Block out = block_of(a, a.out);
  return fmt::format("{} x {} of {} x {} x {}{}{} of a batch", out.rows, out.cols, a.out.dim[1], a.out.dim[2],
                     a.a.dim[a.a_transposed ? 1 : 2], a.a_transposed ? ", a transposed" : "",
                     a.b_transposed ? ", b transposed" : "");
}

// Bytes to which every matrix of a tensor is aligned, wherever it lies in it, if the first one is.
uint32_t batch_alignment(const TensorView& t) {
  constexpr int64_t kMost = 16;
  return static_cast<uint32_t>(std::gcd(kMost, t.dim[2] * size_of(t.dtype)));
}

}  // namespace

PreparedBatch::PreparedBatch(cublasLtHandle_t handle, const BatchedGemm& a) {
  check(PARKA_CUBLASLT(cublasLtMatmulDescCreate)(&product_, CUBLAS_COMPUTE_32F, CUDA_R_32F), "gemm");
  set(product_, CUBLASLT_MATMUL_DESC_TRANSA, a.b_transposed ? CUBLAS_OP_N : CUBLAS_OP_T);
  set(product_, CUBLASLT_MATMUL_DESC_TRANSB, a.a_transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
  a_ = block_of_b(a).layout();
  b_ = block_of_a(a).layout();
  out_ = block_of(a, a.out).layout();
  constexpr int64_t kUsualCount = 8;  // that the library chooses an algorithm for
  set_count(kUsualCount);
  Preference preference;
  preference.set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, uint64_t{0});
  preference.set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, uint32_t{CUBLASLT_REDUCTION_SCHEME_NONE});
  preference.set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, batch_alignment(a.b));
  preference.set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, batch_alignment(a.a));
  preference.set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, batch_alignment(a.out));
  preference.set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, batch_alignment(a.out));
  cublasLtMatmulHeuristicResult_t found = {};
  int count = 0;
  const cublasStatus_t status = PARKA_CUBLASLT(cublasLtMatmulAlgoGetHeuristic)(handle, product_, a_, b_, out_, out_,
                                                                               preference, 1, &found, &count);
  if (status != CUBLAS_STATUS_SUCCESS || count == 0 || found.state != CUBLAS_STATUS_SUCCESS) {
    throw_internal("gemm {}: cuBLASLt has no algorithm for it", key_of(a));
  }
  algorithm_ = found.algo;
}

PreparedBatch::~PreparedBatch() {
  for (cublasLtMatrixLayout_t layout : {a_, b_, out_}) PARKA_CUBLASLT(cublasLtMatrixLayoutDestroy)(layout);
  PARKA_CUBLASLT(cublasLtMatmulDescDestroy)(product_);
}

void PreparedBatch::set_count(int64_t count) const {
  const auto batch_count = static_cast<int32_t>(count);
  for (cublasLtMatrixLayout_t layout : {a_, b_, out_}) {
    check(PARKA_CUBLASLT(cublasLtMatrixLayoutSetAttribute)(layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &batch_count,
                                                           sizeof(batch_count)),
          "gemm");
  }
}

cublasStatus_t PreparedBatch::run(cublasLtHandle_t handle, const CudaDevice& device, const BatchedGemm& a) const {
  set_count(a.out.dim[0]);
  const void* const addend = block_of(a, a.addend.empty() ? a.out : a.addend).data();
  return PARKA_CUBLASLT(cublasLtMatmul)(handle, product_, &a.factor, block_of_b(a).data(), a_, block_of_a(a).data(),
                                        b_, &a.addend_factor, addend, out_, block_of(a, a.out).data(), out_,
                                        &algorithm_, nullptr, 0, device.stream());
}

void multiply_batch(CudaDevice& device, const BatchedGemm& a) {
  for (const TensorView& t : {a.a, a.b, a.out}) PARKA_REQUIRE(alignment_of(t) >= batch_alignment(t));
  GemmCache& gemms = gemms_of(device);
  const cublasStatus_t status = gemms.prepare(a).run(gemms.handle(), device, a);
  if (status != CUBLAS_STATUS_SUCCESS) {
    throw_internal("gemm {}: cuBLASLt: {}", key_of(a), PARKA_CUBLASLT(cublasLtGetStatusName)(status));
  }
}

// ---- Single products ----

PreparedGemm::PreparedGemm(const Gemm& a) {
  check(PARKA_CUBLASLT(cublasLtMatmulDescCreate)(&product_, CUBLAS_COMPUTE_32F, CUDA_R_32F), "gemm");
  // b [N, K] is column-major [K, N] and must be transposed to come first; a, column-major [K, M], is as wanted.
  set(product_, CUBLASLT_MATMUL_DESC_TRANSA, a.b_transposed ? CUBLAS_OP_N : CUBLAS_OP_T);
  set(product_, CUBLASLT_MATMUL_DESC_TRANSB, a.a_transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
  if (!is_plain(a)) {
    set(product_, CUBLASLT_MATMUL_DESC_A_SCALE_MODE, scale_mode(a.b));
    set(product_, CUBLASLT_MATMUL_DESC_B_SCALE_MODE, scale_mode(a.a));
    set(product_, CUBLASLT_MATMUL_DESC_FAST_ACCUM, static_cast<int8_t>(accumulates_fast(a)));
    // Algorithms are asked for before the first run: any scales do for that.
    set_scales(product_, a.a.scale.data, a.b.scale.data);
  }
  a_ = layout_of(a.b.data, a.b_padding);
  b_ = layout_of(a.a.data, a.a_padding);
  out_ = layout_of(a.out, a.out_padding);
}

PreparedGemm::~PreparedGemm() {
  for (cublasLtMatrixLayout_t layout : {a_, b_, out_}) PARKA_CUBLASLT(cublasLtMatrixLayoutDestroy)(layout);
  PARKA_CUBLASLT(cublasLtMatmulDescDestroy)(product_);
}

std::vector<cublasLtMatmulAlgo_t> PreparedGemm::candidates(cublasLtHandle_t handle, const Gemm& a,
                                                           int max_count) const {
  Preference preference;
  preference.set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<uint64_t>(kGemmWorkspaceBytes));
  // A sum over k that is split is added up in fp32: some algorithms would do so in the output's format.
  preference.set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, uint32_t{CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE});
  preference.set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignment_of(a.b.data));
  preference.set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignment_of(a.a.data));
  preference.set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, alignment_of(a.out));
  preference.set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignment_of(a.out));
  std::vector<cublasLtMatmulHeuristicResult_t> found(static_cast<size_t>(max_count));
  int count = 0;
  const cublasStatus_t status = PARKA_CUBLASLT(cublasLtMatmulAlgoGetHeuristic)(
      handle, product_, a_, b_, out_, out_, preference, max_count, found.data(), &count);
  // An unsupported product fails, as two e5m2 operands do with CUBLAS_STATUS_NOT_SUPPORTED.
  if (status != CUBLAS_STATUS_SUCCESS) return {};
  std::vector<cublasLtMatmulAlgo_t> algorithms;
  for (int i = 0; i < count; ++i) {
    if (found[i].state == CUBLAS_STATUS_SUCCESS) algorithms.push_back(found[i].algo);
  }
  return algorithms;
}

bool PreparedGemm::accepts(cublasLtHandle_t handle, const cublasLtMatmulAlgo_t& algorithm) const {
  cublasLtMatmulHeuristicResult_t result = {};
  const cublasStatus_t status =
      PARKA_CUBLASLT(cublasLtMatmulAlgoCheck)(handle, product_, a_, b_, out_, out_, &algorithm, &result);
  return status == CUBLAS_STATUS_SUCCESS && static_cast<int64_t>(result.workspaceSize) <= kGemmWorkspaceBytes;
}

void PreparedGemm::use_scales(CudaDevice& device, const Gemm& a) const {
  if (is_plain(a)) return;
  const void *scale_a = a.a.scale.data, *scale_b = a.b.scale.data;
  if (is_block_scaled(a.a)) {
    const int64_t bytes_a = gemm_scales_bytes(a.a.num_rows(), a.a.num_cols());
    auto* memory = static_cast<std::byte*>(device.workspace("gemm", workspace_of(a))) + kGemmWorkspaceBytes;
    const ScaleLayout layout_a = scale_layout(a.a, reinterpret_cast<float*>(memory));
    const ScaleLayout layout_b = scale_layout(a.b, reinterpret_cast<float*>(memory + bytes_a));
    lay_out_scales(device, layout_a, layout_b);
    if (layout_a.to != nullptr) scale_a = layout_a.to;
    if (layout_b.to != nullptr) scale_b = layout_b.to;
  }
  set_scales(product_, scale_a, scale_b);
}

cublasStatus_t PreparedGemm::run(cublasLtHandle_t handle, const CudaDevice& device, const Gemm& a,
                                 const cublasLtMatmulAlgo_t& chosen) const {
  const float factor = a.factor, beta = a.accumulate ? 1.0f : 0.0f;
  void* workspace = device.workspace("gemm", kGemmWorkspaceBytes);
  return PARKA_CUBLASLT(cublasLtMatmul)(handle, product_, &factor, a.b.data.data, a_, a.a.data.data, b_, &beta,
                                        a.out.data, out_, a.out.data, out_, &chosen, workspace,
                                        static_cast<size_t>(kGemmWorkspaceBytes), device.stream());
}

GemmCache::GemmCache() { check(PARKA_CUBLASLT(cublasLtCreate)(&handle_), "starting cuBLASLt"); }

GemmCache::~GemmCache() { PARKA_CUBLASLT(cublasLtDestroy)(handle_); }

const PreparedGemm* GemmCache::prepare(const Gemm& a) {
  const auto [found, is_new] = entries_.try_emplace(key_of(a), a);
  Entry& entry = found->second;
  entry.latest = a;
  entry.used = true;
  if (is_new) choose_algorithm(found->first, entry);
  return entry.supported ? &entry.prepared : nullptr;
}

const PreparedBatch& GemmCache::prepare(const BatchedGemm& a) {
  return batches_.try_emplace(key_of(a), handle_, a).first->second;
}

void GemmCache::choose_algorithm(const std::string& key, Entry& entry) const {
  const auto chosen = chosen_.find(key);
  if (chosen == chosen_.end()) {
    const auto candidates = entry.prepared.candidates(handle_, entry.latest, 1);
    if (!candidates.empty()) {
      entry.prepared.algorithm = candidates.front();
    } else if (is_plain(entry.latest)) {
      throw_internal("gemm {}: cuBLASLt has no algorithm for it", key);
    } else {
      entry.supported = false;
    }
  } else if (entry.prepared.accepts(handle_, chosen->second)) {
    entry.prepared.algorithm = chosen->second;
  } else {
    throw_bad_input("device.gemm_tuning: this cuBLASLt refuses the algorithm chosen for {}: run `parka tune` again",
                    key);
  }
}

void GemmCache::choose(std::map<std::string, cublasLtMatmulAlgo_t> chosen) {
  PARKA_REQUIRE(entries_.empty());
  chosen_ = std::move(chosen);
}

void GemmCache::replace(const std::string& key, const cublasLtMatmulAlgo_t& algorithm) {
  entries_.at(key).prepared.algorithm = algorithm;
}

std::vector<Gemm> GemmCache::take_used() {
  std::vector<Gemm> used;
  for (auto& [key, entry] : entries_) {
    if (std::exchange(entry.used, false) && entry.supported) used.push_back(entry.latest);
  }
  return used;
}

void gemm(Device& device, const Gemm& a) {
  CudaDevice& gpu = as_cuda(device);
  if (suits_low_rank_update(a)) {
    low_rank_update(gpu, a);
    return;
  }
  const PreparedGemm* prepared = suits_cublaslt(a) ? gemms_of(gpu).prepare(a) : nullptr;
  if (prepared == nullptr) {
    multiply_float8(gpu, a);
    return;
  }
  prepared->use_scales(gpu, a);
  const cublasStatus_t status = prepared->run(gemms_of(gpu).handle(), gpu, a, prepared->algorithm);
  if (status != CUBLAS_STATUS_SUCCESS) {
    throw_internal("gemm {}: cuBLASLt: {}", key_of(a), PARKA_CUBLASLT(cublasLtGetStatusName)(status));
  }
}

}  // namespace parka::cuda
