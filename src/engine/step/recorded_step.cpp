#include "engine/step/recorded_step.h"

#include <algorithm>
#include <map>
#include <utility>

#include "core/error.h"
#include "engine/step/bound_run.h"

namespace parka {
namespace {

using Work = RecordedStep::Work;

// A rank whose device and communicator record.
class RecordingRank {
 public:
  RecordingRank(const Config& config, const Zero& zero, const std::set<std::string>& one_kernel = {})
      : config_(config),
        device_(DeviceKind::kCuda,
                {.op = [this](RecordedOp op) { add(std::move(op)); },
                 .product = [this](const Gemm& a) { products_.push_back(a); },
                 .fill = [this](RecordedFill fill) { add(fill); },
                 .transfer = [this](RecordedTransfer transfer) { add(transfer); }},
                one_kernel),
        communicator_(zero.mesh.rank(), zero.mesh.size(Peers::kAll),
                      {.collective = [this](RecordedCollective collective) { add(collective); },
                       .wait = [this](RecordedWait wait) { add(wait); }}),
        declared_(config, DeviceKind::kCuda, zero, /*workspace_bytes=*/0),
        arena_(device_, declared_.plan),
        bound_(config_, zero, declared_, arena_, device_, communicator_) {
    take();
  }

  // The work that was queued since the last call.
  std::vector<Work> take() { return std::exchange(work_, {}); }
  std::vector<Gemm> take_products() { return std::exchange(products_, {}); }
  int64_t workspace_bytes() const { return device_.workspace_bytes(); }

  void begin_step() { bound_.begin_step(); }
  void micro_batch(const ParameterExchange::Place& place, bool with_telemetry = false) {
    if (releases_gradients()) bound_.release_update(/*update=*/1, config_.optimizer.lr);
    const BoundRun::MicroBatch how = bound_.begin_micro_batch(place, with_telemetry);
    declared_.model.accumulate_gradients(device_, batch(), bound_.loss_options(/*num_targets=*/1),
                                         declared_.optimizer.gradients(), how.accumulation, how.queueing);
  }
  // All micro-batches of a step that accumulates, if a run may have one.
  void micro_batches() {
    if (releases_gradients()) {
      micro_batch({.is_first = true, .is_last = true});
      return;
    }
    micro_batch({.is_first = true, .is_last = false});
    micro_batch({.is_first = false, .is_last = true});
  }
  void update() {
    if (releases_gradients()) {
      bound_.end_update();
    } else {
      bound_.update(/*update=*/1, config_.optimizer.lr);
    }
    bound_.weights_stepped();
  }
  void telemetry_and_checks() {
    if (declared_.telemetry) {
      micro_batch({.is_first = true, .is_last = releases_gradients()}, /*with_telemetry=*/true);
      update();
      declared_.telemetry->queue(device_, declared_.model, declared_.optimizer);
    }
    std::vector<TensorView> state = declared_.model.weights().own();
    for (const NamedTensor& tensor : declared_.optimizer.state()) state.push_back(tensor.view);
    for_each_coded([&](int i) {
      for (const CodeTensor& tensor : declared_.model.weights().code_tensors(i)) state.push_back(tensor.view);
    });
    declared_.checks.hash(device_, IntegrityChecks::Table::kUpdated, state);
  }
  void other_than_steps() {
    for_each_coded([&](int i) { declared_.model.weights().encode(device_, i); });
    bound_.weights_changed();
    bound_.begin_evaluation_batch();
    declared_.model.evaluate(device_, batch());
    if (!config_.evaluation.prompts.empty()) declared_.model.logits(device_, batch(), 0, 1);
  }

 private:
  bool releases_gradients() const { return config_.optimizer.release_gradients; }
  template <typename Visit>
  void for_each_coded(const Visit& visit) const {
    const std::vector<ParameterInfo>& parameters = declared_.model.parameters().all;
    for (size_t i = 0; i < parameters.size(); ++i) {
      if (parameters[i].is_coded()) visit(static_cast<int>(i));
    }
  }
  void add(Work work) { work_.push_back(std::move(work)); }

  // Without the tokens, which a device that records does not read.
  Model::Batch batch() const {
    static constexpr int32_t kUnread = 0;
    const BatchShape shape = config_.micro_batch_shape();
    return {&kUnread, &kUnread, shape, shape.separate_documents ? &kUnread : nullptr};
  }

  const Config& config_;
  std::vector<Work> work_;
  std::vector<Gemm> products_;
  RecordingDevice device_;
  RecordingCommunicator communicator_;
  DeclaredRun declared_;
  Arena arena_;
  BoundRun bound_;
};

// Calls part(times) after each part of a step that `rank` has been asked for.
template <typename Part>
void record_parts(RecordingRank& rank, const Config& config, int64_t num_gpus, const Part& part) {
  PARKA_REQUIRE(config.divides_batch(num_gpus));
  const int64_t num_micro_batches = config.micro_batches_per_step(num_gpus);
  rank.begin_step();
  rank.micro_batch({.is_first = true, .is_last = num_micro_batches == 1});
  part(1);
  if (num_micro_batches > 2) {
    rank.micro_batch({.is_first = false, .is_last = false});
    part(num_micro_batches - 2);
  }
  if (num_micro_batches > 1) {
    rank.micro_batch({.is_first = false, .is_last = true});
    part(1);
  }
  rank.update();
  part(1);
}

RecordingRank first_rank(const Config& config, int64_t num_gpus, const std::set<std::string>& one_kernel = {}) {
  return {config, zero_of(config, 0, num_gpus), one_kernel};
}

}  // namespace

RecordedStep record_step(const Config& config, int64_t num_gpus, const std::set<std::string>& one_kernel) {
  RecordingRank rank = first_rank(config, num_gpus, one_kernel);
  RecordedStep step;
  record_parts(rank, config, num_gpus, [&](int64_t times) { step.parts.push_back({rank.take(), times}); });
  return step;
}

std::vector<RecordedProduct> record_products(const Config& config, int64_t num_gpus) {
  RecordingRank rank = first_rank(config, num_gpus);
  std::map<std::string, RecordedProduct> by_key;
  record_parts(rank, config, num_gpus, [&](int64_t times) {
    for (const Gemm& a : rank.take_products()) {
      RecordedProduct& product = by_key.try_emplace(key_of(a), RecordedProduct{a}).first->second;
      product.count += times;
    }
  });
  std::vector<RecordedProduct> products;
  products.reserve(by_key.size());
  for (const auto& [key, product] : by_key) products.push_back(product);
  const auto flop = [](const RecordedProduct& product) {
    return static_cast<double>(product.count) * cost_of(product.gemm).flop;
  };
  std::ranges::stable_sort(products,
                           [&](const RecordedProduct& a, const RecordedProduct& b) { return flop(a) > flop(b); });
  return products;
}

int64_t record_workspace_bytes(const Config& config, const Zero& zero) {
  RecordingRank rank(config, zero);
  rank.begin_step();
  rank.micro_batches();
  rank.update();
  rank.telemetry_and_checks();
  rank.other_than_steps();
  return rank.workspace_bytes();
}

}  // namespace parka
