// What tests/comm/ranks.py starts, in one of these ways, with --ranks=N where it shall start its ranks itself:
//   ranks_program collectives [cuda]    checks every collective; 77 where there are fewer GPUs than ranks
//   ranks_program alone                 joins the others and ends; with stopped=RANK that rank stops itself before
//   ranks_program silent                joins the others by MPI_Init, and says no more
//   ranks_program chatter               logs long lines on all ranks at once
//   ranks_program drill KEY=VALUE...    takes steps with collectives until something goes wrong
#include <array>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <limits>
#include <map>
#include <string>
#include <thread>

#include <pthread.h>
#include <unistd.h>

#include "comm/launch/launch.h"
#include "comm/transport.h"
#include "core/heartbeat.h"
#include "core/log/log.h"
#include "core/parallel.h"
#include "core/philox.h"
#include "tests/support/tensors.h"

using namespace parka;
using test::TestTensor;

namespace {

int num_failed = 0;

void expect(bool holds, const std::string& what) {
  if (holds) return;
  ++num_failed;
  std::fprintf(stderr, "FAILED: %s\n", what.c_str());
}

// ---- Collectives ----

// The results on CPUs are known to the bit. NCCL may add in any order, and rounds bf16 at every hop.
struct Checker {
  Communicator& ranks;
  Device& device;

  bool exact() const { return device.kind() == DeviceKind::kCpu; }
  std::string label(const char* op, DType dtype, int64_t n) const {
    return fmt::format("{} {} [{}] on rank {} of {}", op, name_of(dtype), n, ranks.rank(), ranks.size());
  }
  void agree(const TestTensor& got, const std::vector<float>& want, const std::string& what) const {
    const std::vector<float> values = got.host();
    const float slack = got.view().dtype == DType::kBF16 ? 0x1p-6f : 0x1p-20f;
    size_t wrong = 0;
    for (size_t i = 0; i < want.size(); ++i) {
      const float bound = slack * (std::fabs(want[i]) + static_cast<float>(ranks.size()));
      wrong += exact() ? std::memcmp(&values[i], &want[i], sizeof(float)) != 0
                       : !(std::fabs(values[i] - want[i]) <= bound);
    }
    expect(wrong == 0, fmt::format("{}: {} of {} elements differ", what, wrong, want.size()));
    expect(got.guard_intact(), what + ": wrote outside");
  }
};

// Numbers between -8 and 8 of many magnitudes, so that another order of summation gives other bits.
std::vector<float> input_of(DType dtype, int rank, int64_t count) {
  std::vector<float> values(static_cast<size_t>(count));
  uint64_t state = 0x9e3779b97f4a7c15u * static_cast<uint64_t>(rank + 1);
  for (float& v : values) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    const auto mantissa = static_cast<float>(static_cast<int32_t>(state >> 32)) * 0x1p-31f;
    v = mantissa * static_cast<float>(1u << (state >> 40 & 7)) * 0.0625f;
    if (dtype == DType::kBF16) v = decode_bf16(encode_bf16(v));
  }
  return values;
}

std::vector<float> rounded(DType dtype, std::vector<float> values) {
  if (dtype == DType::kBF16) {
    for (float& v : values) v = decode_bf16(encode_bf16(v));
  }
  return values;
}

// Element i of the sum over ranks in their order, rounded once.
std::vector<float> reduced(DType dtype, Reduction reduction, int size, int64_t count) {
  std::vector<float> result = input_of(dtype, 0, count);
  for (int r = 1; r < size; ++r) {
    const std::vector<float> other = input_of(dtype, r, count);
    for (size_t i = 0; i < result.size(); ++i) {
      result[i] = reduction == Reduction::kSum ? result[i] + other[i] : std::max(result[i], other[i]);
    }
  }
  return rounded(dtype, std::move(result));
}

std::vector<float> part_of(const std::vector<float>& values, int rank, int64_t n) {
  return {values.begin() + rank * n, values.begin() + (rank + 1) * n};
}

void check_all_reduce(const Checker& c, DType dtype, Reduction reduction, int64_t n) {
  const std::string what = c.label(reduction == Reduction::kSum ? "all_reduce" : "all_reduce max", dtype, n);
  const std::vector<float> input = input_of(dtype, c.ranks.rank(), n);
  const std::vector<float> want = reduced(dtype, reduction, c.ranks.size(), n);
  std::vector<std::byte> first;
  for (int repeat = 0; repeat < 2; ++repeat) {
    const TestTensor x(c.device, dtype, {n}, input);
    c.ranks.all_reduce(c.device, x, reduction, Peers::kAll);
    c.ranks.wait(c.device, c.ranks.last_queued());
    c.agree(x, want, what);
    const std::vector<std::byte> bytes = x.bytes();
    expect(repeat == 0 || bytes == first, what + ": not the same bits again");
    first = bytes;
  }
  // The same bits on all ranks.
  const std::string text(reinterpret_cast<const char*>(first.data()), std::min<size_t>(first.size(), 4096));
  for (const std::string& other : c.ranks.gather_text(text))
    expect(other == text, what + ": differs between ranks");
}

void check_reduce_scatter(const Checker& c, DType dtype, int64_t n) {
  const int rank = c.ranks.rank(), size = c.ranks.size();
  const std::string what = c.label("reduce_scatter", dtype, n);
  const std::vector<float> want = part_of(reduced(dtype, Reduction::kSum, size, size * n), rank, n);
  const std::vector<float> input = input_of(dtype, rank, size * n);
  const TestTensor in(c.device, dtype, {size * n}, input), out(c.device, dtype, {n});
  c.ranks.reduce_scatter(c.device, in, out, Peers::kAll);
  c.ranks.wait(c.device, c.ranks.last_queued());
  c.agree(out, want, what);
  expect(in.host() == input, what + ": changed its input");

  const TensorView place = in.view().rows(rank * n, n);
  c.ranks.reduce_scatter(c.device, in, place, Peers::kAll);
  c.ranks.wait(c.device, c.ranks.last_queued());
  const std::vector<float> all = in.host();
  const TestTensor own(c.device, dtype, {n}, part_of(all, rank, n));
  c.agree(own, want, what + " in place");
}

void check_all_gather(const Checker& c, DType dtype, int64_t n) {
  const int rank = c.ranks.rank(), size = c.ranks.size();
  const std::string what = c.label("all_gather", dtype, n);
  const auto values_of = [&](int r) {
    if (dtype != DType::kU8) return input_of(dtype, r, n);
    std::vector<float> values(static_cast<size_t>(n));
    for (size_t i = 0; i < values.size(); ++i)
      values[i] = static_cast<float>((i * 7 + static_cast<size_t>(r)) % 251);
    return values;
  };
  std::vector<float> want;
  for (int r = 0; r < size; ++r) {
    const std::vector<float> more = values_of(r);
    want.insert(want.end(), more.begin(), more.end());
  }
  const auto check = [&](const TensorView& in, const TestTensor& out, const std::string& how) {
    c.ranks.all_gather(c.device, in, out, Peers::kAll);
    c.ranks.wait(c.device, c.ranks.last_queued());
    expect(out.host() == want, what + how);
    expect(out.guard_intact(), what + how + ": wrote outside");
  };
  const TestTensor in(c.device, dtype, {n}, values_of(rank)), out(c.device, dtype, {size * n});
  check(in, out, "");
  std::vector<float> only_own(static_cast<size_t>(size * n), 0.0f);
  std::copy(want.begin() + rank * n, want.begin() + (rank + 1) * n, only_own.begin() + rank * n);
  const TestTensor whole(c.device, dtype, {size * n}, only_own);
  check(whole.view().rows(rank * n, n), whole, " in place");
}

// Tensors in memory of allocate(), each of `bytes` of it.
class OwnMemory {
 public:
  OwnMemory(const Checker& c, int count, int64_t bytes) : c_(c), bytes_(ceil_div(bytes, int64_t{256}) * 256) {
    memory_ = static_cast<std::byte*>(c.ranks.allocate(c.device, count * bytes_));
  }
  ~OwnMemory() {
    c_.ranks.set_exchange_buffer({});
    c_.ranks.release(c_.device, memory_);
  }
  OwnMemory(const OwnMemory&) = delete;
  OwnMemory& operator=(const OwnMemory&) = delete;

  TensorView tensor(int place, DType dtype, std::initializer_list<int64_t> shape) const {
    return {memory_ + place * bytes_, dtype, shape};
  }

 private:
  const Checker& c_;
  int64_t bytes_;
  std::byte* memory_;
};

// Tensors where allocate() and set_exchange_buffer() put them, which GPUs exchange by copies: the same sums, onto
// what was there too.
void check_in_own_memory(const Checker& c, DType dtype, int64_t n) {
  const int rank = c.ranks.rank(), size = c.ranks.size();
  const std::string what = c.label("reduce_scatter in its own memory", dtype, n);
  const OwnMemory memory(c, 4, size * n * size_of(dtype));
  const TensorView in = memory.tensor(0, dtype, {size * n}), buffer = memory.tensor(1, dtype, {size * n});
  const TensorView out = memory.tensor(2, dtype, {n}), whole = memory.tensor(3, dtype, {size * n});
  const std::vector<float> mine = input_of(dtype, rank, size * n), old = input_of(dtype, rank + size, n);
  const TestTensor source(c.device, dtype, {size * n}, mine), before(c.device, dtype, {n}, old);
  const TensorView too_small = buffer.rows(0, std::max<int64_t>((size - 1) * n - 1, 0));
  for (const TensorView& given : {buffer, too_small}) {
    c.ranks.set_exchange_buffer(given);
    for (Accumulation accumulation : {Accumulation::kBegin, Accumulation::kContinue}) {
      std::vector<float> want(static_cast<size_t>(n), 0.0f);
      if (accumulation == Accumulation::kContinue) want = old;
      for (int r = 0; r < size; ++r) {
        const std::vector<float> piece = part_of(input_of(dtype, r, size * n), rank, n);
        for (size_t i = 0; i < want.size(); ++i) want[i] += piece[i];
      }
      c.device.copy(in.data, source.view().data, in.bytes());
      c.device.copy(out.data, before.view().data, out.bytes());
      c.ranks.reduce_scatter(c.device, in, out, Peers::kAll, accumulation);
      c.ranks.all_gather(c.device, out, whole, Peers::kAll);
      c.ranks.wait(c.device, c.ranks.last_queued());
      const TestTensor got(c.device, dtype, {n}), piece(c.device, dtype, {n});
      c.device.copy(got.view().data, out.data, out.bytes());
      c.device.copy(piece.view().data, whole.rows(rank * n, n).data, out.bytes());
      c.agree(got, rounded(dtype, std::move(want)), what);
      expect(piece.host() == got.host(), what + ", gathered");
    }
  }
}

// One exchange after another, which are waited for together: more than the buffer holds at once.
void check_many_in_own_memory(const Checker& c, DType dtype, int64_t n) {
  const int rank = c.ranks.rank(), size = c.ranks.size();
  constexpr int kMany = 9;
  const std::string what = c.label("reduce_scatter, many in turn,", dtype, n);
  const OwnMemory memory(c, 2 * kMany + 1, size * n * size_of(dtype));
  c.ranks.set_exchange_buffer(memory.tensor(2 * kMany, dtype, {size * n}));
  const auto count_of = [&](int i) { return n - i * (n / 12); };
  const auto input = [&](int i, int r) { return input_of(dtype, r * kMany + i, size * count_of(i)); };
  std::deque<TestTensor> sources;
  for (int i = 0; i < kMany; ++i) {
    const std::initializer_list<int64_t> shape = {size * count_of(i)};
    sources.emplace_back(c.device, dtype, shape, input(i, rank));
  }
  for (const Accumulation accumulation : {Accumulation::kBegin, Accumulation::kContinue}) {
    for (int i = 0; i < kMany; ++i) {
      const TensorView in = memory.tensor(i, dtype, {size * count_of(i)});
      c.device.copy(in.data, sources[static_cast<size_t>(i)].view().data, in.bytes());
      c.ranks.reduce_scatter(c.device, in, memory.tensor(kMany + i, dtype, {count_of(i)}), Peers::kAll,
                             accumulation);
    }
    c.ranks.wait(c.device, c.ranks.last_queued());
    // Whoever has waited may overwrite what was reduced.
    const TensorView all = memory.tensor(0, dtype, {size * n});
    const TensorView end = memory.tensor(kMany, dtype, {1});
    c.device.fill_zero(all.data, static_cast<std::byte*>(end.data) - static_cast<std::byte*>(all.data));
  }
  for (int i = 0; i < kMany; ++i) {
    std::vector<float> want(static_cast<size_t>(count_of(i)), 0.0f);
    for (int pass = 0; pass < 2; ++pass) {
      for (int r = 0; r < size; ++r) {
        const std::vector<float> piece = part_of(input(i, r), rank, count_of(i));
        for (size_t k = 0; k < want.size(); ++k) want[k] += piece[k];
      }
      want = rounded(dtype, std::move(want));
    }
    const TestTensor got(c.device, dtype, {count_of(i)});
    c.device.copy(got.view().data, memory.tensor(kMany + i, dtype, {count_of(i)}).data, got.view().bytes());
    c.agree(got, want, what + fmt::format(" number {}", i));
  }
}

// Columns of all ranks side by side: from anywhere to memory of allocate(), and to elsewhere, for which GPUs need a
// buffer.
void check_all_gather_columns(const Checker& c, DType dtype, int64_t rows, int64_t columns) {
  const int rank = c.ranks.rank(), size = c.ranks.size();
  const std::string what = c.label("all_gather_columns", dtype, rows * columns);
  std::vector<float> want(static_cast<size_t>(rows * columns * size));
  for (int r = 0; r < size; ++r) {
    const std::vector<float> values = input_of(dtype, r, rows * columns);
    for (int64_t i = 0; i < rows * columns; ++i) {
      want[static_cast<size_t>((i / columns * size + r) * columns + i % columns)] = values[static_cast<size_t>(i)];
    }
  }
  const OwnMemory memory(c, 2, rows * columns * size * size_of(dtype));
  c.ranks.set_exchange_buffer(memory.tensor(1, dtype, {rows * columns * size}));
  const TestTensor in(c.device, dtype, {rows, columns}, input_of(dtype, rank, rows * columns));
  const TensorView inside = memory.tensor(0, dtype, {rows, columns * size});
  const TestTensor copied(c.device, dtype, {rows, columns * size}),
      outside(c.device, dtype, {rows, columns * size});
  // Cleared and gathered again at once, which ranks come to at different times.
  for (int repeat = 0; repeat < 20; ++repeat) {
    c.device.fill_zero(inside.data, inside.bytes());
    c.ranks.all_gather_columns(c.device, in, inside, Peers::kAll);
    c.ranks.wait(c.device, c.ranks.last_queued());
  }
  c.device.copy(copied.view().data, inside.data, inside.bytes());
  c.ranks.all_gather_columns(c.device, in, outside, Peers::kAll);
  c.ranks.wait(c.device, c.ranks.last_queued());
  expect(copied.host() == want, what);
  expect(outside.host() == want, what + ", elsewhere");
  expect(outside.guard_intact(), what + ": wrote outside");
}

// Blocks of rows, to memory of allocate() and to elsewhere, between all ranks or those of a group.
void check_all_to_all(const Checker& c, DType dtype, int64_t rows, int64_t n, Peers peers = Peers::kAll) {
  const int rank = c.ranks.rank(), size = c.ranks.size_of(peers), own = c.ranks.place_in(peers);
  const int first = peers == Peers::kContext ? rank - own : 0;  // of the peers
  const std::string what = c.label("all_to_all", dtype, rows * n) + fmt::format(" among {}", size);
  std::vector<float> want(static_cast<size_t>(rows * size * n));
  for (int p = 0; p < size; ++p) {
    const std::vector<float> values = input_of(dtype, first + p, rows * size * n);
    for (int64_t row = 0; row < rows; ++row) {
      std::copy_n(values.begin() + (row * size + own) * n, n, want.begin() + (row * size + p) * n);
    }
  }
  const OwnMemory memory(c, 1, rows * size * n * size_of(dtype));
  const std::vector<float> input = input_of(dtype, rank, rows * size * n);
  const TestTensor in(c.device, dtype, {rows, size, n}, input), copied(c.device, dtype, {rows, size, n}),
      outside(c.device, dtype, {rows, size, n});
  const TensorView inside = memory.tensor(0, dtype, {rows, size, n});
  // Cleared and exchanged again at once, which ranks come to at different times.
  for (int repeat = 0; repeat < 5; ++repeat) {
    c.device.fill_zero(inside.data, inside.bytes());
    c.ranks.all_to_all(c.device, in, inside, peers);
    c.ranks.wait(c.device, c.ranks.last_queued());
  }
  c.device.copy(copied.view().data, inside.data, inside.bytes());
  c.ranks.all_to_all(c.device, in, outside, peers);
  c.ranks.wait(c.device, c.ranks.last_queued());
  expect(copied.host() == want, what);
  expect(outside.host() == want, what + ", elsewhere");
  expect(outside.guard_intact(), what + ": wrote outside");
  expect(in.host() == input, what + ": changed its input");
}

// Sizes of which some are not multiples of anything.
void check_exchanges(const Checker& c, Peers peers) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    check_all_to_all(c, dtype, 1, 1, peers);
    for (uint64_t i = 0; i < 6; ++i) {
      const auto draw = philox4x32(17, 1, i);
      check_all_to_all(c, dtype, 1 + draw[0] % 5, 1 + draw[1] % 20'000, peers);
    }
  }
}

// Groups of ranks that share sequences, beside groups of another size.
void check_context_groups(const Checker& c, int group_size, int context_size) {
  c.ranks.divide({c.ranks.rank(), c.ranks.size(), group_size, context_size});
  expect(c.ranks.size_of(Peers::kContext) == context_size, "the size of a context group");
  expect(c.ranks.place_in(Peers::kContext) == c.ranks.rank() % context_size, "the place in a context group");
  expect(c.ranks.size_of(Peers::kShard) == group_size, "the group beside it");
  check_exchanges(c, Peers::kContext);
}

// Collectives of the groups of a second communicator: of consecutive ranks, and across groups.
void check_groups(const Checker& c, int group_size) {
  const int rank = c.ranks.rank(), size = c.ranks.size();
  c.ranks.divide({rank, size, group_size, 1});
  const int group = rank / group_size, place = rank % group_size;
  expect(c.ranks.size_of(Peers::kShard) == group_size && c.ranks.place_in(Peers::kShard) == place, "the group");
  expect(c.ranks.size_of(Peers::kReplicate) == size / group_size && c.ranks.place_in(Peers::kReplicate) == group,
         "across");
  constexpr int64_t kCount = 1003;
  for (Peers peers : {Peers::kAll, Peers::kShard, Peers::kReplicate}) {
    const auto is_peer = [&](int other) {
      return peers == Peers::kAll ||
             (peers == Peers::kShard ? other / group_size == group : other % group_size == place);
    };
    const int count = c.ranks.size_of(peers), own = c.ranks.place_in(peers);
    const std::string what =
        fmt::format("of peers {} in groups of {} on rank {}", static_cast<int>(peers), group_size, rank);
    std::vector<float> sum(static_cast<size_t>(kCount * count), 0.0f), gathered;
    for (int other = 0; other < size; ++other) {
      if (!is_peer(other)) continue;
      const std::vector<float> values = input_of(DType::kF32, other, kCount * count);
      for (size_t i = 0; i < sum.size(); ++i) sum[i] = gathered.empty() ? values[i] : sum[i] + values[i];
      gathered.insert(gathered.end(), values.begin(), values.begin() + kCount);
    }
    const std::vector<float> input = input_of(DType::kF32, rank, kCount * count);
    const TestTensor x(c.device, DType::kF32, {kCount * count}, input);
    const TestTensor part(c.device, DType::kF32, {kCount}), whole(c.device, DType::kF32, {kCount * count});
    c.ranks.reduce_scatter(c.device, x, part, peers);
    c.ranks.all_gather(c.device, x.view().rows(0, kCount), whole, peers);
    c.ranks.all_reduce(c.device, x, Reduction::kSum, peers);
    c.ranks.wait(c.device, c.ranks.last_queued());
    c.agree(part, part_of(sum, own, kCount), "reduce_scatter " + what);
    expect(whole.host() == gathered, "all_gather " + what);
    c.agree(x, sum, "all_reduce " + what);
  }
}

void check_agreement(Communicator& ranks) {
  const int rank = ranks.rank(), size = ranks.size();
  const auto text_of = [](int r) { return std::string(static_cast<size_t>(r * 1000), static_cast<char>('a' + r)); };
  const std::vector<std::string> texts = ranks.gather_text(text_of(rank));
  expect(static_cast<int>(texts.size()) == size, "gather_text: one of every rank");
  for (int r = 0; r < size; ++r) expect(texts[r] == text_of(r), fmt::format("gather_text: of rank {}", r));
  expect(ranks.max(rank == 1 ? 7.5 : -rank) == 7.5, "max");
  expect(ranks.max(-1.0 - rank) == -1.0, "max of negative values");
  ranks.barrier();
}

int check_collectives(Launch& launch, bool on_gpu) {
  if (on_gpu && num_cuda_devices() < launch.size()) {
    if (launch.rank() == 0) std::printf("skipped: fewer GPUs than ranks\n");
    return 77;
  }
  const int ordinal = launch.agree_on_gpu(on_gpu);
  const std::unique_ptr<Device> device = on_gpu ? make_cuda_device(ordinal) : make_cpu_device();
  const std::unique_ptr<Communicator> ranks = launch.make_communicator(*device);
  if (launch.rank() == 0) std::printf("%s\n", ranks->description().c_str());
  set_num_threads(1);
  const Checker c{*ranks, *device};
  check_agreement(*ranks);
  for (DType dtype : {DType::kF32, DType::kBF16}) {
    for (int64_t n : {1, 3, 1000, 70'001}) {
      check_all_reduce(c, dtype, Reduction::kSum, n);
      check_all_reduce(c, dtype, Reduction::kMax, n);
      check_reduce_scatter(c, dtype, n);
      check_all_gather(c, dtype, n);
    }
  }
  // More than one round of messages of the longest length (16 MiB over all ranks).
  constexpr int64_t kRound = int64_t{16} << 20;
  check_all_reduce(c, DType::kF32, Reduction::kSum, kRound / 4 + 5);
  check_reduce_scatter(c, DType::kBF16, kRound / 2 / launch.size() + 9);
  if (launch.size() == 2) check_all_gather(c, DType::kU8, kRound + 3);
  for (DType dtype : {DType::kF32, DType::kBF16}) {
    for (int64_t n : {1, 1000, 70'001}) check_in_own_memory(c, dtype, n);
    for (int64_t n : {1, 1000, 70'001}) check_many_in_own_memory(c, dtype, n);
    check_all_gather_columns(c, dtype, 1, 1);
    check_all_gather_columns(c, dtype, 37, 48);
    check_all_gather_columns(c, dtype, 2001, 1031);
  }
  check_exchanges(c, Peers::kAll);
  if (launch.size() == 2) check_all_to_all(c, DType::kBF16, 1, kRound / 2 + 11);  // more than one message
  expect(ranks->last_queued() > 0, "collectives are numbered");
  for (int group_size = 1; group_size <= launch.size(); ++group_size) {
    if (launch.size() % group_size != 0) continue;
    const std::unique_ptr<Communicator> divided = launch.make_communicator(*device);
    check_groups({*divided, *device}, group_size);
    const std::unique_ptr<Communicator> shared = launch.make_communicator(*device);
    check_context_groups({*shared, *device}, launch.size() / group_size, group_size);
  }
  return num_failed == 0 ? 0 : 1;
}

// ---- Drills ----

using Options = std::map<std::string, std::string>;

double number_of(const Options& options, const std::string& key, double otherwise) {
  const auto found = options.find(key);
  return found == options.end() ? otherwise : std::stod(found->second);
}
// Whether KEY=RANK names this rank.
bool is_me(const Options& options, const std::string& key, int rank) { return number_of(options, key, -1) == rank; }

void sleep_for(double seconds) { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); }

std::string text_of(const Options& options, const std::string& key, const std::string& otherwise) {
  const auto found = options.find(key);
  return found == options.end() ? otherwise : found->second;
}

// Takes steps until something goes wrong, or `steps` of them. `throw`, `stall`, `exit` and `leave` name the rank
// that does so in step 3.
int drill(Launch& launch, const Options& options) {
  const int rank = launch.rank();
  launch.require_same("the config", text_of(options, fmt::format("config{}", rank), "{\n  \"lr\": 0.001\n}"),
                      "give all ranks the same");
  if (options.contains("all_throw")) throw_bad_input("nobody can read this");
  const std::unique_ptr<Device> device = make_cpu_device();
  const std::unique_ptr<Communicator> ranks = launch.make_communicator(*device);
  constexpr int64_t kCount = 1000;
  const TestTensor x(*device, DType::kF32, {kCount}, std::vector<float>(kCount, 0.0f));
  std::fprintf(stderr, "ready %d %d\n", rank, ::getpid());
  const auto steps = static_cast<int64_t>(number_of(options, "steps", 1e9));
  for (int64_t step = 1; step <= steps; ++step) {
    heartbeat("forward", step);
    sleep_for(0.01);
    if (step == 3 && is_me(options, "throw", rank)) throw_bad_input("tokens.npy: cannot be read");
    if (step == 3 && is_me(options, "stall", rank)) sleep_for(1e6);
    if (step == 3 && is_me(options, "exit", rank)) std::exit(9);
    heartbeat("all_reduce of x", step);
    ranks->all_reduce(*device, x, Reduction::kSum, Peers::kAll);
  }
  return 0;
}

// Lines of one letter each, which may not be mixed within a line.
int chatter(Launch& launch) {
  constexpr size_t kLength = 3000;
  launch.hosts().barrier();
  for (int i = 0; i < 200; ++i) log_warning("{}", std::string(kLength, static_cast<char>('a' + launch.rank())));
  return 0;
}

// Of the ranks that this process starts itself, in their order.
int stopped_rank = -1, num_started = 0;
void stop_if_chosen() {
  if (num_started == stopped_rank) std::raise(SIGSTOP);
}

int run(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "";
  Options options;
  for (int i = 2; i < argc; ++i) {
    const std::string word = argv[i];
    const size_t equals = word.find('=');
    options[word.substr(0, equals)] = equals == std::string::npos ? "" : word.substr(equals + 1);
  }
  LaunchOptions launch_options;
  const char* rank = std::getenv("OMPI_COMM_WORLD_RANK");
  if (rank == nullptr) rank = std::getenv("RANK");
  launch_options.local_ranks = static_cast<int>(number_of(options, "--ranks", 1));
  StartTimes& start = launch_options.start;
  start.rendezvous = number_of(options, "rendezvous_seconds", start.rendezvous);
  start.agreement = number_of(options, "agreement_seconds", start.agreement);
  start.notice = number_of(options, "notice_seconds", start.notice);
  launch_options.version = text_of(options, std::string("version") + (rank ? rank : ""), "1.0");
  WatchdogTimes& times = launch_options.watchdog;
  times.beat = number_of(options, "beat", times.beat);
  times.silence = number_of(options, "silence", times.silence);
  times.stall = number_of(options, "stall_seconds", times.stall);
  if (options.contains("stopped")) {
    if (rank != nullptr && options["stopped"] == rank) std::raise(SIGSTOP);
    stopped_rank = std::stoi(options["stopped"]);
    if (launch_options.local_ranks > 1)
      ::pthread_atfork(
          nullptr, [] { ++num_started; }, stop_if_chosen);
  }
  return run_launched(launch_options, [&](Launch& launch) {
    if (mode == "collectives") return check_collectives(launch, options.contains("cuda"));
    if (mode == "drill") return drill(launch, options);
    if (mode == "chatter") return chatter(launch);
    std::fprintf(stderr, "rank %d of %d\n", launch.rank(), launch.size());
    return 0;
  });
}

}  // namespace

int main(int argc, char** argv) {
  // As parka does in a run: the signal alone ends nothing.
  std::signal(SIGTERM, [](int) {});
  log_to_stderr(false);
  try {
    return run(argc, argv);
  } catch (const Error& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return static_cast<int>(error.code());
  }
}
