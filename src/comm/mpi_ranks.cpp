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

constexpr int64_t kPieceBytes = int64_t{16} << 20;  // of scratch, and the longest message
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
  void reduce_scatter(Device& device, const TensorView& in, const TensorView& out, Peers peers, Onto onto) override;
  void all_gather(Device& device, const TensorView& in, const TensorView& out, Peers peers) override;
  void all_gather_columns(Device& device, const TensorView& in, const TensorView& out, Peers peers) override;
  uint64_t last_queued() const override { return last_queued_; }
  void wait(Device&, uint64_t) override {}

  std::vector<std::string> gather_text(const std::string& text) override;
  double max(double value) override;
  void barrier() override;

 private:
  // Elements [begin, begin + count) of a tensor, the part that one rank reduces.
  struct Piece {
    int64_t begin, count;
  };

  // Those who take part in a collective. Its messages are between ranks of the world, so that no group needs an
  // MPI communicator of its own.
  struct Circle {
    Peers peers;
    int size, place;
  };

  Circle begin_collective(const Device& device, Peers peers) {
    PARKA_REQUIRE(device.kind() == DeviceKind::kCpu);
    ++last_queued_;
    return {peers, size_of(peers), place_in(peers)};
  }
  // Elements of a piece when `size` pieces fit into the scratch memory.
  static int64_t longest_piece(DType dtype, int size) {
    return std::max<int64_t>(1, kPieceBytes / parka::size_of(dtype) / size);
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
  // Calls visit(place, rank) for the others, each rank in another order, so that they do not all talk to one at a
  // time.
  template <typename Visit>
  void for_each_other(const Circle& circle, const Visit& visit) const {
    for (int i = 1; i < circle.size; ++i) {
      const int place = (circle.place + i) % circle.size;
      visit(place, rank_at(circle.peers, place));
    }
  }

  // Sends every peer its piece of x and reduces what they send of this rank's piece into `out`, which may be that
  // piece in x, onto nothing or what `out` held. `piece_of(place)` is the same on all of them, and pieces do not
  // overlap.
  template <typename PieceOf>
  void exchange_and_reduce(const Circle& circle, Reduction reduction, const TensorView& x, const PieceOf& piece_of,
                           void* out, Onto onto);

  CollectiveCounter& counter_;
  int rank_ = 0, size_ = 1;
  uint64_t last_queued_ = 0;
  std::vector<std::byte> scratch_;
  std::vector<MPI_Request> requests_;
};

template <typename PieceOf>
void MpiCommunicator::exchange_and_reduce(const Circle& circle, Reduction reduction, const TensorView& x,
                                          const PieceOf& piece_of, void* out, Onto onto) {
  auto* base = static_cast<std::byte*>(x.data);
  const Piece own = piece_of(circle.place);
  const int64_t element = parka::size_of(x.dtype), own_bytes = own.count * element;
  const auto needed = static_cast<size_t>(own_bytes * circle.size);
  if (scratch_.size() < needed) scratch_.resize(needed);
  for_each_other(circle,
                 [&](int place, int rank) { receive(scratch_.data() + place * own_bytes, own_bytes, rank); });
  for_each_other(circle, [&](int place, int rank) {
    const Piece piece = piece_of(place);
    send(base + piece.begin * element, piece.count * element, rank);
  });
  std::vector<const void*> parts(static_cast<size_t>(circle.size));
  for (int place = 0; place < circle.size; ++place) parts[place] = scratch_.data() + place * own_bytes;
  parts[circle.place] = base + own.begin * element;
  if (onto == Onto::kOldValue) parts.insert(parts.begin(), out);
  wait_for_messages();
  reduce_in_order(reduction, x.dtype, parts, out, own.count);
}

void MpiCommunicator::all_reduce(Device& device, const TensorView& x, Reduction reduction, Peers peers) {
  check_reducible(x);
  const Circle circle = begin_collective(device, peers);
  const CollectiveCounter::Span span(counter_);
  auto* base = static_cast<std::byte*>(x.data);
  const int64_t n = x.numel(), element = parka::size_of(x.dtype),
                block = longest_piece(x.dtype, circle.size) * circle.size;
  for (int64_t begin = 0; begin < n; begin += block) {
    const int64_t count = std::min(block, n - begin), piece = ceil_div(count, circle.size);
    const auto piece_of = [&](int place) {
      const int64_t first = std::min(piece * place, count);
      return Piece{begin + first, std::min(piece, count - first)};
    };
    const Piece own = piece_of(circle.place);
    exchange_and_reduce(circle, reduction, x, piece_of, base + own.begin * element, Onto::kNothing);
    for_each_other(circle, [&](int place, int rank) {
      receive(base + piece_of(place).begin * element, piece_of(place).count * element, rank);
    });
    for_each_other(circle, [&](int, int rank) { send(base + own.begin * element, own.count * element, rank); });
    wait_for_messages();
  }
}

void MpiCommunicator::reduce_scatter(Device& device, const TensorView& in, const TensorView& out, Peers peers,
                                     Onto onto) {
  check_reducible(in);
  const Circle circle = begin_collective(device, peers);
  check_scattered(in, out, circle.size);
  const CollectiveCounter::Span span(counter_);
  const int64_t n = out.numel(), piece = longest_piece(in.dtype, circle.size);
  for (int64_t begin = 0; begin < n; begin += piece) {
    exchange_and_reduce(
        circle, Reduction::kSum, in,
        [&](int place) {
          return Piece{place * n + begin, std::min(piece, n - begin)};
        },
        static_cast<std::byte*>(out.data) + begin * parka::size_of(out.dtype), onto);
  }
}

void MpiCommunicator::all_gather(Device& device, const TensorView& in, const TensorView& out, Peers peers) {
  const Circle circle = begin_collective(device, peers);
  check_scattered(out, in, circle.size);
  const CollectiveCounter::Span span(counter_);
  const int64_t bytes = in.bytes();
  const auto* source = static_cast<const std::byte*>(in.data);
  auto* target = static_cast<std::byte*>(out.data);
  if (bytes > 0 && target + circle.place * bytes != source) {
    std::memcpy(target + circle.place * bytes, source, static_cast<size_t>(bytes));
  }
  for (int64_t begin = 0; begin < bytes; begin += kPieceBytes) {
    const int64_t count = std::min(kPieceBytes, bytes - begin);
    for_each_other(circle, [&](int place, int rank) { receive(target + place * bytes + begin, count, rank); });
    for_each_other(circle, [&](int, int rank) { send(source + begin, count, rank); });
    wait_for_messages();
  }
}

void MpiCommunicator::all_gather_columns(Device& device, const TensorView& in, const TensorView& out, Peers peers) {
  const Circle circle = begin_collective(device, peers);
  check_side_by_side(out, in, circle.size);
  const CollectiveCounter::Span span(counter_);
  const int64_t num_rows = in.dim[0], row_bytes = in.dim[1] * parka::size_of(in.dtype);
  if (in.numel() == 0) return;
  const int64_t most_rows = std::clamp<int64_t>(kPieceBytes / row_bytes / circle.size, 1, num_rows);
  const auto needed = static_cast<size_t>(most_rows * row_bytes * circle.size);
  if (scratch_.size() < needed) scratch_.resize(needed);
  const auto* source = static_cast<const std::byte*>(in.data);
  auto* target = static_cast<std::byte*>(out.data);
  for (int64_t begin = 0; begin < num_rows; begin += most_rows) {
    const int64_t rows = std::min(most_rows, num_rows - begin), bytes = rows * row_bytes;
    const auto put = [&](int place, const std::byte* piece) {
      for (int64_t r = 0; r < rows; ++r) {
        std::memcpy(target + ((begin + r) * circle.size + place) * row_bytes, piece + r * row_bytes,
                    static_cast<size_t>(row_bytes));
      }
    };
    for_each_other(circle, [&](int place, int rank) { receive(scratch_.data() + place * bytes, bytes, rank); });
    for_each_other(circle, [&](int, int rank) { send(source + begin * row_bytes, bytes, rank); });
    wait_for_messages();
    put(circle.place, source + begin * row_bytes);
    for_each_other(circle, [&](int place, int) { put(place, scratch_.data() + place * bytes); });
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

MpiPlace start_mpi() {
  int provided = 0;
  check(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &provided), "MPI_Init");
  // Errors come back as codes, which become one line that names the collective.
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
  std::array<char, MPI_MAX_LIBRARY_VERSION_STRING> version{};
  int length = 0;
  check(MPI_Get_library_version(version.data(), &length), "version");
  place.library = std::string(version.data(), length);
  place.library.resize(std::min(place.library.size(), place.library.find_first_of(",\n")));
  return place;
}

void finish_mpi() { check(MPI_Finalize(), "MPI_Finalize"); }

std::unique_ptr<Communicator> make_mpi_communicator(CollectiveCounter& counter) {
  return std::make_unique<MpiCommunicator>(counter);
}

}  // namespace parka
