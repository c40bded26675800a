
#include <algorithm>
#include <cstring>
#include <fstream>
#include <utility>

#include "core/error.h"
#include "core/log/log.h"
#include "kernels/device/cuda/check.h"
#include "kernels/device/cuda/cuda_device.h"
#include "kernels/device/cuda/staging_buffer.h"
#include "kernels/device/gpu_architecture.h"

namespace parka::cuda {
namespace {

// Copies pass through pieces of this size. There are enough of them that the small copies of many micro-batches
// can be on their way before the host has to wait for the first.
constexpr int64_t kStagingBytes = int64_t{1} << 20;
constexpr size_t kStagingCount = 64;

// The driver sets a stack aside for every thread that the GPU has room for, by default of 1 KiB: 0.28 GB on an
// H200. A kernel that needs more gets it at its first launch; all here say how much.
constexpr size_t kStackBytes = 32;

void check_supported(const cudaDeviceProp& gpu) {
  if (runs_on_gpu(PARKA_CUDA_ARCHITECTURES, gpu.major, gpu.minor)) return;
  throw_bad_input(
      "{} has compute capability {}.{}, and this parka was built for {}: build it with "
      "-DPARKA_CUDA_ARCHITECTURES={}{}, or run on the CPU with device.kind=cpu",
      gpu.name, gpu.major, gpu.minor, PARKA_CUDA_ARCHITECTURES, gpu.major, gpu.minor);
}

std::string version_name(int cuda) { return fmt::format("{}.{}", cuda / 1000, cuda % 1000 / 10); }

std::string driver_version() {
  // "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build ..."
  std::ifstream file("/proc/driver/nvidia/version");
  for (std::string word; file >> word;) {
    const bool is_version =
        word.find('.') != std::string::npos && word.find_first_not_of("0123456789.") == std::string::npos;
    if (is_version) return word;
  }
  return "unknown";
}

class Event {
 public:
  explicit Event(unsigned flags = cudaEventDisableTiming) {
    check(cudaEventCreateWithFlags(&event_, flags), "event");
  }
  ~Event() { cudaEventDestroy(event_); }
  Event& operator=(Event&&) = delete;
  operator cudaEvent_t() const { return event_; }

 private:
  cudaEvent_t event_ = nullptr;
};

class CudaRead final : public HostRead {
 public:
  CudaRead(PinnedPool& pool, cudaStream_t stream, const void* source, int64_t bytes)
      : pool_(pool), memory_(pool.take(bytes)) {
    check(cudaMemcpyAsync(memory_.data, source, static_cast<size_t>(bytes), cudaMemcpyDefault, stream),
          "copy to the host");
    check(cudaEventRecord(done_, stream), "copy to the host");
  }
  ~CudaRead() override {
    cudaEventSynchronize(done_);  // the copy must not write to memory that others use
    pool_.give_back(memory_);
  }
  bool ready() const override { return cudaEventQuery(done_) == cudaSuccess; }
  const void* wait() override {
    check(cudaEventSynchronize(done_), "copy to the host");
    return memory_.data;
  }

 private:
  PinnedPool& pool_;
  PinnedPool::Memory memory_;
  Event done_;
};

class CudaMark final : public Mark {
 public:
  explicit CudaMark(cudaStream_t stream) { check(cudaEventRecord(event_, stream), "mark"); }
  double seconds_since(const Mark& earlier) const override {
    float milliseconds = 0;
    check(cudaEventSynchronize(event_), "mark");
    check(cudaEventElapsedTime(&milliseconds, static_cast<const CudaMark&>(earlier).event_, event_), "mark");
    return 1e-3 * milliseconds;
  }

 private:
  Event event_{cudaEventDefault};
};

// The first run is queued as it is: libraries set themselves up in it. The second is captured.
class GraphRecording final : public Recording {
 public:
  ~GraphRecording() override {
    if (graph_) cudaGraphExecDestroy(graph_);
  }
  void run(cudaStream_t stream, const std::function<void()>& work) {
    if (!ran_) {
      work();
      ran_ = true;
      return;
    }
    if (!graph_) record(stream, work);
    check(cudaGraphLaunch(graph_, stream), "graph launch");
  }

 private:
  void record(cudaStream_t stream, const std::function<void()>& work) {
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "graph capture");
    cudaGraph_t captured = nullptr;
    try {
      work();
    } catch (...) {
      cudaStreamEndCapture(stream, &captured);
      cudaGraphDestroy(captured);
      throw;
    }
    check(cudaStreamEndCapture(stream, &captured), "graph capture");
    const cudaError_t status = cudaGraphInstantiate(&graph_, captured, 0);
    cudaGraphDestroy(captured);
    check(status, "graph instantiation");
  }

  bool ran_ = false;
  cudaGraphExec_t graph_ = nullptr;
};

class CudaOpTimer final : public OpTimer {
 public:
  explicit CudaOpTimer(cudaStream_t stream) : stream_(stream) {}

  void begin(std::string_view op, OpCost cost) override {
    spans_.push_back(std::make_unique<Span>());
    spans_.back()->time = {section, std::string(op), std::move(cost), 0.0};
    check(cudaEventRecord(spans_.back()->begin, stream_), op);
  }
  void end() override { check(cudaEventRecord(spans_.back()->end, stream_), spans_.back()->time.op); }

  std::vector<OpTime> results() {
    std::vector<OpTime> times;
    for (const auto& span : spans_) {
      float milliseconds = 0;
      check(cudaEventSynchronize(span->end), span->time.op);
      check(cudaEventElapsedTime(&milliseconds, span->begin, span->end), span->time.op);
      span->time.seconds = 1e-3 * milliseconds;
      times.push_back(std::move(span->time));
    }
    return times;
  }

 private:
  struct Span {
    OpTime time;
    Event begin{cudaEventDefault}, end{cudaEventDefault};
  };
  cudaStream_t stream_;
  std::vector<std::unique_ptr<Span>> spans_;
};

}  // namespace

PinnedPool::~PinnedPool() {
  for (const Memory& memory : free_) cudaFreeHost(memory.data);
}

PinnedPool::Memory PinnedPool::take(int64_t bytes) {
  const auto fits = std::find_if(free_.begin(), free_.end(), [&](const Memory& m) { return m.bytes >= bytes; });
  if (fits != free_.end()) {
    const Memory memory = *fits;
    free_.erase(fits);
    return memory;
  }
  constexpr int64_t kLeastBytes = 4096;
  Memory memory{nullptr, std::max(bytes, kLeastBytes)};
  check(cudaHostAlloc(&memory.data, static_cast<size_t>(memory.bytes), cudaHostAllocDefault), "pinned memory");
  return memory;
}

CudaDevice::CudaDevice(int ordinal, const std::function<std::unique_ptr<KeptByOps>()>& make_kept)
    : ordinal_(ordinal) {
  check(cudaSetDevice(ordinal), "choosing the GPU");
  check(cudaGetDeviceProperties(&properties_, ordinal), "reading the GPU's properties");
  check_supported(properties_);
  launches_early_ =
      runs_code_of(kEarlyLaunchVersion, PARKA_CUDA_ARCHITECTURES, properties_.major, properties_.minor);
  check(cudaDeviceSetLimit(cudaLimitStackSize, kStackBytes), "stack size");
  int least = 0, greatest = 0;
  check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "stream priorities");
  // Above what may wait for idle multiprocessors.
  check(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, std::max(greatest, least - 1)), "stream");
  staging_.resize(kStagingCount);
  for (Staging& staging : staging_) {
    void* memory = nullptr;
    check(cudaHostAlloc(&memory, kStagingBytes, cudaHostAllocDefault), "pinned memory");
    staging.memory = static_cast<std::byte*>(memory);
    check(cudaEventCreateWithFlags(&staging.free, cudaEventDisableTiming), "event");
  }
  constexpr int64_t kCounterBytes = kNumCounters * kCounterStride * sizeof(unsigned);
  counters_ = static_cast<unsigned*>(allocate(kCounterBytes));
  fill_zero(counters_, kCounterBytes);
  kept_by_gemm_ = make_kept();
}

CudaDevice::~CudaDevice() {
  cudaStreamSynchronize(stream_);
  kept_by_gemm_.reset();
  cudaFree(counters_);
  for (const Staging& staging : staging_) {
    cudaEventDestroy(staging.free);
    cudaFreeHost(staging.memory);
  }
  cudaStreamDestroy(stream_);
}

std::string CudaDevice::description() const {
  return fmt::format("{}, {:.0f} GB, {} multiprocessors, compute capability {}.{}", properties_.name,
                     static_cast<double>(properties_.totalGlobalMem) * 1e-9, num_multiprocessors(),
                     properties_.major, properties_.minor);
}

std::vector<std::pair<std::string, std::string>> CudaDevice::software() const {
  int cuda = 0;
  check(cudaRuntimeGetVersion(&cuda), "reading CUDA's version");
  return {{"driver", driver_version()}, {"cuda", version_name(cuda)}};
}

void* CudaDevice::allocate(int64_t bytes) {
  void* memory = nullptr;
  const cudaError_t status = cudaMalloc(&memory, static_cast<size_t>(std::max<int64_t>(bytes, 1)));
  if (status == cudaErrorMemoryAllocation) {
    cudaGetLastError();  // or the next launch would be blamed for it
    const MemoryUse use = memory_use();
    throw_bad_input("{}: not enough memory: {:.2f} GB were requested and {:.2f} of {:.2f} GB are free",
                    properties_.name, static_cast<double>(bytes) * 1e-9, static_cast<double>(use.free_bytes) * 1e-9,
                    static_cast<double>(use.total_bytes) * 1e-9);
  }
  check(status, "allocation");
  return memory;
}

void CudaDevice::release(void* memory) {
  cudaStreamSynchronize(stream_);  // queued work may still use it
  cudaFree(memory);
}

void* CudaDevice::allocate_host(int64_t bytes) {
  auto memory = std::make_unique<PinnedMemory>(bytes);
  void* const data = memory->data();
  host_memory_.emplace(data, std::move(memory));
  return data;
}

void CudaDevice::release_host(void* memory) {
  cudaDeviceSynchronize();  // queued work of any stream may still use it
  host_memory_.erase(memory);
}

void CudaDevice::set_workspace(void* memory, int64_t bytes) {
  workspace_ = memory;
  workspace_bytes_ = bytes;
}

void* CudaDevice::workspace(std::string_view op, int64_t bytes) const {
  if (bytes > workspace_bytes_) {
    throw_internal("{}: needs {} bytes of workspace, but the device has {}", op, bytes, workspace_bytes_);
  }
  return workspace_;
}

CudaDevice::Staging& CudaDevice::next_staging() {
  Staging& staging = staging_[next_staging_];
  next_staging_ = (next_staging_ + 1) % staging_.size();
  check(cudaEventSynchronize(staging.free), "copy");
  return staging;
}

void CudaDevice::copy_to_device(void* target, const void* host, int64_t bytes) {
  for (int64_t done = 0; done < bytes; done += kStagingBytes) {
    const auto count = static_cast<size_t>(std::min(kStagingBytes, bytes - done));
    const Staging& staging = next_staging();
    std::memcpy(staging.memory, static_cast<const std::byte*>(host) + done, count);
    check(
        cudaMemcpyAsync(static_cast<std::byte*>(target) + done, staging.memory, count, cudaMemcpyDefault, stream_),
        "copy to the device");
    check(cudaEventRecord(staging.free, stream_), "copy to the device");
  }
}

// Pieces are fetched ahead into pinned memory while earlier ones are copied on.
void CudaDevice::copy_to_host(void* host, const void* source, int64_t bytes) {
  struct Piece {
    const Staging* staging;
    int64_t offset;
    size_t count;
  };
  std::vector<Piece> window;
  const auto take = [&](const Piece& piece) {
    check(cudaEventSynchronize(piece.staging->free), "copy to the host");
    std::memcpy(static_cast<std::byte*>(host) + piece.offset, piece.staging->memory, piece.count);
  };
  constexpr size_t kAhead = kStagingCount / 2;
  size_t taken = 0;
  for (int64_t done = 0; done < bytes; done += kStagingBytes) {
    if (window.size() - taken == kAhead) take(window[taken++]);
    const auto count = static_cast<size_t>(std::min(kStagingBytes, bytes - done));
    const Staging& staging = next_staging();
    check(cudaMemcpyAsync(staging.memory, static_cast<const std::byte*>(source) + done, count, cudaMemcpyDefault,
                          stream_),
          "copy to the host");
    check(cudaEventRecord(staging.free, stream_), "copy to the host");
    window.push_back({&staging, done, count});
  }
  while (taken < window.size()) take(window[taken++]);
}

std::unique_ptr<HostRead> CudaDevice::copy_to_host_later(const void* source, int64_t bytes) {
  return std::make_unique<CudaRead>(reads_, stream_, source, bytes);
}

void CudaDevice::copy(void* target, const void* source, int64_t bytes) {
  check(cudaMemcpyAsync(target, source, static_cast<size_t>(bytes), cudaMemcpyDefault, stream_), "copy");
}

void CudaDevice::fill_zero(void* target, int64_t bytes) {
  check(cudaMemsetAsync(target, 0, static_cast<size_t>(bytes), stream_), "fill_zero");
}

std::unique_ptr<HostStream> CudaDevice::make_host_stream(size_t num_slots) {
  return std::make_unique<CudaHostStream>(stream_, num_slots);
}

std::unique_ptr<StagingBuffer> CudaDevice::make_staging_buffer(int64_t bytes) {
  return std::make_unique<CudaStaging>(ordinal_, stream_, bytes);
}

void CudaDevice::replay(std::unique_ptr<Recording>& recording, const std::function<void()>& work) {
  if (op_timer_ != nullptr) {
    work();
    return;
  }
  if (!recording) recording = std::make_unique<GraphRecording>();
  static_cast<GraphRecording&>(*recording).run(stream_, work);
}

bool CudaDevice::has_float8_tiles() const {
  constexpr bool kBuilt = std::string_view(PARKA_CUDA_ARCHITECTURES).find("90a") != std::string_view::npos;
  return kBuilt && properties_.major == 9 && properties_.minor == 0;
}

// One kernel was faster at all sizes of models of 1 to 8 billion parameters. Four tiles of 128 x 256 numbers for
// each multiprocessor are far below these; where there are fewer, as in generation, some would be idle.
bool CudaDevice::fuses(std::string_view, int64_t numbers) const {
  constexpr int64_t kTile = int64_t{128} * 256;
  return has_float8_tiles() && numbers >= 4 * kTile * num_multiprocessors();
}

std::unique_ptr<Mark> CudaDevice::mark() { return std::make_unique<CudaMark>(stream_); }

void CudaDevice::synchronize() { check(cudaStreamSynchronize(stream_), "synchronize"); }

Device::MemoryUse CudaDevice::memory_use() const {
  size_t free_bytes = 0, total_bytes = 0;
  check(cudaMemGetInfo(&free_bytes, &total_bytes), "reading free memory");
  return {static_cast<int64_t>(total_bytes), static_cast<int64_t>(free_bytes)};
}

void CudaDevice::start_op_timer() {
  timer_ = std::make_unique<CudaOpTimer>(stream_);
  op_timer_ = timer_.get();
}

std::vector<OpTime> CudaDevice::stop_op_timer() {
  PARKA_REQUIRE(timer_ != nullptr);
  op_timer_ = nullptr;
  std::vector<OpTime> times = static_cast<CudaOpTimer&>(*timer_).results();
  timer_.reset();
  return times;
}

}  // namespace parka::cuda

namespace parka {

int num_cuda_devices() {
  int count = 0, driver = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess) return count;
  cudaGetLastError();  // no driver, or no GPU
  static bool is_told = false;
  const bool has_driver = cudaDriverGetVersion(&driver) == cudaSuccess && driver > 0;
  if (has_driver && driver / 1000 < CUDART_VERSION / 1000 && !std::exchange(is_told, true)) {
    log_warning(
        "GPUs are not used: NVIDIA's driver is for CUDA {}, and this parka for {}: update it (docs/install.md)",
        cuda::version_name(driver), cuda::version_name(CUDART_VERSION));
  }
  return 0;
}

std::vector<std::string> describe_cuda_devices() {
  std::vector<std::string> devices;
  for (int i = 0; i < num_cuda_devices(); ++i) {
    cudaDeviceProp gpu = {};
    cuda::check(cudaGetDeviceProperties(&gpu, i), "reading what the GPU is");
    devices.push_back(fmt::format("{}, compute capability {}.{}, {:.0f} GB, driver {}", gpu.name, gpu.major,
                                  gpu.minor, static_cast<double>(gpu.totalGlobalMem) * 1e-9,
                                  cuda::driver_version()));
  }
  return devices;
}

std::string cuda_version() { return cuda::version_name(CUDART_VERSION); }
std::string cuda_architectures() { return PARKA_CUDA_ARCHITECTURES; }

}  // namespace parka
