#include "comm/communicator.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "comm/collective_counter.h"
#include "comm/transport.h"
#include "core/parallel.h"
#include "kernels/device/device.h"
#include "kernels/ops/elementwise/pointwise.h"

namespace parka {
namespace {

class SingleCommunicator final : public Communicator {
 public:
  int rank() const override { return 0; }
  int size() const override { return 1; }
  std::string description() const override { return "1 rank"; }

  void all_reduce(Device&, const TensorView& x, Reduction, Peers) override {
    check_reducible(x);
    ++last_queued_;
  }
  void reduce_scatter(Device& device, const TensorView& in, const TensorView& out, Peers,
                      Accumulation accumulation) override {
    check_reducible(in);
    check_scattered(in, out, 1);
    reduce_alone(device, in, out, accumulation);
    ++last_queued_;
  }
  void all_gather(Device& device, const TensorView& in, const TensorView& out, Peers) override {
    check_scattered(out, in, 1);
    reduce_alone(device, in, out, Accumulation::kBegin);
    ++last_queued_;
  }
  void all_gather_columns(Device& device, const TensorView& in, const TensorView& out, Peers peers) override {
    check_side_by_side(out, in, 1);
    all_gather(device, in, out, peers);
  }
  void all_to_all(Device& device, const TensorView& in, const TensorView& out, Peers) override {
    check_exchanged(in, out, 1);
    device.copy(out.data, in.data, in.bytes());
    ++last_queued_;
  }

  void wait(Device&, uint64_t) override {}

  std::vector<std::string> gather_text(const std::string& text) override { return {text}; }
};

}  // namespace

void Communicator::divide(const Mesh& mesh) {
  PARKA_REQUIRE(!mesh_ && last_queued() == 0);
  PARKA_REQUIRE(mesh.rank() == rank() && mesh.size(Peers::kAll) == size());
  mesh_ = mesh;
  divided();
}

double Communicator::max(double value) {
  const std::string bytes(reinterpret_cast<const char*>(&value), sizeof(value));
  for (const std::string& other : gather_text(bytes)) {
    double its = 0;
    std::memcpy(&its, other.data(), sizeof(its));
    value = std::max(value, its);
  }
  return value;
}

void* Communicator::allocate(Device& device, int64_t bytes) { return device.allocate(bytes); }

void Communicator::release(Device& device, void* memory) { device.release(memory); }

std::unique_ptr<Communicator> make_single_communicator() { return std::make_unique<SingleCommunicator>(); }

void check_reducible(const TensorView& x) {
  if (x.dtype == DType::kF32 || x.dtype == DType::kBF16) return;
  throw_internal("{} cannot be reduced over ranks: only fp32 and bf16 can", describe(x));
}

void reduce_alone(Device& device, const TensorView& in, const TensorView& out, Accumulation accumulation) {
  if (accumulation == Accumulation::kContinue) {
    add(device, {.x = in, .total = out});
  } else if (in.data != out.data) {
    device.copy(out.data, in.data, in.bytes());
  }
}

void check_scattered(const TensorView& whole, const TensorView& part, int size) {
  if (whole.dtype == part.dtype && whole.numel() == part.numel() * size) return;
  throw_internal("{} is not {} times {}", describe(whole), size, describe(part));
}

void check_side_by_side(const TensorView& whole, const TensorView& part, int size) {
  check_scattered(whole, part, size);
  if (whole.rank == 2 && part.rank == 2 && whole.dim[0] == part.dim[0]) return;
  throw_internal("{} is not {} side by side", describe(whole), describe(part));
}

void check_exchanged(const TensorView& in, const TensorView& out, int size) {
  const bool are_blocks = in.rank == 3 && in.dim[1] == size;
  if (are_blocks && in.dtype == out.dtype && in.rank == out.rank && in.dim == out.dim) return;
  throw_internal("{} and {} are not rows of {} blocks each", describe(in), describe(out), size);
}

namespace {

constexpr int64_t kChunkBytes = int64_t{16} << 20;  // of scratch memory, and the longest message

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
class HostCommunicator final : public Communicator {
 public:
  HostCommunicator(Transport& transport, CollectiveCounter& counter) : transport_(transport), counter_(counter) {}

  int rank() const override { return transport_.rank(); }
  int size() const override { return transport_.size(); }
  std::string description() const override { return fmt::format("{} ranks over TCP", size()); }

  void all_reduce(Device& device, const TensorView& x, Reduction reduction, Peers peers) override;
  void reduce_scatter(Device& device, const TensorView& in, const TensorView& out, Peers peers,
                      Accumulation accumulation) override;
  void all_gather(Device& device, const TensorView& in, const TensorView& out, Peers peers) override;
  void all_gather_columns(Device& device, const TensorView& in, const TensorView& out, Peers peers) override;
  void all_to_all(Device& device, const TensorView& in, const TensorView& out, Peers peers) override;
  void wait(Device&, uint64_t) override {}

  std::vector<std::string> gather_text(const std::string& text) override {
    const CollectiveCounter::Span span(counter_);
    return transport_.gather_text(text);
  }

 private:
  // Elements [begin, begin + count) of a tensor, the part that one rank reduces.
  struct Chunk {
    int64_t begin, count;
  };

  // The ranks of a collective.
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

  Transport& transport_;
  CollectiveCounter& counter_;
  std::vector<std::byte> scratch_;
};

template <typename ChunkOf>
void HostCommunicator::exchange_and_reduce(const Group& group, Reduction reduction, const TensorView& x,
                                           const ChunkOf& chunk_of, void* out, Accumulation accumulation) {
  auto* base = static_cast<std::byte*>(x.data);
  const Chunk own = chunk_of(group.place);
  const int64_t element = parka::size_of(x.dtype), own_bytes = own.count * element;
  const auto needed = static_cast<size_t>(own_bytes * group.size);
  if (scratch_.size() < needed) scratch_.resize(needed);
  for_each_other(group, [&](int place, int rank) {
    transport_.receive(scratch_.data() + place * own_bytes, own_bytes, rank);
  });
  for_each_other(group, [&](int place, int rank) {
    const Chunk chunk = chunk_of(place);
    transport_.send(base + chunk.begin * element, chunk.count * element, rank);
  });
  std::vector<const void*> parts(static_cast<size_t>(group.size));
  for (int place = 0; place < group.size; ++place) parts[place] = scratch_.data() + place * own_bytes;
  parts[group.place] = base + own.begin * element;
  if (accumulation == Accumulation::kContinue) parts.insert(parts.begin(), out);
  transport_.wait();
  reduce_in_order(reduction, x.dtype, parts, out, own.count);
}

void HostCommunicator::all_reduce(Device& device, const TensorView& x, Reduction reduction, Peers peers) {
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
      transport_.receive(base + chunk_of(place).begin * element, chunk_of(place).count * element, rank);
    });
    for_each_other(group,
                   [&](int, int rank) { transport_.send(base + own.begin * element, own.count * element, rank); });
    transport_.wait();
  }
}

void HostCommunicator::reduce_scatter(Device& device, const TensorView& in, const TensorView& out, Peers peers,
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

void HostCommunicator::all_gather(Device& device, const TensorView& in, const TensorView& out, Peers peers) {
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
    for_each_other(group,
                   [&](int place, int rank) { transport_.receive(target + place * bytes + begin, count, rank); });
    for_each_other(group, [&](int, int rank) { transport_.send(source + begin, count, rank); });
    transport_.wait();
  }
}

void HostCommunicator::all_gather_columns(Device& device, const TensorView& in, const TensorView& out,
                                          Peers peers) {
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
    for_each_other(group,
                   [&](int place, int rank) { transport_.receive(scratch_.data() + place * bytes, bytes, rank); });
    for_each_other(group, [&](int, int rank) { transport_.send(source + begin * row_bytes, bytes, rank); });
    transport_.wait();
    put(group.place, source + begin * row_bytes);
    for_each_other(group, [&](int place, int) { put(place, scratch_.data() + place * bytes); });
  }
}

void HostCommunicator::all_to_all(Device& device, const TensorView& in, const TensorView& out, Peers peers) {
  const Group group = begin_collective(device, peers);
  check_exchanged(in, out, group.size);
  const CollectiveCounter::Span span(counter_);
  const int64_t rows = in.dim[0], bytes = in.dim[2] * parka::size_of(in.dtype);
  const auto* source = static_cast<const std::byte*>(in.data);
  auto* target = static_cast<std::byte*>(out.data);
  const auto block_at = [&](int64_t row, int place) { return (row * group.size + place) * bytes; };
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t begin = 0; begin < bytes; begin += kChunkBytes) {
      const int64_t count = std::min(kChunkBytes, bytes - begin);
      for_each_other(group, [&](int place, int rank) {
        transport_.receive(target + block_at(row, place) + begin, count, rank);
      });
      for_each_other(
          group, [&](int place, int rank) { transport_.send(source + block_at(row, place) + begin, count, rank); });
      transport_.wait();
    }
    if (bytes == 0) continue;
    const int64_t own = block_at(row, group.place);
    std::memcpy(target + own, source + own, static_cast<size_t>(bytes));
  }
}

}  // namespace

std::unique_ptr<Communicator> make_host_communicator(Transport& transport, CollectiveCounter& counter) {
  return std::make_unique<HostCommunicator>(transport, counter);
}

}  // namespace parka
