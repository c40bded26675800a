#include <algorithm>
#include <array>
#include <cstring>
#include <exception>
#include <optional>
#include <tuple>
#include <utility>

#include <cuda_runtime_api.h>
#include <nccl.h>

#include "comm/cuda/counter.h"
#include "comm/cuda/nccl_status.h"
#include "comm/cuda/peer_window.h"
#include "comm/cuda/sum_chunks.h"
#include "comm/launch/watchdog.h"
#include "comm/nccl_ranks.h"
#include "kernels/device/cuda/check.h"
#include "kernels/device/cuda/cuda_device.h"
#include "kernels/ops/elementwise/pointwise.h"

namespace parka {
namespace {

using cuda::check;
using cuda::exit_code_of;
using cuda::reason_of;

constexpr size_t kDefaultStackBytes = 1024;  // per thread, CUDA's default

ncclDataType_t type_of(const TensorView& x) { return x.dtype == DType::kF32 ? ncclFloat32 : ncclBfloat16; }

// With a window that all ranks of a node have registered, NCCL gathers with the GPUs' copy engines. Kernels would
// take multiprocessors, and a GEMM beside them, which needs all of them, would need a second wave.
ncclConfig_t communicator_config() {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.CTAPolicy = NCCL_CTA_POLICY_ZERO;
  return config;
}

// Bytes of memory from `begin` up to `end`.
struct Span {
  const void *begin, *end;
  bool overlaps(const Span& other) const { return begin < other.end && other.begin < end; }
};

Span span_of(const TensorView& x) { return {x.data, static_cast<const std::byte*>(x.data) + x.bytes()}; }

// Collectives run in order on their own stream, of high priority: they get the few multiprocessors they need as
// soon as a kernel of the device's stream frees any. Events order the two streams: a collective waits for the work
// the device has queued by then, and wait() makes the device wait for a collective. Sums of exchanged chunks run on
// a third stream, of low priority; whatever uses their memory afterwards waits for them.
class NcclCommunicator final : public Communicator, private CollectiveProbe {
 public:
  NcclCommunicator(Communicator& hosts, std::vector<std::string> host_of, cuda::CudaDevice& device,
                   Watchdog& watchdog)
      : hosts_(hosts), device_(device), watchdog_(watchdog), host_of_(std::move(host_of)) {
    PARKA_REQUIRE(host_of_.size() == static_cast<size_t>(hosts.size()));
    int least = 0, greatest = 0;
    check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "stream priorities");
    check(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, greatest), "stream");
    check(cudaStreamCreateWithPriority(&sum_stream_, cudaStreamNonBlocking, least), "stream");
    for_each_event(
        [](cudaEvent_t& event) { check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "event"); });
    void* counters = nullptr;
    check(cudaHostAlloc(&counters, 2 * sizeof(uint64_t), cudaHostAllocDefault), "pinned memory");
    std::memset(counters, 0, 2 * sizeof(uint64_t));
    reached_ = static_cast<uint64_t*>(counters);
    finished_ = reached_ + 1;
    connect();
    watchdog_.probe(this);
  }
  ~NcclCommunicator() override;
  NcclCommunicator& operator=(NcclCommunicator&&) = delete;

  int rank() const override { return hosts_.rank(); }
  int size() const override { return hosts_.size(); }
  std::string description() const override;

  void* allocate(Device& device, int64_t bytes) override;
  void release(Device& device, void* memory) override;
  void set_exchange_buffer(const TensorView& buffer) override {
    buffer_ = buffer;
    buffer_at_ = 0;
  }

  void all_reduce(Device& device, const TensorView& x, Reduction reduction, Peers peers) override;
  void reduce_scatter(Device& device, const TensorView& in, const TensorView& out, Peers peers,
                      Accumulation accumulation) override;
  void all_gather(Device& device, const TensorView& in, const TensorView& out, Peers peers) override;
  void all_gather_columns(Device& device, const TensorView& in, const TensorView& out, Peers peers) override;
  void all_to_all(Device& device, const TensorView& in, const TensorView& out, Peers peers) override;
  void wait(Device& device, uint64_t number) override;

  std::vector<std::string> gather_text(const std::string& text) override { return hosts_.gather_text(text); }

 private:
  static constexpr size_t kRemembered = 256;

  void connect();
  void divided() override;
  // The ranks of a collective. The communicator is null for a group of one rank, or of all ranks.
  struct PeerGroup {
    ncclComm_t comm = nullptr;
    std::optional<cuda::PeerWindow> window;
  };
  PeerGroup& group_of(Peers peers) { return group(size_of(peers) == size() ? Peers::kAll : peers); }
  PeerGroup& group(Peers peers) { return groups_[static_cast<size_t>(peers)]; }
  bool are_on_one_host(Peers peers) const;
  void open_windows();
  bool is_in_window(const TensorView& x, Peers peers);
  bool reduces_by_copies(const TensorView& in, Peers peers);
  void reduce_by_copies(const TensorView& in, const TensorView& out, Peers peers, bool adds);
  std::byte* take_buffer(int64_t bytes);
  void wait_for_sums(const Span& memory);
  // A collective of one: `in` becomes `out`.
  ncclResult_t copy(const TensorView& in, const TensorView& out) {
    if (in.data == out.data) return ncclSuccess;
    const auto bytes = static_cast<size_t>(out.bytes());
    check(cudaMemcpyAsync(out.data, in.data, bytes, cudaMemcpyDeviceToDevice, stream_), "copy");
    return ncclSuccess;
  }
  cudaEvent_t done(uint64_t number) const { return done_[number % kRemembered]; }
  cudaEvent_t summed(uint64_t number) const { return summed_[number % kRemembered]; }
  uint64_t& sum_before(uint64_t number) { return sum_before_[number % kRemembered]; }
  // wait() for an older collective than those remembered waits for a later one.
  uint64_t remembered(uint64_t number) const {
    return last_queued_ < kRemembered ? number : std::max(number, last_queued_ - kRemembered + 1);
  }
  template <typename Visit>
  void for_each_event(const Visit& visit) {
    visit(ready_);
    visit(exchanged_);
    for (cudaEvent_t& event : done_) visit(event);
    for (cudaEvent_t& event : summed_) visit(event);
  }
  void synchronize() {
    cudaStreamSynchronize(stream_);
    cudaStreamSynchronize(sum_stream_);
  }
  // Queues one collective: `call` must queue it on stream_.
  template <typename Call>
  void queue(const Device& device, const char* name, const Call& call);
  void check_nccl(ncclResult_t status, const char* name) const;

  // Called by the watchdog's thread.
  CollectiveCounts counts() const override;
  std::string failure() override;

  Communicator& hosts_;
  cuda::CudaDevice& device_;
  Watchdog& watchdog_;
  cudaStream_t stream_ = nullptr, sum_stream_ = nullptr;
  cudaEvent_t ready_ = nullptr, exchanged_ = nullptr;
  std::array<cudaEvent_t, kRemembered> done_{}, summed_{};  // the ends of the latest collectives, and of their sums
  std::array<uint64_t, kRemembered> sum_before_{};          // the last sum up to each of them; 0: none
  uint64_t *reached_ = nullptr, *finished_ = nullptr;       // incremented by the GPU
  std::vector<std::string> host_of_;                        // by rank
  std::array<PeerGroup, kNumPeers> groups_;                 // by Peers
  void* memory_ = nullptr;                                  // of allocate()
  int64_t memory_bytes_ = 0;
  TensorView buffer_;
  int64_t buffer_at_ = 0;  // where the next exchange puts its chunks, in bytes
  struct Sum {
    uint64_t number;
    std::array<Span, 3> memory;  // that it works on
  };
  std::vector<Sum> sums_;  // in order, those that may still run
  uint64_t last_sum_ = 0;
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
  // NCCL's kernels call functions through tables, so the driver cannot know how much stack they need. They get
  // CUDA's default instead of the smaller size that CudaDevice sets for Parka's own kernels.
  check(cudaDeviceSetLimit(cudaLimitStackSize, kDefaultStackBytes), "NCCL stack size");
  ncclConfig_t config = communicator_config();
  check_nccl(ncclCommInitRankConfig(&group(Peers::kAll).comm, size(), id, rank(), &config), "start");
}

void NcclCommunicator::divided() {
  watchdog_.probe(nullptr);  // its thread uses the communicators
  const ncclComm_t all = group(Peers::kAll).comm;
  for (const Peers peers : kAllPeers) {
    if (!mesh().is_group(peers)) continue;
    ncclConfig_t config = communicator_config();
    // The lowest rank among the peers numbers them.
    check_nccl(ncclCommSplit(all, rank_at(peers, 0), place_in(peers), &group(peers).comm, &config), "groups");
  }
  open_windows();
  watchdog_.probe(this);
}

// When this is destroyed because of an Error, other ranks may never reach the collectives that are still queued.
NcclCommunicator::~NcclCommunicator() {
  watchdog_.probe(nullptr);
  const bool failed = std::uncaught_exceptions() > 0;
  if (!failed) synchronize();
  for (auto group = groups_.rbegin(); group != groups_.rend(); ++group) {  // that of all ranks last
    const ncclComm_t comm = group->comm;
    if (comm == nullptr) continue;
    if (failed) {
      ncclCommAbort(comm);
    } else {
      ncclCommDestroy(comm);
    }
  }
  for_each_event([](cudaEvent_t event) { cudaEventDestroy(event); });
  cudaStreamDestroy(sum_stream_);
  cudaStreamDestroy(stream_);
  cudaFreeHost(reached_);
}

std::string NcclCommunicator::description() const {
  return fmt::format("{} GPUs over NCCL {}", size(), nccl_version());
}

void NcclCommunicator::check_nccl(ncclResult_t status, const char* name) const {
  if (status == ncclSuccess || status == ncclInProgress) return;
  throw Error(exit_code_of(status), fmt::format("{}, collective {}: {}", name, last_queued_,
                                                reason_of(status, groups_[static_cast<size_t>(Peers::kAll)].comm)));
}

template <typename Call>
void NcclCommunicator::queue(const Device& device, const char* name, const Call& call) {
  PARKA_REQUIRE(&device == &device_);
  const cudaStream_t main = device_.stream();
  ++last_queued_;
  check(cudaEventRecord(ready_, main), name);
  check(cudaStreamWaitEvent(stream_, ready_), name);
  cuda::queue_count(reached_, stream_);
  check_nccl(call(), name);
  cuda::queue_count(finished_, stream_);
  check(cudaEventRecord(done(last_queued_), stream_), name);
  sum_before(last_queued_) = last_sum_;
}

void* NcclCommunicator::allocate(Device& device, int64_t bytes) {
  PARKA_REQUIRE(memory_ == nullptr);
  if (device.memory_use().free_bytes < bytes) return device.allocate(bytes);  // says how much is free
  constexpr int64_t kMultiple = 4096;                                         // of which windows are
  const int64_t signals_at = ceil_div(std::max<int64_t>(bytes, 1), kMultiple) * kMultiple;
  constexpr int64_t kSignals = std::tuple_size_v<decltype(groups_)> * cuda::PeerWindow::kSignalBytes;
  memory_bytes_ = signals_at + kSignals;
  check_nccl(ncclMemAlloc(&memory_, static_cast<size_t>(memory_bytes_)), "allocation");
  check(cudaMemset(static_cast<std::byte*>(memory_) + signals_at, 0, kSignals), "allocation");
  check(cudaDeviceSynchronize(), "allocation");  // before others signal anything
  open_windows();
  return memory_;
}

void NcclCommunicator::release(Device& device, void* memory) {
  if (memory != memory_) return device.release(memory);
  // Queued work may wait for ranks that never come, and others may be writing here; the process ends anyway.
  if (std::uncaught_exceptions() > 0) return;
  cudaStreamSynchronize(device_.stream());
  synchronize();
  for (PeerGroup& group : groups_) {
    if (group.window) group.window->close();
    group.window.reset();
  }
  ncclMemFree(memory_);
  memory_ = nullptr;
  set_exchange_buffer({});
}

bool NcclCommunicator::are_on_one_host(Peers peers) const {
  for (int place = 0; place < size_of(peers); ++place) {
    if (host_of_[static_cast<size_t>(rank_at(peers, place))] != host_of_[static_cast<size_t>(rank())]) return false;
  }
  return true;
}

// Peers on one host with access to each other's memory get a window. Over a network NCCL's rings send less.
void NcclCommunicator::open_windows() {
  if (memory_ == nullptr) return;
  std::byte* signals = static_cast<std::byte*>(memory_) + memory_bytes_;
  for (int i = 0; i < kNumPeers; ++i) {
    const auto peers = static_cast<Peers>(i);
    PeerGroup& group = this->group(peers);
    signals -= cuda::PeerWindow::kSignalBytes;
    if (group.comm == nullptr || group.window || !are_on_one_host(peers)) continue;
    group.window = cuda::PeerWindow::open(group.comm, memory_, memory_bytes_, signals);
  }
}

// All ranks get the same answer, because plans place tensors at the same offsets.
bool NcclCommunicator::is_in_window(const TensorView& x, Peers peers) {
  const auto* const begin = static_cast<const std::byte*>(memory_);
  const auto* const at = static_cast<const std::byte*>(x.data);
  return group_of(peers).window && at >= begin && at < begin + memory_bytes_;
}

bool NcclCommunicator::reduces_by_copies(const TensorView& in, Peers peers) {
  return is_in_window(in, peers) && in.bytes() / size_of(peers) * (size_of(peers) - 1) <= buffer_.bytes();
}

// Takes memory from the exchange buffer, which is used as a ring. Waits where a sum may still be reading.
std::byte* NcclCommunicator::take_buffer(int64_t bytes) {
  if (buffer_at_ + bytes > buffer_.bytes()) buffer_at_ = 0;
  std::byte* const begin = static_cast<std::byte*>(buffer_.data) + buffer_at_;
  wait_for_sums({begin, begin + bytes});
  constexpr int64_t kMultiple = 256;
  buffer_at_ += ceil_div(bytes, kMultiple) * kMultiple;
  return begin;
}

// The chunks of the others arrive in the buffer. They are summed beside the collectives that follow, on
// multiprocessors that the device's own work leaves idle.
void NcclCommunicator::reduce_by_copies(const TensorView& in, const TensorView& out, Peers peers, bool adds) {
  const int place = place_in(peers), count = size_of(peers);
  const int64_t others_bytes = (count - 1) * out.bytes();
  std::byte* const others = take_buffer(others_bytes);
  const auto* const chunks = static_cast<const std::byte*>(in.data);
  group_of(peers).window->exchange(chunks, others, out.bytes(), stream_);
  check(cudaEventRecord(exchanged_, stream_), "reduce_scatter");
  check(cudaStreamWaitEvent(sum_stream_, exchanged_), "reduce_scatter");
  const std::byte* const own = chunks + place * out.bytes();
  cuda::queue_sum({own, others, place, count}, out, adds, sum_stream_);
  last_sum_ = last_queued_;
  check(cudaEventRecord(summed(last_sum_), sum_stream_), "reduce_scatter");
  sums_.push_back({last_sum_, {{{own, own + out.bytes()}, {others, others + others_bytes}, span_of(out)}}});
}

// Later collectives wait for the sums that work on this memory, and so for those before them.
void NcclCommunicator::wait_for_sums(const Span& memory) {
  const auto last = std::find_if(sums_.rbegin(), sums_.rend(), [&](const Sum& sum) {
    return std::any_of(sum.memory.begin(), sum.memory.end(),
                       [&](const Span& used) { return used.overlaps(memory); });
  });
  if (last == sums_.rend()) return;
  check(cudaStreamWaitEvent(stream_, summed(last->number)), "wait for a sum");
  sums_.erase(sums_.begin(), last.base());
}

void NcclCommunicator::all_reduce(Device& device, const TensorView& x, Reduction reduction, Peers peers) {
  check_reducible(x);
  wait_for_sums(span_of(x));
  queue(device, "all_reduce", [&] {
    if (size_of(peers) == 1) return ncclSuccess;
    return ncclAllReduce(x.data, x.data, static_cast<size_t>(x.numel()), type_of(x),
                         reduction == Reduction::kSum ? ncclSum : ncclMax, group_of(peers).comm, stream_);
  });
}

void NcclCommunicator::reduce_scatter(Device& device, const TensorView& in, const TensorView& out, Peers peers,
                                      Accumulation accumulation) {
  check_reducible(in);
  const int size = size_of(peers);
  check_scattered(in, out, size);
  const bool adds = accumulation == Accumulation::kContinue;
  wait_for_sums(span_of(in));
  if (size > 1 && reduces_by_copies(in, peers)) {
    queue(device, "reduce_scatter", [&] {
      reduce_by_copies(in, out, peers, adds);
      return ncclSuccess;
    });
    return;
  }
  const TensorView own(static_cast<std::byte*>(in.data) + place_in(peers) * out.bytes(), in.dtype, {out.numel()});
  if (adds) add(device, {.x = out, .total = own});
  wait_for_sums(span_of(out));
  queue(device, "reduce_scatter", [&] {
    if (size == 1) return copy(in, out);
    return ncclReduceScatter(in.data, out.data, static_cast<size_t>(out.numel()), type_of(in), ncclSum,
                             group_of(peers).comm, stream_);
  });
}

void NcclCommunicator::all_gather(Device& device, const TensorView& in, const TensorView& out, Peers peers) {
  check_scattered(out, in, size_of(peers));
  for (const TensorView& used : {in, out}) wait_for_sums(span_of(used));
  queue(device, "all_gather", [&] {
    if (size_of(peers) == 1) return copy(in, out);
    return ncclAllGather(in.data, out.data, static_cast<size_t>(in.bytes()), ncclUint8, group_of(peers).comm,
                         stream_);
  });
}

void NcclCommunicator::all_gather_columns(Device& device, const TensorView& in, const TensorView& out,
                                          Peers peers) {
  const int size = size_of(peers);
  check_side_by_side(out, in, size);
  for (const TensorView& used : {in, out}) wait_for_sums(span_of(used));
  const int64_t rows = in.dim[0], row_bytes = in.dim[1] * parka::size_of(in.dtype);
  auto* const target = static_cast<std::byte*>(out.data);
  queue(device, "all_gather_columns", [&] {
    if (size == 1) return copy(in, out);
    if (is_in_window(out, peers)) {
      const auto* const source = static_cast<const std::byte*>(in.data);
      group_of(peers).window->gather_columns(source, target, rows, row_bytes, stream_);
      return ncclSuccess;
    }
    PARKA_REQUIRE(out.bytes() <= buffer_.bytes());
    std::byte* const blocks = take_buffer(out.bytes());
    const ncclResult_t status =
        ncclAllGather(in.data, blocks, static_cast<size_t>(in.bytes()), ncclUint8, group_of(peers).comm, stream_);
    for (int place = 0; place < size && status == ncclSuccess; ++place) {
      const auto width = static_cast<size_t>(row_bytes);
      check(cudaMemcpy2DAsync(target + place * row_bytes, size * width, blocks + place * in.bytes(), width, width,
                              static_cast<size_t>(rows), cudaMemcpyDeviceToDevice, stream_),
            "all_gather_columns");
    }
    return status;
  });
}

void NcclCommunicator::all_to_all(Device& device, const TensorView& in, const TensorView& out, Peers peers) {
  const int size = size_of(peers);
  check_exchanged(in, out, size);
  for (const TensorView& used : {in, out}) wait_for_sums(span_of(used));
  const int64_t rows = in.dim[0], bytes = in.dim[2] * parka::size_of(in.dtype);
  const auto* const source = static_cast<const std::byte*>(in.data);
  auto* const target = static_cast<std::byte*>(out.data);
  queue(device, "all_to_all", [&] {
    if (size == 1) return copy(in, out);
    if (is_in_window(out, peers)) {
      group_of(peers).window->all_to_all(source, target, rows, bytes, stream_);
      return ncclSuccess;
    }
    const auto count = static_cast<size_t>(bytes);
    const ncclComm_t comm = group_of(peers).comm;
    ncclResult_t status = ncclGroupStart();
    for (int64_t row = 0; row < rows; ++row) {
      for (int place = 0; place < size && status == ncclSuccess; ++place) {
        const int64_t at = (row * size + place) * bytes;
        status = ncclSend(source + at, count, ncclUint8, place, comm, stream_);
        if (status == ncclSuccess) status = ncclRecv(target + at, count, ncclUint8, place, comm, stream_);
      }
    }
    const ncclResult_t ended = ncclGroupEnd();
    return status == ncclSuccess ? ended : status;
  });
}

void NcclCommunicator::wait(Device& device, uint64_t number) {
  PARKA_REQUIRE(&device == &device_ && number <= last_queued_);
  if (number == 0) return;
  check(cudaStreamWaitEvent(device_.stream(), done(remembered(number))), "wait for a collective");
  const uint64_t sum = sum_before(remembered(number));
  if (sum != 0) check(cudaStreamWaitEvent(device_.stream(), summed(sum)), "wait for a sum");
}

CollectiveCounts NcclCommunicator::counts() const {
  const uint64_t finished = *static_cast<const volatile uint64_t*>(finished_);
  return {*static_cast<const volatile uint64_t*>(reached_), finished};
}

std::string NcclCommunicator::failure() {
  for (const PeerGroup& group : groups_) {
    const ncclComm_t comm = group.comm;
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

std::string nccl_version() {
  int version = 0;
  if (ncclGetVersion(&version) != ncclSuccess) return "unknown";
  return fmt::format("{}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

std::unique_ptr<Communicator> make_nccl_communicator(Communicator& agreement, std::vector<std::string> host_of,
                                                     Device& device, Watchdog& watchdog) {
  PARKA_REQUIRE(device.kind() == DeviceKind::kCuda);
  return std::make_unique<NcclCommunicator>(agreement, std::move(host_of), cuda::as_cuda(device), watchdog);
}

}  // namespace parka
