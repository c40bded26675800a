#include "comm/communicator.h"

#include "kernels/device/device.h"
#include "kernels/ops/elementwise/add.h"

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

  uint64_t last_queued() const override { return last_queued_; }
  void wait(Device&, uint64_t) override {}

  std::vector<std::string> gather_text(const std::string& text) override { return {text}; }
  double max(double value) override { return value; }
  void barrier() override {}

 private:
  uint64_t last_queued_ = 0;
};

}  // namespace

void Communicator::divide(int group_size, int context_size) {
  PARKA_REQUIRE(group_size_ == 0 && group_size >= 1 && size() % group_size == 0 && last_queued() == 0);
  PARKA_REQUIRE(context_size >= 1 && size() % context_size == 0);
  group_size_ = group_size;
  context_size_ = context_size;
  divided();
}

int Communicator::size_of(Peers peers) const {
  switch (peers) {
    case Peers::kAll: return size();
    case Peers::kGroup: return group_size();
    case Peers::kAcross: return size() / group_size();
    case Peers::kContext: return context_size_;
  }
  throw_internal("unknown peers {}", static_cast<int>(peers));
}

int Communicator::place_in(Peers peers) const {
  switch (peers) {
    case Peers::kAll: return rank();
    case Peers::kGroup: return rank() % group_size();
    case Peers::kAcross: return rank() / group_size();
    case Peers::kContext: return rank() % context_size_;
  }
  throw_internal("unknown peers {}", static_cast<int>(peers));
}

int Communicator::rank_at(Peers peers, int place) const {
  switch (peers) {
    case Peers::kAll: return place;
    case Peers::kGroup: return rank() / group_size() * group_size() + place;
    case Peers::kAcross: return place * group_size() + rank() % group_size();
    case Peers::kContext: return rank() / context_size_ * context_size_ + place;
  }
  throw_internal("unknown peers {}", static_cast<int>(peers));
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

}  // namespace parka
