#include <algorithm>
#include <array>
#include <cstring>
#include <exception>
#include <utility>

#include <cuda_runtime_api.h>
#include <nccl.h>

#include "comm/cuda/counter.h"
#include "comm/nccl_ranks.h"
#include "comm/watchdog.h"
#include "kernels/cuda/check.h"
#include "kernels/cuda/cuda_device.h"

namespace parka {
namespace {

using cuda::check;

constexpr size_t kDefaultStackBytes = 1024;  // of a thread, as CUDA starts with

// A failure of the network or of another rank is no defect of this one.
ExitCode exit_code_of(ncclResult_t status) {
  const bool others = status == ncclSystemError || status == ncclRemoteError;
  return others ? ExitCode::kRankLost : ExitCode::kInternal;
}

std::string reason_of(ncclResult_t status, ncclComm_t comm) {
  const char* last = ncclGetLastError(comm);
  const bool says_more = last != nullptr && *last != '\0';
  return fmt::format("NCCL: {}{}{}", ncclGetErrorString(status), says_more ? ": " : "", says_more ? last : "");
}

ncclDataType_t type_of(const TensorView& x) { return x.dtype == DType::kF32 ? ncclFloat32 : ncclBfloat16; }

// 0 while the stream is not being captured, else a number that no other capture has.
unsigned long long capture_of(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long id = 0;
  check(cudaStreamGetCaptureInfo(stream, &status, &id), "graph capture");
  return status == cudaStreamCaptureStatusActive ? id : 0;
}

// Collectives run in order on a stream of their own, of high priority: the few multiprocessors that they need are
// given to them as soon as a kernel of the device's stream frees any. Two events order the streams: a collective
// waits for the device's work of that time, and wait() makes the device wait for a collective. Under capture the
// first event takes the stream into the capture and wait() joins it again.
class NcclCommunicator final : public Communicator, private CollectiveProbe {
 public:
  NcclCommunicator(Communicator& hosts, cuda::CudaDevice& device, Watchdog& watchdog)
      : hosts_(hosts), device_(device), watchdog_(watchdog) {
    int least = 0, greatest = 0;
    check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "stream priorities");
    check(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, greatest), "stream");
    check(cudaEventCreateWithFlags(&ready_, cudaEventDisableTiming), "event");
    for (Done& done : done_) check(cudaEventCreateWithFlags(&done.event, cudaEventDisableTiming), "event");
    void* counters = nullptr;
    check(cudaHostAlloc(&counters, 2 * sizeof(uint64_t), cudaHostAllocDefault), "pinned memory");
    std::memset(counters, 0, 2 * sizeof(uint64_t));
    reached_ = static_cast<uint64_t*>(counters);
    finished_ = reached_ + 1;
    connect();
    watchdog_.probe(this);
  }
  ~NcclCommunicator() override;
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  int rank() const override { return hosts_.rank(); }
  int size() const override { return hosts_.size(); }
  std::string description() const override;

  void all_reduce(Device& device, const TensorView& x, Reduction reduction, Peers peers) override;
  void reduce_scatter(Device& device, const TensorView& in, const TensorView& out, Peers peers) override;
  void all_gather(Device& device, const TensorView& in, const TensorView& out, Peers peers) override;
  uint64_t last_queued() const override { return last_queued_; }
  void wait(Device& device, uint64_t number) override;

  std::vector<std::string> gather_text(const std::string& text) override { return hosts_.gather_text(text); }
  double max(double value) override { return hosts_.max(value); }
  void barrier() override { hosts_.barrier(); }

 private:
  // The end of a collective. What was queued while a capture went on is part of that graph and of nothing else.
  struct Done {
    cudaEvent_t event = nullptr;
    unsigned long long capture = 0;
  };
  // wait() for one that is further back than this waits for a later one.
  static constexpr size_t kRemembered = 256;

  void connect();
  void divided() override;
  ncclComm_t comm_of(Peers peers) const {
    const bool is_all = size_of(peers) == size();
    return is_all ? comm_ : peers == Peers::kGroup ? group_ : across_;
  }
  // A collective of one: `in` becomes `out`.
  ncclResult_t copy(const TensorView& in, const TensorView& out) {
    if (in.data == out.data) return ncclSuccess;
    const auto bytes = static_cast<size_t>(out.bytes());
    check(cudaMemcpyAsync(out.data, in.data, bytes, cudaMemcpyDeviceToDevice, stream_), "copy");
    return ncclSuccess;
  }
  std::array<ncclComm_t, 3> comms() const { return {group_, across_, comm_}; }
  Done& done(uint64_t number) { return done_[number % kRemembered]; }
  // Queues one collective: `call` must queue it on stream_.
  template <typename Call>
  void queue(const Device& device, const char* name, const Call& call);
  void check_nccl(ncclResult_t status, const char* name) const;

  // Of the watchdog's thread.
  CollectiveCounts counts() const override;
  std::string failure() override;

  Communicator& hosts_;
  cuda::CudaDevice& device_;
  Watchdog& watchdog_;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t ready_ = nullptr;
  std::array<Done, kRemembered> done_{};
  uint64_t *reached_ = nullptr, *finished_ = nullptr;  // counted by the GPU, also when a graph is replayed
  uint64_t last_queued_ = 0, last_outside_ = 0, last_joined_ = 0;  // the latter two outside of captures
  ncclComm_t comm_ = nullptr;                                      // of all
  ncclComm_t group_ = nullptr, across_ = nullptr;  // null unless divide() has made several groups of several ranks
};

void NcclCommunicator::connect() {
  std::string text;
  if (rank() == 0) {
    ncclUniqueId id;
    check_nccl(ncclGetUniqueId(&id), "unique id");
    text.assign(id.internal, sizeof(id.internal));
  }
  text = hosts_.gather_text(text)[0];
  ncclUniqueId id;
  PARKA_REQUIRE(text.size() == sizeof(id.internal));
  std::memcpy(id.internal, text.data(), sizeof(id.internal));
  // NCCL's kernels call functions through tables, so that the driver cannot know how much stack they need: CUDA's
  // default, instead of what CudaDevice sets for kernels where it is known.
  check(cudaDeviceSetLimit(cudaLimitStackSize, kDefaultStackBytes), "NCCL stack size");
  check_nccl(ncclCommInitRank(&comm_, size(), id, rank()), "start");
}

void NcclCommunicator::divided() {
  if (size_of(Peers::kGroup) == 1 || size_of(Peers::kAcross) == 1) return;
  const int group = place_in(Peers::kAcross), place = place_in(Peers::kGroup);
  watchdog_.probe(nullptr);  // its thread asks the communicators
  check_nccl(ncclCommSplit(comm_, group, place, &group_, nullptr), "groups");
  check_nccl(ncclCommSplit(comm_, place, group, &across_, nullptr), "groups");
  watchdog_.probe(this);
}

// When an Error is on its way out, other ranks may never come to the collectives that are still queued.
NcclCommunicator::~NcclCommunicator() {
  watchdog_.probe(nullptr);
  const bool failed = std::uncaught_exceptions() > 0;
  if (!failed) cudaStreamSynchronize(stream_);
  for (const ncclComm_t comm : comms()) {
    if (comm == nullptr) continue;
    if (failed) {
      ncclCommAbort(comm);
    } else {
      ncclCommDestroy(comm);
    }
  }
  for (const Done& done : done_) cudaEventDestroy(done.event);
  cudaEventDestroy(ready_);
  cudaStreamDestroy(stream_);
  cudaFreeHost(reached_);
}

std::string NcclCommunicator::description() const {
  int version = 0;
  check_nccl(ncclGetVersion(&version), "version");
  return fmt::format("{} GPUs over NCCL {}.{}.{}", size(), version / 10000, version / 100 % 100, version % 100);
}

void NcclCommunicator::check_nccl(ncclResult_t status, const char* name) const {
  if (status == ncclSuccess || status == ncclInProgress) return;
  throw Error(exit_code_of(status),
              fmt::format("{}, collective {}: {}", name, last_queued_, reason_of(status, comm_)));
}

template <typename Call>
void NcclCommunicator::queue(const Device& device, const char* name, const Call& call) {
  PARKA_REQUIRE(&device == &device_);
  const cudaStream_t main = device_.stream();
  const unsigned long long capture = capture_of(main);
  if (capture != 0 && last_joined_ < last_outside_) {
    throw_internal("{}: wait() for collective {} before replay(): a recording has its collectives in its own order",
                   name, last_outside_);
  }
  ++last_queued_;
  if (capture == 0) last_outside_ = last_queued_;
  check(cudaEventRecord(ready_, main), name);
  check(cudaStreamWaitEvent(stream_, ready_), name);
  cuda::queue_count(reached_, stream_);
  check_nccl(call(), name);
  cuda::queue_count(finished_, stream_);
  Done& done = this->done(last_queued_);
  check(cudaEventRecord(done.event, stream_), name);
  done.capture = capture;
}

void NcclCommunicator::all_reduce(Device& device, const TensorView& x, Reduction reduction, Peers peers) {
  check_reducible(x);
  queue(device, "all_reduce", [&] {
    if (size_of(peers) == 1) return ncclSuccess;
    return ncclAllReduce(x.data, x.data, static_cast<size_t>(x.numel()), type_of(x),
                         reduction == Reduction::kSum ? ncclSum : ncclMax, comm_of(peers), stream_);
  });
}

void NcclCommunicator::reduce_scatter(Device& device, const TensorView& in, const TensorView& out, Peers peers) {
  check_reducible(in);
  check_scattered(in, out, size_of(peers));
  queue(device, "reduce_scatter", [&] {
    if (size_of(peers) == 1) return copy(in, out);
    return ncclReduceScatter(in.data, out.data, static_cast<size_t>(out.numel()), type_of(in), ncclSum,
                             comm_of(peers), stream_);
  });
}

void NcclCommunicator::all_gather(Device& device, const TensorView& in, const TensorView& out, Peers peers) {
  check_scattered(out, in, size_of(peers));
  queue(device, "all_gather", [&] {
    if (size_of(peers) == 1) return copy(in, out);
    return ncclAllGather(in.data, out.data, static_cast<size_t>(in.bytes()), ncclUint8, comm_of(peers), stream_);
  });
}

void NcclCommunicator::wait(Device& device, uint64_t number) {
  PARKA_REQUIRE(&device == &device_ && number <= last_queued_);
  if (number == 0) return;
  const uint64_t oldest = last_queued_ < kRemembered ? 1 : last_queued_ - kRemembered + 1;
  number = std::max(number, oldest);
  const unsigned long long capture = capture_of(device_.stream());
  const Done& done = this->done(number);
  if (done.capture == capture) {
    check(cudaStreamWaitEvent(device_.stream(), done.event), "wait for a collective");
    if (capture == 0) last_joined_ = std::max(last_joined_, number);
    return;
  }
  // A recording has joined its collectives itself, and the device's stream waits for the whole recording.
  if (capture == 0) return;
  if (number > last_joined_) {
    throw_internal("wait() for collective {}, which was queued outside, within replay(): wait() before it", number);
  }
}

CollectiveCounts NcclCommunicator::counts() const {
  const uint64_t finished = *static_cast<const volatile uint64_t*>(finished_);
  return {*static_cast<const volatile uint64_t*>(reached_), finished};
}

std::string NcclCommunicator::failure() {
  for (const ncclComm_t comm : comms()) {
    if (comm == nullptr) continue;
    ncclResult_t status = ncclSuccess;
    const ncclResult_t asked = ncclCommGetAsyncError(comm, &status);
    if (asked != ncclSuccess) status = asked;
    if (status == ncclSuccess || status == ncclInProgress) continue;
    return fmt::format("collective {}: {}", counts().finished + 1, reason_of(status, comm));
  }
  return {};
}

}  // namespace

bool built_with_nccl() { return true; }

std::unique_ptr<Communicator> make_nccl_communicator(Communicator& hosts, Device& device, Watchdog& watchdog) {
  PARKA_REQUIRE(device.kind() == DeviceKind::kCuda);
  return std::make_unique<NcclCommunicator>(hosts, cuda::as_cuda(device), watchdog);
}

}  // namespace parka
