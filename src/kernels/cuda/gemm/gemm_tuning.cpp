#include "kernels/device/gemm_tuning.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <numeric>
#include <set>
#include <vector>

#include "core/error.h"
#include "core/median.h"
#include "core/number_formats.h"
#include "kernels/cuda/gemm/gemm_cache.h"
#include "kernels/cuda/gemm/gemm_kernels.h"
#include "kernels/device/cuda/check.h"
#include "kernels/device/cuda/cublaslt.h"
#include "kernels/device/cuda/cuda_device.h"
#include "kernels/device/measuring_time.h"
#include "kernels/op/define.h"

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
  Stopwatch& operator=(Stopwatch&&) = delete;

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

template <typename T>
void set(cublasLtMatmulAlgo_t& algorithm, cublasLtMatmulAlgoConfigAttributes_t attribute, T value) {
  // An algorithm without such an attribute stays what it is.
  PARKA_CUBLASLT(cublasLtMatmulAlgoConfigSetAttribute)(&algorithm, attribute, &value, sizeof(value));
}

uint32_t tile_of(const cublasLtMatmulAlgo_t& algorithm) {
  uint32_t tile = CUBLASLT_MATMUL_TILE_UNDEFINED;
  size_t written = 0;
  check(PARKA_CUBLASLT(cublasLtMatmulAlgoConfigGetAttribute)(&algorithm, CUBLASLT_ALGO_CONFIG_TILE_ID, &tile,
                                                             sizeof(tile), &written),
        "tune");
  return tile;
}

int32_t largest_custom_option(const cublasLtMatmulAlgo_t& algorithm) {
  int32_t largest = 0;
  size_t written = 0;
  check(PARKA_CUBLASLT(cublasLtMatmulAlgoCapGetAttribute)(&algorithm, CUBLASLT_ALGO_CAP_CUSTOM_OPTION_MAX, &largest,
                                                          sizeof(largest), &written),
        "tune");
  return largest;
}

// The library could have proposed these too: its proposals with another order of tiles, and its first choice with
// each of `tiles`, clusters of thread blocks, and values of the option whose meaning is the library's own.
std::vector<cublasLtMatmulAlgo_t> vary(const std::vector<cublasLtMatmulAlgo_t>& proposals,
                                       const std::set<uint32_t>& tiles) {
  constexpr uint16_t kClusters[] = {CUBLASLT_CLUSTER_SHAPE_2x1x1, CUBLASLT_CLUSTER_SHAPE_1x2x1,
                                    CUBLASLT_CLUSTER_SHAPE_1x1x1, CUBLASLT_CLUSTER_SHAPE_2x2x1,
                                    CUBLASLT_CLUSTER_SHAPE_4x1x1, CUBLASLT_CLUSTER_SHAPE_1x4x1};
  std::vector<cublasLtMatmulAlgo_t> varied = proposals;
  for (cublasLtMatmulAlgo_t& algorithm : varied) set(algorithm, CUBLASLT_ALGO_CONFIG_CTA_SWIZZLING, uint32_t{1});
  const auto options = static_cast<uint32_t>(largest_custom_option(proposals.front()));
  for (const uint16_t cluster : kClusters) {
    for (const uint32_t tile : tiles) {
      for (uint32_t option = 0; option <= options; ++option) {
        cublasLtMatmulAlgo_t& algorithm = varied.emplace_back(proposals.front());
        set(algorithm, CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID, cluster);
        set(algorithm, CUBLASLT_ALGO_CONFIG_TILE_ID, tile);
        set(algorithm, CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION, option);
      }
    }
  }
  return varied;
}

bool same(const cublasLtMatmulAlgo_t& a, const cublasLtMatmulAlgo_t& b) {
  return std::equal(std::begin(a.data), std::end(a.data), std::begin(b.data));
}

// The elements as fp32.
std::vector<float> host_values(CudaDevice& device, const TensorView& x) {
  std::vector<float> values(static_cast<size_t>(x.numel()));
  if (x.dtype == DType::kF32) {
    device.copy_to_host(values.data(), x.data, x.bytes());
    return values;
  }
  std::vector<BFloat16> stored(values.size());
  device.copy_to_host(stored.data(), x.data, x.bytes());
  std::transform(stored.begin(), stored.end(), values.begin(), [](BFloat16 v) { return decode_bf16(v); });
  return values;
}

// One product with what is known of its candidates. Candidate 0, the library's first choice, is the incumbent.
class Contest {
 public:
  Contest(CudaDevice& device, const Stopwatch& stopwatch, const Gemm& a, const GemmTuneOptions& options)
      : device_(device), stopwatch_(stopwatch), a_(a), prepared_(a) {
    const auto count = options.counts.find(key_of(a));
    if (count != options.counts.end()) count_ = count->second;
    candidates_ = prepared_.candidates(gemms_of(device).handle(), a, options.max_candidates);
    PARKA_REQUIRE(!candidates_.empty());
    fill_operands();
    time(candidates_.front(), 1);
    once_ = time(candidates_.front(), 1);
  }

  void add_tiles_to(std::set<uint32_t>& tiles) const {
    for (const cublasLtMatmulAlgo_t& candidate : candidates_) tiles.insert(tile_of(candidate));
  }

  // Makes the candidates `count` by variations of the library's proposals with `tiles`: those that do best in a
  // single run, of as many as can be tried in about `seconds`.
  void add_variations(const std::set<uint32_t>& tiles, size_t count, double seconds) {
    if (candidates_.size() >= count) return;
    fill_operands();
    struct Timed {
      double seconds;
      cublasLtMatmulAlgo_t algorithm;
    };
    std::vector<Timed> timed;
    const auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
    for (const cublasLtMatmulAlgo_t& variation : vary(candidates_, tiles)) {
      if (std::chrono::steady_clock::now() > until) break;
      const bool known = std::any_of(candidates_.begin(), candidates_.end(),
                                     [&](const auto& candidate) { return same(candidate, variation); });
      if (known || !prepared_.accepts(gemms_of(device_).handle(), variation) || !runs(variation)) continue;
      timed.push_back({time(variation, 1), variation});
    }
    std::stable_sort(timed.begin(), timed.end(),
                     [](const Timed& x, const Timed& y) { return x.seconds < y.seconds; });
    for (const Timed& variation : timed) {
      if (candidates_.size() < count) candidates_.push_back(variation.algorithm);
    }
  }

  size_t num_candidates() const { return candidates_.size(); }

  double step_seconds() const { return static_cast<double>(count_) * once_; }

  // About `seconds` of the incumbent.
  void load(double seconds) {
    fill_operands();
    time(candidates_.front(), count_for(seconds));
  }

  // Leaves the incumbent and the `kept` other candidates that do best in bursts of `seconds`.
  void eliminate(double seconds, size_t kept) {
    // By a single run, whose launch shows: times the incumbent's time, and seconds.
    constexpr double kHopeless = 1.5, kLaunch = 20e-6;
    constexpr size_t kPerReference = 4;
    fill_operands();
    std::vector<double> quick(candidates_.size(), std::numeric_limits<double>::infinity());
    double before = time(candidates_.front(), count_for(seconds));
    for (size_t begin = 1; begin < candidates_.size(); begin += kPerReference) {
      const size_t end = std::min(begin + kPerReference, candidates_.size());
      for (size_t i = begin; i < end; ++i) {
        if (!runs(candidates_[i])) continue;
        const double once = time(candidates_[i], 1);
        if (once < kHopeless * before + kLaunch) quick[i] = time(candidates_[i], count_for(seconds));
      }
      const double after = time(candidates_.front(), count_for(seconds));
      for (size_t i = begin; i < end; ++i) quick[i] /= 0.5 * (before + after);
      before = after;
    }
    once_ = before;
    std::vector<cublasLtMatmulAlgo_t> left = {candidates_.front()};
    for (size_t i : ascending(quick)) {
      if (i != 0 && left.size() <= kept && std::isfinite(quick[i])) left.push_back(candidates_[i]);
    }
    candidates_ = std::move(left);
    ratios_.assign(candidates_.size(), {});
  }

  // Each that is left for `settle` and then `measured` seconds, beginning with another one each time.
  void compare(double settle, double measured, size_t round) {
    fill_operands();
    std::vector<double> times(candidates_.size());
    for (size_t i = 0; i < candidates_.size(); ++i) {
      const size_t candidate = (i + round) % candidates_.size();
      time(candidates_[candidate], count_for(settle));
      times[candidate] = time(candidates_[candidate], count_for(measured));
    }
    incumbent_times_.push_back(times[0]);
    for (size_t i = 0; i < times.size(); ++i) ratios_[i].push_back(times[i] / times[0]);
  }

  GemmChoice choice() const {
    constexpr double kTie = 0.997;  // of the incumbent's time: what is not below it may be noise
    std::vector<double> medians;
    for (const std::vector<double>& ratios : ratios_) medians.push_back(median(ratios));
    size_t best = 0;
    for (size_t i : ascending(medians)) {
      if (medians[i] >= kTie || i == 0) break;
      if (!agrees(candidates_[i])) continue;
      best = i;
      break;
    }
    const double microseconds = 1e6 * median(incumbent_times_);
    return {key_of(a_), to_hex(candidates_[best]), medians[best] * microseconds, microseconds, cost_of(a_).shape};
  }

 private:
  static std::vector<size_t> ascending(const std::vector<double>& values) {
    std::vector<size_t> order(values.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::stable_sort(order.begin(), order.end(), [&](size_t i, size_t j) { return values[i] < values[j]; });
    return order;
  }

  int count_for(double seconds) const { return std::max(1, static_cast<int>(seconds / once_)); }

  bool runs(const cublasLtMatmulAlgo_t& algorithm) const {
    return prepared_.run(gemms_of(device_).handle(), device_, a_, algorithm) == CUBLAS_STATUS_SUCCESS;
  }

  double time(const cublasLtMatmulAlgo_t& algorithm, int count) const {
    return stopwatch_.time(count,
                           [&] { return prepared_.run(gemms_of(device_).handle(), device_, a_, algorithm); });
  }

  std::vector<float> result_of(const cublasLtMatmulAlgo_t& algorithm) const {
    device_.fill_zero(a_.out.data, a_.out.bytes());
    check(prepared_.run(gemms_of(device_).handle(), device_, a_, algorithm), "tune");
    return host_values(device_, a_.out);
  }

  // True if the algorithm gives the incumbent's bits each time: variations are not the library's own proposals.
  bool agrees(const cublasLtMatmulAlgo_t& algorithm) const {
    constexpr float kTolerance = 0x1p-6f;  // of the largest number; above the rounding of every format
    fill_operands();
    const std::vector<float> want = result_of(candidates_.front());
    const std::vector<float> got = result_of(algorithm);
    if (got != result_of(algorithm)) return false;
    float largest = 0, worst = 0;
    for (size_t i = 0; i < want.size(); ++i) {
      largest = std::max(largest, std::abs(want[i]));
      worst = std::max(worst, std::abs(want[i] - got[i]));
    }
    return worst <= kTolerance * largest;
  }

  // Products share memory with one another, and their outputs may be NaN: to be called before each turn.
  void fill_operands() const {
    uint32_t seed = 0;
    for (const ScaledView* x : {&a_.a, &a_.b}) {
      fill_random(device_, x->data, ++seed);
      if (!x->scale.empty()) fill_random(device_, x->scale, ++seed);
    }
    prepared_.use_scales(device_, a_);
  }

  CudaDevice& device_;
  const Stopwatch& stopwatch_;
  Gemm a_;
  PreparedGemm prepared_;
  std::vector<cublasLtMatmulAlgo_t> candidates_;
  int64_t count_ = 1;                        // of runs in a step
  double once_ = 0;                          // seconds of one run of the incumbent
  std::vector<std::vector<double>> ratios_;  // to the incumbent in the same round, of each candidate
  std::vector<double> incumbent_times_;      // of all rounds
};

using Contests = std::vector<std::unique_ptr<Contest>>;

// How long the parts of measuring one product take.
struct Schedule {
  static constexpr size_t kFinalists = 5;  // besides the incumbent

  double settle, measured, quick_burst = 0.01;

  explicit Schedule(const GemmTuneOptions& options)
      : settle(options.settle_seconds), measured(options.measured_seconds) {}

  double seconds(const GemmTuneOptions& options, size_t num_candidates) const {
    const auto candidates = static_cast<double>(num_candidates);
    const double quick_bursts = 1.25 * candidates + 1;  // with the incumbent's in between
    const double runs = options.rounds * std::min(candidates, static_cast<double>(kFinalists + 1));
    return quick_bursts * quick_burst + runs * (settle + measured);
  }

  void shorten(double part) {
    settle *= part;
    measured *= part;
    quick_burst *= part;
  }
};

std::vector<Schedule> schedules_of(const GemmTuneOptions& options, const Contests& contests, double seconds) {
  std::vector<Schedule> schedules(contests.size(), Schedule(options));
  std::vector<Measured> products;
  for (const auto& contest : contests) {
    products.push_back({contest->step_seconds(), schedules.front().seconds(options, contest->num_candidates())});
  }
  const std::vector<double> given = divide_measuring(products, seconds);
  for (size_t i = 0; i < schedules.size(); ++i) schedules[i].shorten(given[i] / products[i].wanted_seconds);
  return schedules;
}

void add_variations(const GemmTuneOptions& options, const Contests& contests, double seconds) {
  std::set<uint32_t> tiles;
  std::vector<Measured> products;
  for (const auto& contest : contests) {
    contest->add_tiles_to(tiles);
    products.push_back({contest->step_seconds(), seconds});
  }
  const std::vector<double> given = divide_measuring(products, seconds);
  for (size_t i = 0; i < contests.size(); ++i) {
    contests[i]->add_variations(tiles, static_cast<size_t>(options.max_candidates), given[i]);
  }
}

std::vector<GemmChoice> tune(CudaDevice& device, const GemmTuneOptions& options) {
  using Clock = std::chrono::steady_clock;
  const auto begin = Clock::now();
  const auto spent = [&] { return std::chrono::duration<double>(Clock::now() - begin).count(); };
  const Stopwatch stopwatch(device);
  Contests contests;
  for (const Gemm& a : gemms_of(device).take_used()) {
    contests.push_back(std::make_unique<Contest>(device, stopwatch, a, options));
  }
  if (contests.empty()) return {};
  constexpr double kForVariations = 0.25;  // of the budget, at most
  add_variations(options, contests, kForVariations * options.budget_seconds);
  const std::vector<Schedule> schedules =
      schedules_of(options, contests, std::max(0.0, options.budget_seconds - options.warm_seconds - spent()));
  for (const double warm_until = spent() + options.warm_seconds; spent() < warm_until;) {
    for (size_t i = 0; i < contests.size(); ++i) contests[i]->load(schedules[i].quick_burst);
  }
  for (size_t i = 0; i < contests.size(); ++i) {
    contests[i]->eliminate(schedules[i].quick_burst, Schedule::kFinalists);
  }
  // Rounds go over all products, so that slow changes of the card reach all candidates alike.
  for (int round = 0; round < options.rounds; ++round) {
    for (size_t i = 0; i < contests.size(); ++i) {
      contests[i]->compare(schedules[i].settle, schedules[i].measured, static_cast<size_t>(round));
    }
  }
  std::vector<GemmChoice> choices;
  choices.reserve(contests.size());
  for (const auto& contest : contests) choices.push_back(contest->choice());
  std::sort(choices.begin(), choices.end(),
            [](const GemmChoice& a, const GemmChoice& b) { return a.microseconds > b.microseconds; });
  return choices;
}

}  // namespace
}  // namespace cuda

std::string gemm_library_version() {
  const size_t version = PARKA_CUBLASLT(cublasLtGetVersion)();
  return fmt::format("{}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

void choose_gemm_algorithms(Device& device, const std::vector<GemmChoice>& choices) {
  std::map<std::string, cublasLtMatmulAlgo_t> chosen;
  for (const GemmChoice& choice : choices) chosen[choice.gemm] = cuda::from_hex(choice);
  cuda::gemms_of(cuda::as_cuda(device)).choose(std::move(chosen));
}

void replace_gemm_algorithms(Device& device, const std::vector<GemmChoice>& choices) {
  cuda::GemmCache& gemms = cuda::gemms_of(cuda::as_cuda(device));
  for (const GemmChoice& choice : choices) gemms.replace(choice.gemm, cuda::from_hex(choice));
}

std::vector<GemmChoice> tune_gemms(Device& device, const GemmTuneOptions& options) {
  return cuda::tune(cuda::as_cuda(device), options);
}

}  // namespace parka
