#include "engine/planning/step_schedule.h"

#include <array>
#include <utility>

#include "core/shard.h"
#include "engine/training/parameter_exchange.h"
#include "engine/training/training_run.h"
#include "model/formats.h"
#include "model/parameter_table.h"
#include "model/weights.h"

namespace parka {
namespace {

using Kind = StepAction::Kind;

// Follows ParameterExchange call by call, and names its members alike.
class Schedule {
 public:
  Schedule(const Config& config, int64_t num_gpus, const ComputeSeconds& compute);

  void micro_batch(const ParameterExchange::Place& place);
  void update();
  std::vector<StepAction> take() { return std::move(actions_); }

 private:
  void compute(double seconds) { actions_.push_back({.kind = Kind::kCompute, .seconds = seconds}); }
  void collective(Kind kind, int64_t bytes, Peers peers) {
    actions_.push_back({.kind = kind, .bytes = bytes, .peers = peers});
    ++last_queued_;
  }
  void wait(uint64_t number) {
    if (number != 0) actions_.push_back({.kind = Kind::kWait, .number = number});
  }

  bool is_gathered_on_use(int unit) const {
    return zero_.shards_weights() && unit > 0 && unit < table_.head_unit();
  }
  static bool is_linear(const ParameterInfo& p) { return p.role == ParameterRole::kLinear; }
  bool is_gathered_as_codes(const ParameterInfo& p) const {
    return is_gathered_on_use(p.unit) && is_linear(p) && formats_.has_tensor_scales();
  }
  int64_t gradient_bytes(int64_t numel) const { return numel * size_of(config_.optimizer.gradient); }
  // Read in the compute format, written as codes, which may be transposed, too.
  double quantize_seconds(int64_t elements, bool transposed = false) const {
    const int64_t bytes = elements * (size_of(formats_.compute.dtype) + (transposed ? 2 : 1));
    return static_cast<double>(bytes) / (kQuantizeOfCopy * compute_.copy_bandwidth);
  }
  std::vector<int> opened_by(int unit) const;

  void before_forward(int unit);
  void before_backward(int unit);
  void after_backward(int unit);
  using Pass = ModelWeights::Pass;

  void gather_on_use(int unit, Pass pass);
  void prefetch(int unit, Pass pass);
  void gather(int unit);
  void quantize_gathered(int unit);
  void sum_pieces(const ParameterInfo& p);

  const Config& config_;
  const ComputeSeconds& compute_;
  ParameterTable table_;
  Formats formats_;
  Zero zero_;
  bool is_exchanged_, has_several_groups_;
  bool keeps_codes_, gathers_transposed_;  // of this rank's pieces, for the whole step
  std::vector<std::vector<int>> units_;
  std::vector<StepAction> actions_;

  ParameterExchange::Place place_;
  struct Gathered {
    int unit = -1;
    Pass pass = Pass::kForward;
    uint64_t number = 0;
    bool is_ready = false;
  };
  std::array<Gathered, kGatherBuffers> gathered_;
  std::array<uint64_t, kGradientBuffers> reduced_ = {};
  uint64_t last_queued_ = 0;
};

Schedule::Schedule(const Config& config, int64_t num_gpus, const ComputeSeconds& compute)
    : config_(config),
      compute_(compute),
      table_(make_parameter_table(config.model, config.optimizer.decay_embeddings)),
      formats_(config.precision),
      zero_(zero_of(config.distributed, 0, num_gpus)),
      is_exchanged_(num_gpus > 1),
      has_several_groups_(zero_.shards_states() && zero_.shard.size < num_gpus),
      keeps_codes_(zero_.shards_weights() && kept_copies(config.precision, zero_) != WeightCopies::kNone),
      gathers_transposed_(gathers_transposed(table_, formats_, kept_copies(config.precision, zero_),
                                             training_use(config.precision), zero_)) {
  for (int unit = 0; unit < table_.num_units(); ++unit) units_.push_back(table_.unit(unit));
}

std::vector<int> Schedule::opened_by(int unit) const {
  const bool tied = table_.ties_head();
  if (unit == 0) return tied ? std::vector<int>() : units_[0];
  std::vector<int> opened = units_[static_cast<size_t>(unit)];
  if (tied && unit == table_.head_unit()) opened.push_back(table_.embedding);
  return opened;
}

void Schedule::gather(int unit) {
  if (zero_.shard.size == 1) return;
  for (int index : units_[static_cast<size_t>(unit)]) {  // ModelWeights::before_gather()
    const ParameterInfo& p = table_.all[static_cast<size_t>(index)];
    if (is_gathered_as_codes(p) && !keeps_codes_) compute(quantize_seconds(zero_.shard.piece(p.numel())));
  }
  for (int index : units_[static_cast<size_t>(unit)]) {
    const ParameterInfo& p = table_.all[static_cast<size_t>(index)];
    const DType dtype = is_gathered_as_codes(p) ? formats_.weight.dtype : formats_.compute.dtype;
    collective(Kind::kAllGather, zero_.shard.padded(p.numel()) * size_of(dtype), Peers::kGroup);
  }
}

void Schedule::prefetch(int unit, Pass pass) {
  if (unit < 0 || unit >= table_.num_units() || !is_gathered_on_use(unit)) return;
  Gathered& buffer = gathered_[gather_buffer_of(unit)];
  if (buffer.unit == unit && (buffer.pass == pass || !gathers_transposed_)) return;
  gather(unit);
  buffer = {unit, pass, last_queued_, false};
}

void Schedule::gather_on_use(int unit, Pass pass) {
  if (!is_gathered_on_use(unit)) return;
  prefetch(unit, pass);
  Gathered& buffer = gathered_[gather_buffer_of(unit)];
  if (buffer.is_ready) return;
  wait(buffer.number);
  quantize_gathered(unit);
  buffer.is_ready = true;
}

// ModelWeights::gathered(): what was gathered in the compute format is read, and FP8 codes are written.
void Schedule::quantize_gathered(int unit) {
  if (!formats_.fp8_gemm || formats_.has_tensor_scales()) return;
  int64_t elements = 0;
  for (int index : units_[static_cast<size_t>(unit)]) {
    const ParameterInfo& p = table_.all[static_cast<size_t>(index)];
    if (is_linear(p)) elements += p.numel();
  }
  compute(quantize_seconds(elements));
}

// What GPUs of a node do after they have exchanged pieces: all ranks' and what was accumulated are read, and the
// sum is written. It runs beside other work, which is taken to leave no multiprocessor idle for it.
void Schedule::sum_pieces(const ParameterInfo& p) {
  const int64_t piece = zero_.shard.piece(p.numel());
  const int64_t bytes = gradient_bytes(zero_.shard.padded(p.numel()) + (place_.is_first ? 1 : 2) * piece);
  compute(static_cast<double>(bytes) / compute_.copy_bandwidth);
}

void Schedule::before_forward(int unit) {
  if (!is_exchanged_) return;
  gather_on_use(unit, Pass::kForward);
  prefetch(unit + 1, Pass::kForward);
}

void Schedule::before_backward(int unit) {
  if (!is_exchanged_) return;
  gather_on_use(unit, Pass::kBackward);
  if (unit == table_.head_unit()) {
    for (int last : {unit - 1, unit - 2}) prefetch(last, Pass::kBackward);
  }
  if (!zero_.shards_gradients()) return;
  uint64_t last_read = 0;
  for (int index : opened_by(unit)) {
    last_read = std::max(last_read, reduced_[gradient_buffer_of(table_.all[static_cast<size_t>(index)])]);
  }
  wait(last_read);  // Optimizer::open_gradient() clears padding, which is next to nothing
}

void Schedule::after_backward(int unit) {
  if (!is_exchanged_) return;
  if (unit > 2) {
    prefetch(unit - 2, Pass::kBackward);
  } else if (!place_.is_last) {
    prefetch(unit, Pass::kForward);
  }
  if (!place_.is_last && !zero_.shards_gradients()) return;
  for (int index : units_[static_cast<size_t>(unit)]) {
    const ParameterInfo& p = table_.all[static_cast<size_t>(index)];
    if (!zero_.shards_states()) {
      collective(Kind::kAllReduce, gradient_bytes(p.numel()), Peers::kAll);
      continue;
    }
    if (zero_.shards_gradients()) sum_pieces(p);
    collective(Kind::kReduceScatter, gradient_bytes(zero_.shard.padded(p.numel())), Peers::kGroup);
    if (zero_.shards_gradients()) reduced_[gradient_buffer_of(p)] = last_queued_;
    if (place_.is_last && has_several_groups_) {
      collective(Kind::kAllReduce, gradient_bytes(zero_.shard.piece(p.numel())), Peers::kAcross);
    }
  }
  if (unit == 0 && place_.is_last) wait(last_queued_);
}

void Schedule::micro_batch(const ParameterExchange::Place& place) {
  place_ = place;
  const int head = table_.head_unit();
  before_forward(0);
  compute(compute_.embedding_forward);
  for (int unit = 1; unit < head; ++unit) {
    before_forward(unit);
    compute(compute_.block_forward);
  }
  before_forward(head);
  before_backward(head);
  compute(compute_.head);
  after_backward(head);
  for (int unit = head - 1; unit > 0; --unit) {
    before_backward(unit);
    compute(compute_.block_backward);
    after_backward(unit);
  }
  before_backward(0);
  // Norms' gradients, next to nothing, are cleared in their own units.
  if (place_.is_first || zero_.shards_gradients()) compute(compute_.clear_gradients);
  compute(compute_.embedding_backward);
  after_backward(0);
}

// Optimizer::step() and what follows a change of the weights.
void Schedule::update() {
  compute(compute_.gradient_norm);
  const auto num_parameters = static_cast<int64_t>(table_.all.size());
  const auto sum = [&](int64_t numbers, Peers peers) {
    collective(Kind::kAllReduce, numbers * size_of(DType::kF32), peers);
    wait(last_queued_);
  };
  if (zero_.shards_states()) sum(num_parameters + 1, Peers::kGroup);
  if (has_several_groups_) sum(num_parameters + 1, Peers::kAcross);
  if (is_exchanged_) sum(1, Peers::kAll);
  compute(compute_.update);
  if (is_exchanged_) {
    for (int unit = 0; unit < table_.num_units(); ++unit) {
      if (!is_gathered_on_use(unit)) gather(unit);
    }
    if (zero_.shards_states() && formats_.has_tensor_scales()) {  // the weights' maxima
      collective(Kind::kAllReduce, num_parameters * size_of(DType::kF32), Peers::kGroup);
    }
    wait(last_queued_);
  }
  compute(compute_.quantize_weights);
  if (keeps_codes_) {
    for (const ParameterInfo& p : table_.all) {
      if (is_gathered_as_codes(p)) compute(quantize_seconds(zero_.shard.piece(p.numel()), gathers_transposed_));
    }
  }
}

}  // namespace

std::vector<StepAction> schedule_step(const Config& config, int64_t num_gpus, const ComputeSeconds& compute) {
  const int64_t per_micro_batch = num_gpus * config.training.micro_batch_size;
  PARKA_REQUIRE(config.training.global_batch_size % per_micro_batch == 0);
  const int64_t num_micro_batches = config.training.global_batch_size / per_micro_batch;
  Schedule schedule(config, num_gpus, compute);
  for (int64_t i = 0; i < num_micro_batches; ++i) schedule.micro_batch({i == 0, i + 1 == num_micro_batches});
  schedule.update();
  return schedule.take();
}

}  // namespace parka
