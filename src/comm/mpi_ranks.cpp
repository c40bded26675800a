#include "comm/mpi_ranks.h"

#include <algorithm>
#include <array>
#include <climits>
#include <cstring>
#include <vector>

#include <mpi.h>

#include "comm/collective_counter.h"
#include "core/parallel.h"
#include "kernels/device/device.h"

namespace parka {
namespace {

constexpr int64_t kChunkBytes = int64_t{16} << 20;  // of scratch memory, and the longest message
constexpr int kTag = 1;

void check(int status, const char* what) {
  if (status == MPI_SUCCESS) return;
  std::array<char, MPI_MAX_ERROR_STRING> text{};
  int length = 0;
  MPI_Error_string(status, text.data(), &length);
  throw Error(ExitCode::kRankLost, fmt::format("{}: MPI: {}", what, std::string(text.data(), length)));
}

float decode(float x) { return x; }
float decode(BFloat16 x) { return decode_bf16(x); }
void encode(float x, float& out) { out = x; }
void encode(float x, BFloat16& out) { out = encode_bf16(x); }

float reduced(Reduction reduction, float a, float b) {
  if (reduction == Reduction::kSum) return a + b;
  return b > a || a != a ? b : a;
}

template <Reduction kReduction, typename T>
void reduce_elements(const std::vector<const void*>& parts, void* out, int64_t begin, int64_t end) {
  constexpr int64_t kBlock = 1024;
  std::array<float, kBlock> sums;
  for (int64_t first = begin; first < end; first += kBlock) {
    const int64_t count = std::min(kBlock, end - first);
    const T* part = static_cast<const T*>(parts[0]) + first;
    for (int64_t i = 0; i < count; ++i) sums[i] = decode(part[i]);
    for (size_t r = 1; r < parts.size(); ++r) {
      part = static_cast<const T*>(parts[r]) + first;
      for (int64_t i = 0; i < count; ++i) sums[i] = reduced(kReduction, sums[i], decode(part[i]));
    }
    T* result = static_cast<T*>(out) + first;
    for (int64_t i = 0; i < count; ++i) encode(sums[i], result[i]);
  }
}

// out [count] = parts[r] [count] reduced in order of ranks, in fp32, rounded once. `out` may be one of the parts.
void reduce_in_order(Reduction reduction, DType dtype, const std::vector<const void*>& parts, void* out,
                     int64_t count) {
  constexpr int64_t kGrain = int64_t{1} << 15;
  const bool sum = reduction == Reduction::kSum;
  const auto run =
      dtype == DType::kF32
          ? (sum ? reduce_elements<Reduction::kSum, float> : reduce_elements<Reduction::kMax, float>)
          : (sum ? reduce_elements<Reduction::kSum, BFloat16> : reduce_elements<Reduction::kMax, BFloat16>);
  parallel_for(count, kGrain, [&](int64_t begin, int64_t end) { run(parts, out, begin, end); });
}

// Device memory is host memory here, so messages are sent from and received into the tensors themselves.
class MpiCommunicator final : public Communicator {
 public:
  explicit MpiCommunicator(CollectiveCounter& counter) : counter_(counter) {
    check(MPI_Comm_rank(MPI_COMM_WORLD, &rank_), "rank");
    check(MPI_Comm_size(MPI_COMM_WORLD, &size_), "size");
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::string description() const override { return fmt::format("{} ranks over MPI", size_); }

  void all_reduce(Device& device, const TensorView& x, Reduction reduction, Peers peers) override;
  void reduce_scatter(Device& device, const TensorView& in, const TensorView& out, Peers peers,
                      Accumulation accumulation) override;
  void all_gather(Device& device, const TensorView& in, const TensorView& out, Peers peers) override;
  void all_gather_columns(Device& device, const TensorView& in, const TensorView& out, Peers peers) override;
  uint64_t last_queued() const override { return last_queued_; }
  void wait(Device&, uint64_t) override {}

  std::vector<std::string> gather_text(const std::string& text) override;
  double max(double value) override;
  void barrier() override;

 private:
  // Elements [begin, begin + count) of a tensor, the part that one rank reduces.
  struct Chunk {
    int64_t begin, count;
  };

  // The ranks of a collective. Messages use ranks of MPI_COMM_WORLD, so no group needs its own MPI communicator.
  struct Group {
    Peers peers;
    int size, place;
  };

  Group begin_collective(const Device& device, Peers peers) {
    PARKA_REQUIRE(device.kind() == DeviceKind::kCpu);
    ++last_queued_;
    return {peers, size_of(peers), place_in(peers)};
  }
  // Elements of a chunk when `size` chunks fit into the scratch memory.
  static int64_t longest_chunk(DType dtype, int size) {
    return std::max<int64_t>(1, kChunkBytes / parka::size_of(dtype) / size);
  }
  void send(const void* data, int64_t bytes, int to) {
    if (bytes == 0) return;
    requests_.emplace_back();
    check(MPI_Isend(data, static_cast<int>(bytes), MPI_BYTE, to, kTag, MPI_COMM_WORLD, &requests_.back()), "send");
  }
  void receive(void* data, int64_t bytes, int from) {
    if (bytes == 0) return;
    requests_.emplace_back();
    check(MPI_Irecv(data, static_cast<int>(bytes), MPI_BYTE, from, kTag, MPI_COMM_WORLD, &requests_.back()),
          "receive");
  }
  void wait_for_messages() {
    const int status = MPI_Waitall(static_cast<int>(requests_.size()), requests_.data(), MPI_STATUSES_IGNORE);
    requests_.clear();
    check(status, "exchange");
  }
  // Calls visit(place, rank) for the other ranks. Each rank has its own order, so that they do not all send to one.
  template <typename Visit>
  void for_each_other(const Group& group, const Visit& visit) const {
    for (int i = 1; i < group.size; ++i) {
      const int place = (group.place + i) % group.size;
      visit(place, rank_at(group.peers, place));
    }
  }

  // Sends every peer its chunk of x, and reduces the received ones with this rank's own chunk into `out`, which may
  // be that chunk of x. `chunk_of(place)` is the same on all ranks, and chunks do not overlap.
  template <typename ChunkOf>
  void exchange_and_reduce(const Group& group, Reduction reduction, const TensorView& x, const ChunkOf& chunk_of,
                           void* out, Accumulation accumulation);

  CollectiveCounter& counter_;
  int rank_ = 0, size_ = 1;
  uint64_t last_queued_ = 0;
  std::vector<std::byte> scratch_;
  std::vector<MPI_Request> requests_;
};

template <typename ChunkOf>
void MpiCommunicator::exchange_and_reduce(const Group& group, Reduction reduction, const TensorView& x,
                                          const ChunkOf& chunk_of, void* out, Accumulation accumulation) {
  auto* base = static_cast<std::byte*>(x.data);
  const Chunk own = chunk_of(group.place);
  const int64_t element = parka::size_of(x.dtype), own_bytes = own.count * element;
  const auto needed = static_cast<size_t>(own_bytes * group.size);
  if (scratch_.size() < needed) scratch_.resize(needed);
  for_each_other(group,
                 [&](int place, int rank) { receive(scratch_.data() + place * own_bytes, own_bytes, rank); });
  for_each_other(group, [&](int place, int rank) {
    const Chunk chunk = chunk_of(place);
    send(base + chunk.begin * element, chunk.count * element, rank);
  });
  std::vector<const void*> parts(static_cast<size_t>(group.size));
  for (int place = 0; place < group.size; ++place) parts[place] = scratch_.data() + place * own_bytes;
  parts[group.place] = base + own.begin * element;
  if (accumulation == Accumulation::kContinue) parts.insert(parts.begin(), out);
  wait_for_messages();
  reduce_in_order(reduction, x.dtype, parts, out, own.count);
}

void MpiCommunicator::all_reduce(Device& device, const TensorView& x, Reduction reduction, Peers peers) {
  check_reducible(x);
  const Group group = begin_collective(device, peers);
  const CollectiveCounter::Span span(counter_);
  auto* base = static_cast<std::byte*>(x.data);
  const int64_t n = x.numel(), element = parka::size_of(x.dtype),
                block = longest_chunk(x.dtype, group.size) * group.size;
  for (int64_t begin = 0; begin < n; begin += block) {
    const int64_t count = std::min(block, n - begin), chunk = ceil_div(count, group.size);
    const auto chunk_of = [&](int place) {
      const int64_t first = std::min(chunk * place, count);
      return Chunk{begin + first, std::min(chunk, count - first)};
    };
    const Chunk own = chunk_of(group.place);
    exchange_and_reduce(group, reduction, x, chunk_of, base + own.begin * element, Accumulation::kBegin);
    for_each_other(group, [&](int place, int rank) {
      receive(base + chunk_of(place).begin * element, chunk_of(place).count * element, rank);
    });
    for_each_other(group, [&](int, int rank) { send(base + own.begin * element, own.count * element, rank); });
    wait_for_messages();
  }
}

void MpiCommunicator::reduce_scatter(Device& device, const TensorView& in, const TensorView& out, Peers peers,
                                     Accumulation accumulation) {
  check_reducible(in);
  const Group group = begin_collective(device, peers);
  check_scattered(in, out, group.size);
  const CollectiveCounter::Span span(counter_);
  const int64_t n = out.numel(), chunk = longest_chunk(in.dtype, group.size);
  for (int64_t begin = 0; begin < n; begin += chunk) {
    exchange_and_reduce(
        group, Reduction::kSum, in,
        [&](int place) {
          return Chunk{place * n + begin, std::min(chunk, n - begin)};
        },
        static_cast<std::byte*>(out.data) + begin * parka::size_of(out.dtype), accumulation);
  }
}

void MpiCommunicator::all_gather(Device& device, const TensorView& in, const TensorView& out, Peers peers) {
  const Group group = begin_collective(device, peers);
  check_scattered(out, in, group.size);
  const CollectiveCounter::Span span(counter_);
  const int64_t bytes = in.bytes();
  const auto* source = static_cast<const std::byte*>(in.data);
  auto* target = static_cast<std::byte*>(out.data);
  if (bytes > 0 && target + group.place * bytes != source) {
    std::memcpy(target + group.place * bytes, source, static_cast<size_t>(bytes));
  }
  for (int64_t begin = 0; begin < bytes; begin += kChunkBytes) {
    const int64_t count = std::min(kChunkBytes, bytes - begin);
    for_each_other(group, [&](int place, int rank) { receive(target + place * bytes + begin, count, rank); });
    for_each_other(group, [&](int, int rank) { send(source + begin, count, rank); });
    wait_for_messages();
  }
}

void MpiCommunicator::all_gather_columns(Device& device, const TensorView& in, const TensorView& out, Peers peers) {
  const Group group = begin_collective(device, peers);
  check_side_by_side(out, in, group.size);
  const CollectiveCounter::Span span(counter_);
  const int64_t num_rows = in.dim[0], row_bytes = in.dim[1] * parka::size_of(in.dtype);
  if (in.numel() == 0) return;
  const int64_t most_rows = std::clamp<int64_t>(kChunkBytes / row_bytes / group.size, 1, num_rows);
  const auto needed = static_cast<size_t>(most_rows * row_bytes * group.size);
  if (scratch_.size() < needed) scratch_.resize(needed);
  const auto* source = static_cast<const std::byte*>(in.data);
  auto* target = static_cast<std::byte*>(out.data);
  for (int64_t begin = 0; begin < num_rows; begin += most_rows) {
    const int64_t rows = std::min(most_rows, num_rows - begin), bytes = rows * row_bytes;
    const auto put = [&](int place, const std::byte* chunk) {
      for (int64_t r = 0; r < rows; ++r) {
        std::memcpy(target + ((begin + r) * group.size + place) * row_bytes, chunk + r * row_bytes,
                    static_cast<size_t>(row_bytes));
      }
    };
    for_each_other(group, [&](int place, int rank) { receive(scratch_.data() + place * bytes, bytes, rank); });
    for_each_other(group, [&](int, int rank) { send(source + begin * row_bytes, bytes, rank); });
    wait_for_messages();
    put(group.place, source + begin * row_bytes);
    for_each_other(group, [&](int place, int) { put(place, scratch_.data() + place * bytes); });
  }
}

std::vector<std::string> MpiCommunicator::gather_text(const std::string& text) {
  const CollectiveCounter::Span span(counter_);
  const auto length = static_cast<int>(text.size());
  std::vector<int> lengths(static_cast<size_t>(size_)), offsets(static_cast<size_t>(size_));
  check(MPI_Allgather(&length, 1, MPI_INT, lengths.data(), 1, MPI_INT, MPI_COMM_WORLD), "gather_text");
  int64_t total = 0;
  for (int r = 0; r < size_; ++r) {
    offsets[r] = static_cast<int>(total);
    total += lengths[r];
    PARKA_REQUIRE(total <= INT_MAX);
  }
  std::string all(static_cast<size_t>(total), '\0');
  check(MPI_Allgatherv(text.data(), length, MPI_BYTE, all.data(), lengths.data(), offsets.data(), MPI_BYTE,
                       MPI_COMM_WORLD),
        "gather_text");
  std::vector<std::string> texts;
  texts.reserve(static_cast<size_t>(size_));
  for (int r = 0; r < size_; ++r) {
    texts.push_back(all.substr(static_cast<size_t>(offsets[r]), static_cast<size_t>(lengths[r])));
  }
  return texts;
}

double MpiCommunicator::max(double value) {
  const CollectiveCounter::Span span(counter_);
  double largest = value;
  check(MPI_Allreduce(&value, &largest, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD), "max");
  return largest;
}

void MpiCommunicator::barrier() {
  const CollectiveCounter::Span span(counter_);
  check(MPI_Barrier(MPI_COMM_WORLD), "barrier");
}

}  // namespace

bool built_with_mpi() { return true; }

std::string mpi_library() {  // may be called before MPI_Init
  std::array<char, MPI_MAX_LIBRARY_VERSION_STRING> text{};
  int length = 0;
  check(MPI_Get_library_version(text.data(), &length), "version");
  std::string version(text.data(), length);
  version.resize(std::min(version.size(), version.find_first_of(",\n")));
  return version;
}

MpiPlace start_mpi() {
  int provided = 0;
  check(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &provided), "MPI_Init");
  // MPI returns error codes, from which check() makes one line that names the collective.
  check(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN), "error handler");
  MpiPlace place;
  check(MPI_Comm_rank(MPI_COMM_WORLD, &place.rank), "rank");
  check(MPI_Comm_size(MPI_COMM_WORLD, &place.size), "size");
  MPI_Comm host = MPI_COMM_NULL;
  check(MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, place.rank, MPI_INFO_NULL, &host), "host");
  check(MPI_Comm_rank(host, &place.local_rank), "rank");
  check(MPI_Comm_size(host, &place.local_size), "size");
  place.host_leader = place.rank;
  check(MPI_Bcast(&place.host_leader, 1, MPI_INT, 0, host), "host");
  check(MPI_Comm_free(&host), "host");
  place.library = mpi_library();
  return place;
}

void finish_mpi() { check(MPI_Finalize(), "MPI_Finalize"); }

std::unique_ptr<Communicator> make_mpi_communicator(CollectiveCounter& counter) {
  return std::make_unique<MpiCommunicator>(counter);
}

}  // namespace parka
