#include "kernels/gemm_tuning.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <map>

#include "core/error.h"
#include "kernels/cuda/check.h"
#include "kernels/cuda/cuda_device.h"
#include "kernels/cuda/gemm_cache.h"
#include "kernels/op_cost.h"

namespace parka {
namespace cuda {
namespace {

std::string to_hex(const cublasLtMatmulAlgo_t& algorithm) {
  std::string text;
  for (uint64_t word : algorithm.data) text += fmt::format("{:016x}", word);
  return text;
}

cublasLtMatmulAlgo_t from_hex(const GemmChoice& choice) {
  constexpr size_t kDigits = 16;
  cublasLtMatmulAlgo_t algorithm = {};
  const std::string& text = choice.algorithm;
  const bool is_hex = text.find_first_not_of("0123456789abcdef") == std::string::npos;
  if (!is_hex || text.size() != kDigits * std::size(algorithm.data)) {
    throw_bad_input("device.gemm_tuning: the algorithm for {} is not {} hexadecimal digits: run `parka tune` again",
                    choice.gemm, kDigits * std::size(algorithm.data));
  }
  for (size_t i = 0; i < std::size(algorithm.data); ++i) {
    algorithm.data[i] = std::stoull(text.substr(i * kDigits, kDigits), nullptr, 16);
  }
  return algorithm;
}

// Times runs of one product, many in a row so that launches do not show.
class Stopwatch {
 public:
  explicit Stopwatch(const CudaDevice& device) : device_(device) {
    check(cudaEventCreate(&begin_), "event");
    check(cudaEventCreate(&end_), "event");
  }
  ~Stopwatch() {
    cudaEventDestroy(begin_);
    cudaEventDestroy(end_);
  }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

  // Seconds per run, of `count` runs in a row.
  template <typename Run>
  double time(int count, const Run& run) const {
    check(cudaEventRecord(begin_, device_.stream()), "tune");
    for (int i = 0; i < count; ++i) check(run(), "tune");
    check(cudaEventRecord(end_, device_.stream()), "tune");
    check(cudaEventSynchronize(end_), "tune");
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, begin_, end_), "tune");
    return 1e-3 * milliseconds / count;
  }

 private:
  const CudaDevice& device_;
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
};

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<int64_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

GemmChoice tune(CudaDevice& device, const Gemm& a, const GemmTuneOptions& options) {
  const PreparedGemm prepared(a);
  const cublasLtHandle_t handle = device.gemms().handle();
  const std::vector<cublasLtMatmulAlgo_t> candidates = prepared.candidates(handle, a, options.max_candidates);
  const Stopwatch stopwatch(device);
  const auto time = [&](size_t candidate, int count) {
    return stopwatch.time(count, [&] { return prepared.run(handle, device, a, candidates[candidate]); });
  };
  double once = time(0, 1);
  for (double warm = 0; warm < options.warm_seconds;) {
    const int count = std::max(1, static_cast<int>(0.02 / once));
    once = time(0, count);
    warm += count * once;
  }
  // Candidates take turns, so that a clock that drifts does not favour any of them.
  constexpr int kRounds = 5;
  std::vector<std::vector<double>> times(candidates.size());
  for (int round = 0; round < kRounds; ++round) {
    for (size_t i = 0; i < candidates.size(); ++i) {
      times[i].push_back(time(i, std::max(1, static_cast<int>(options.candidate_seconds / kRounds / once))));
    }
  }
  std::vector<double> medians;
  medians.reserve(times.size());
  for (const std::vector<double>& of_candidate : times) medians.push_back(median(of_candidate));
  const size_t best = static_cast<size_t>(std::min_element(medians.begin(), medians.end()) - medians.begin());
  return {cost_of(a).shape, to_hex(candidates[best]), 1e6 * medians[best], 1e6 * medians.front()};
}

}  // namespace
}  // namespace cuda

std::string gemm_library_version() {
  const size_t version = cublasLtGetVersion();
  return fmt::format("{}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

void choose_gemm_algorithms(Device& device, const std::vector<GemmChoice>& choices) {
  std::map<std::string, cublasLtMatmulAlgo_t> chosen;
  for (const GemmChoice& choice : choices) chosen[choice.gemm] = cuda::from_hex(choice);
  cuda::as_cuda(device).gemms().choose(std::move(chosen));
}

std::vector<GemmChoice> tune_gemms(Device& device, const GemmTuneOptions& options) {
  cuda::CudaDevice& gpu = cuda::as_cuda(device);
  std::vector<GemmChoice> choices;
  for (const Gemm& a : gpu.gemms().take_used()) choices.push_back(cuda::tune(gpu, a, options));
  std::sort(choices.begin(), choices.end(),
            [](const GemmChoice& a, const GemmChoice& b) { return a.microseconds > b.microseconds; });
  return choices;
}

}  // namespace parka
