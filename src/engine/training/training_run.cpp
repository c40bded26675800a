#include "engine/training/training_run.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <stdexcept>
#include <tuple>
#include <utility>

#include <fmt/ranges.h>

#include "core/heartbeat.h"
#include "core/ignored_target.h"
#include "core/log/work_progress.h"
#include "core/parallel.h"
#include "engine/checkpoint/checkpoint_base.h"
#include "engine/config/config_checks.h"
#include "engine/config/config_io.h"
#include "engine/config/data_sources.h"
#include "engine/files/safetensors.h"
#include "engine/training/run_data.h"

namespace parka {
namespace {

void round_to_bf16(std::vector<float>& values) {
  parallel_for(static_cast<int64_t>(values.size()), 1 << 16, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) values[i] = decode_bf16(encode_bf16(values[i]));
  });
}

// A step without targets has a loss and gradients of 0, whatever the others have.
StepLimits step_limits(const StepReport& report) {
  if (report.num_targets == 0) return {};
  return {report.limits.loss * static_cast<double>(report.num_targets), report.limits.grad_norm};
}

}  // namespace

TrainingRun::TrainingRun(const Config& config, Device& device, Communicator& communicator)
    : config_(config),
      device_(device),
      communicator_(communicator),
      zero_(zero_of(config, communicator.rank(), communicator.size())),
      data_(open_training_files(config)),
      data_fingerprint_(data_.fingerprint()),
      data_files_(describe_files(data_, config.data.checksum, communicator)),
      declared_(config, device.kind(), zero_),
      arena_(device, declared_.plan,
             {[&](int64_t bytes) { return communicator.allocate(device, bytes); },
              [&](void* memory) { communicator.release(device, memory); }}),
      bound_(config_, zero_, declared_, arena_, device, communicator),
      spikes_(config.training.spike_window) {
  place_ = fmt::format("rank {} ({})", communicator.rank(), device.name());
  watch_state();
  start_loader({});
  if (declared_.optimizer.releases_gradients()) declared_.optimizer.set_last_norm(device_, 0);
}

void TrainingRun::start_loader(DataPosition position) {
  require_whole_micro_batches(config_, communicator_.size());
  loader_.reset();  // joins the old one's thread before the new one reads
  loader_ = std::make_unique<BatchLoader>(
      data_, BatchLoaderOptions{.seed = config_.data.seed,
                                .shuffle = config_.data.shuffle,
                                .weights = config_.data.weights,
                                .global_batch = config_.training.global_batch_size,
                                .micro_batch = config_.training.micro_batch_size,
                                .rank = config_.data_parallel(communicator_.rank()),
                                .world_size = config_.data_parallel(communicator_.size()),
                                .slice_rank = communicator_.place_in(Peers::kContext),
                                .num_slices = config_.distributed.context_parallel,
                                .prefetch = std::max(int64_t{4}, micro_batches_per_step()),
                                .images_per_sequence = config_.data.images_per_sequence,
                                .start = position});
  position_ = position;
  data_wait_told_ = 0;
}

ElementRange TrainingRun::set_range(size_t i) const {
  const ParameterInfo& p = declared_.model.parameters().all[i];
  return p.is_coded() ? ElementRange{0, p.numel()} : p.own_elements();
}

void TrainingRun::set_weight(size_t i, std::span<const float> values, int64_t first) {
  if (declared_.model.parameters().all[i].is_coded()) {
    declared_.model.weights().stage_coded(device_, static_cast<int>(i), values, first);
  } else {
    declared_.optimizer.set_weight(device_, i, values, first);
  }
}

void TrainingRun::end_weight(size_t i) {
  if (declared_.model.parameters().all[i].is_coded()) {
    declared_.model.weights().encode(device_, static_cast<int>(i));
  }
}

void TrainingRun::copy_weight(size_t from, size_t to) {
  if (!declared_.model.parameters().all[from].is_coded()) {
    declared_.optimizer.copy_weight(device_, from, to);
    return;
  }
  const ModelWeights& weights = declared_.model.weights();
  const std::vector<CodeTensor> source = weights.code_tensors(static_cast<int>(from)),
                                target = weights.code_tensors(static_cast<int>(to));
  for (size_t k = 0; k < source.size(); ++k) {
    device_.copy(target[k].view.data, source[k].view.data, source[k].view.bytes());
  }
}

void TrainingRun::draw_weights(const std::vector<size_t>& parameters) {
  // In pieces: a large tensor's fp32 values in fresh memory take longer to get than to compute.
  constexpr int64_t kPiece = int64_t{1} << 20;
  int64_t total = 0;
  for (const size_t i : parameters) total += set_range(i).size();
  WorkProgress progress("drawing initial weights", total);
  for (const size_t i : parameters) {
    const ElementRange own = set_range(i);
    for (int64_t begin = own.begin; begin < own.end; begin += kPiece) {
      const ElementRange piece = {begin, std::min(begin + kPiece, own.end)};
      set_weight(i,
                 initial_weight(config_.model, declared_.model.parameters(), i,
                                static_cast<uint64_t>(config_.training.seed), piece),
                 begin - own.begin);
      heartbeat();
      progress.add(piece.size());
    }
    end_weight(i);
  }
}

void TrainingRun::initialize() {
  if (config_.finetune.base != BaseFormat::kCompute) {
    throw_bad_input(
        "finetune.base = {} has no weights to save, so it starts from those of a checkpoint; give checkpoint.init_from, "
        "or base = compute",
        name_of(config_.finetune.base));
  }
  std::vector<size_t> all(declared_.model.parameters().all.size());
  std::iota(all.begin(), all.end(), size_t{0});
  draw_weights(all);
  bound_.weights_changed();
}

void TrainingRun::initialize_alike() {
  const ParameterTable& table = declared_.model.parameters();
  std::vector<size_t> drawn;
  std::vector<std::pair<size_t, size_t>> copied;
  // Frozen ones have no masters to copy, and those in codes no weights.
  std::map<std::tuple<int64_t, int64_t, bool, bool, bool>, size_t> first_of_shape;
  for (size_t i = 0; i < table.all.size(); ++i) {
    const auto& parameter = table.all[i];
    const auto [first, is_new] =
        first_of_shape.try_emplace({parameter.rows, parameter.cols, parameter.trainable, parameter.is_coded(),
                                    parameter.placement.is_by_expert()},
                                   i);
    if (is_new) {
      drawn.push_back(i);
    } else {
      copied.emplace_back(first->second, i);
    }
  }
  draw_weights(drawn);
  for (const auto& [from, to] : copied) copy_weight(from, to);
  bound_.weights_changed();
}

std::vector<std::string> TrainingRun::initialize_from(const LoadedCheckpoint& checkpoint) {
  const Config saved = config_of(checkpoint);
  ResumeDifferences differences = model_differences(saved.model, config_.model);
  if (!differences.refused.empty()) {
    throw_bad_input("{}: checkpoint.init_from has the weights of another model: {}; change the config's model",
                    checkpoint.path(), fmt::join(differences.refused, "; "));
  }
  const FinetuneMethod method = config_.finetune.method;
  if (method != FinetuneMethod::kFull && saved.finetune.method == method) {
    continue_added(checkpoint, saved.finetune);
  } else {
    check_without_side(checkpoint, saved.finetune.method);
    read_weights(checkpoint, Weights::kOfModel, lora_adapters(saved));
    std::vector<size_t> added;
    for (size_t i = 0; i < declared_.model.parameters().all.size(); ++i) {
      if (is_added(declared_.model.parameters().all[i])) added.push_back(i);
    }
    draw_weights(added);
    if (method != FinetuneMethod::kFull) use_base(describe_base(checkpoint, config_.checkpoint.folder));
  }
  bound_.weights_changed();
  return std::move(differences.allowed);
}

// A side network is nothing that could be added to weights, and one begins beside weights alone.
void TrainingRun::check_without_side(const LoadedCheckpoint& checkpoint, FinetuneMethod saved) const {
  if (saved == FinetuneMethod::kQst) {
    throw_bad_input(
        "{}: checkpoint.init_from has a side network, which finetune.method = {} has no place for: {}set method = qst",
        checkpoint.path(), name_of(config_.finetune.method),
        has_base(checkpoint) ? "start from its base, or " : "");
  }
  if (saved == FinetuneMethod::kLora && config_.finetune.method == FinetuneMethod::kQst) {
    throw_bad_input(
        "{}: checkpoint.init_from has adapters: for a side network beside them `parka export` it, import the result and "
        "start from that",
        checkpoint.path());
  }
}

void TrainingRun::check_same_added(const LoadedCheckpoint& checkpoint, const FinetuneConfig& saved) const {
  const bool is_qst = config_.finetune.method == FinetuneMethod::kQst;
  if (!has_base(checkpoint)) {
    throw_bad_input(
        "{}: checkpoint.init_from has {} beside weights that began at random, as its run had no checkpoint.init_from "
        "itself: {}",
        checkpoint.path(), is_qst ? "a side network" : "adapters",
        is_qst ? "go on with that run" : "`parka export` it, import the result and start from that");
  }
  if (is_qst) {
    if (config_.finetune.side_rules() == saved.side_rules()) return;
    throw_bad_input(
        "{}: checkpoint.init_from has a side network of its own: go on with it, with its finetune.reduction, downsample, "
        "rank, mix and kept; or start from its base",
        checkpoint.path());
  }
  const LoraRules ours = config_.finetune.lora_rules(), theirs = saved.lora_rules();
  const auto sorted = [](std::vector<std::string> targets) {
    std::ranges::sort(targets);
    return targets;
  };
  if (ours.rank != theirs.rank || ours.scale != theirs.scale || sorted(ours.targets) != sorted(theirs.targets)) {
    throw_bad_input(
        "{}: checkpoint.init_from has adapters of its own: go on with these, with its finetune.rank, alpha, rslora and "
        "targets; or, for others, `parka export` it, import the result and start from that",
        checkpoint.path());
  }
}

void TrainingRun::continue_added(const LoadedCheckpoint& checkpoint, const FinetuneConfig& saved) {
  check_same_added(checkpoint, saved);
  read_weights(checkpoint, Weights::kOfModel);
  read_weights(checkpoint, Weights::kAdded);
  use_base(describe_base(*checkpoint.base(), config_.checkpoint.folder));
}

void TrainingRun::read_weights(const LoadedCheckpoint& checkpoint, Weights which,
                               const CheckpointAdapters& adapters) {
  const std::vector<ParameterInfo>& parameters = declared_.model.parameters().all;
  const auto is_other = [&](const ParameterInfo& p) { return is_added(p) != (which == Weights::kAdded); };
  std::vector<ParameterInfo> wanted = parameters;
  std::erase_if(wanted, is_other);
  const CheckpointWeights weights(checkpoint, wanted, adapters);
  // Weights of a base are in no checkpoint of this run: whoever reads them from the base rounds to nearest even.
  const bool stays_with_base =
      config_.finetune.method != FinetuneMethod::kFull && config_.precision.compute == DType::kBF16;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const ParameterInfo& p = parameters[i];
    if (is_other(p)) continue;
    // Frozen weights stay those that the checkpoint's model computes with, to the bit.
    const WeightForm form = p.trainable ? WeightForm::kMaster : WeightForm::kCompute;
    std::vector<float> values = weights.read(p, set_range(i), form);
    if (!all_finite(values)) throw_bad_input("{}: {} holds NaN or infinite values", checkpoint.path(), p.name);
    if (!p.trainable && stays_with_base && weights.dtype(p) != DType::kBF16) round_to_bf16(values);
    set_weight(i, values);
    end_weight(i);
  }
}

void TrainingRun::use_base(json base) {
  if (staging_) throw std::logic_error("memory to save in was made ready before it was known what is saved");
  base_ = std::move(base);
  watch_state();
}

NamedTensor TrainingRun::weight_tensor(size_t i) const {
  const ParameterInfo& p = declared_.model.parameters().all[i];
  const ElementBox box = ElementBox::flat(p.own_elements(), p.whole_numel());
  return {p.name, declared_.model.weights().own()[i], {p.whole_rows(), p.cols}, box, i};
}

std::vector<NamedTensor> TrainingRun::tensors() const {
  std::vector<NamedTensor> all = declared_.optimizer.state();
  const std::vector<ParameterInfo>& parameters = declared_.model.parameters().all;
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (parameters[i].trainable || (base_.is_null() && !parameters[i].is_coded())) all.push_back(weight_tensor(i));
  }
  return all;
}

std::vector<double> TrainingRun::source_epochs(DataPosition position) const {
  const std::vector<int64_t> counts = Mixture(config_.data.weights).counts(position.consumed);
  std::vector<double> epochs;
  for (size_t i = 0; i < counts.size(); ++i) {
    epochs.push_back(static_cast<double>(counts[i]) / static_cast<double>(data_.source_sequences()[i]));
  }
  return epochs;
}

// Returns the number of targets of all ranks in the step that begins with this micro-batch. If steps differ in
// that, gradients are scaled by its inverse. A step without targets has a loss and gradients of 0.
int64_t TrainingRun::count_targets(const MicroBatch& first) {
  if (!bound_.targets_vary()) return config_.training.global_batch_size * (config_.data.sequence_length - 1);
  int64_t sum = 0;
  for (const std::string& of_rank : communicator_.gather_text(fmt::format("{}", first.step_targets))) {
    sum += std::stoll(of_rank);
  }
  bound_.set_target_share(sum == 0 ? 0.0f : static_cast<float>(1.0 / static_cast<double>(sum)));
  return sum;
}

// `done` sequences of the step are in micro-batches before it.
Model::Batch TrainingRun::on_host(const MicroBatch& batch, int64_t done) const {
  const BatchShape shape = config_.micro_batch_shape();
  return {batch.tokens.data(),
          batch.targets.data(),
          shape,
          shape.separate_documents ? batch.first_keys.data() : nullptr,
          // as the loader deals them out
          {.step = static_cast<int32_t>(completed_steps_ + 1),
           .first_sequence = static_cast<int32_t>(communicator_.rank() + done * communicator_.size()),
           .stride = communicator_.size()},
          batch.images.pixels.data(),
          batch.images.positions.data()};
}

BeforeEvaluationBatch TrainingRun::evaluation_batch(const BeforeEvaluationBatch& before_each) {
  return [this, &before_each](const std::exception_ptr& read_failure) {
    if (before_each) before_each(read_failure);
    bound_.begin_evaluation_batch();
  };
}

EvaluationResult TrainingRun::evaluate(const TokenFiles& files, const BeforeEvaluationBatch& before_each) {
  return evaluate_loss(device_, declared_.model, files, config_.training.micro_batch_size,
                       config_.training.eval_sequences, communicator_, evaluation_batch(before_each));
}

TaskResult TrainingRun::evaluate(const EvalTask& task, const BeforeEvaluationBatch& before_each) {
  return evaluate_task(
      device_, declared_.model, task,
      {config_.training.micro_batch_size, config_.data.sequence_length, false, config_.data.images_per_sequence},
      config_.evaluation.task_documents, communicator_, evaluation_batch(before_each));
}

std::vector<float> TrainingRun::next_logits(const std::vector<int32_t>& tokens,
                                            const BeforeEvaluationBatch& before_each) {
  constexpr int64_t kLengthUnit = 16;  // so that a GPU meets few shapes
  const int64_t longest = config_.data.sequence_length;
  const int64_t length = std::min(static_cast<int64_t>(tokens.size()), longest);
  std::vector<int32_t> ids(tokens.end() - length, tokens.end());
  ids.resize(static_cast<size_t>(std::min(ceil_div(length, kLengthUnit) * kLengthUnit, longest)), ids.back());
  const std::vector<int32_t> targets(ids.size(), kIgnoreTarget);
  evaluation_batch(before_each)(nullptr);
  return declared_.model.logits(device_, {ids.data(), targets.data(), {1, static_cast<int64_t>(ids.size()), false}},
                                length - 1, 1);
}

void TrainingRun::describe_update(StepReport& report) const {
  report.learning_rate = learning_rate(config_.optimizer, config_.training.steps, report.step);
  report.limits = spikes_.limits();
}

PendingStep TrainingRun::queue_update(StepReport& report) {
  const int64_t update = applied_steps_ + 1;
  describe_update(report);
  if (hashed_step_ == completed_steps_) declared_.checks.hash_watched(device_, IntegrityChecks::Table::kUnchanged);
  return bound_.update(update, report.learning_rate, before_update(), step_limits(report));
}

// A save may still copy what the update changes.
BeforeUpdate TrainingRun::before_update() const {
  return {.staging = last_staged_.empty() ? nullptr : staging_.get(), .last_staged = last_staged_};
}

// The step before, if it is unfinished, counts as applied: if it was not, the run ends.
void TrainingRun::release_update(StepReport& report) {
  const int64_t update = applied_steps_ + (unfinished_ ? 1 : 0) + 1;
  describe_update(report);
  BeforeUpdate before = before_update();
  if (hashed_step_ == completed_steps_) {
    constexpr auto kTable = IntegrityChecks::Table::kUnchanged;
    before.checks = &declared_.checks;
    declared_.checks.clear(device_, kTable);
    const std::vector<ParameterInfo>& parameters = declared_.model.parameters().all;
    for (size_t i = 0; i < parameters.size(); ++i) {  // no update is told of frozen ones
      if (!parameters[i].trainable) declared_.checks.hash_watched(device_, kTable, i);
    }
  }
  bound_.release_update(update, report.learning_rate, std::move(before));
}

std::optional<StepReport> TrainingRun::step() {
  if (!unfinished_) {
    step_began_ = device_.mark();
    step_began_at_ = std::chrono::steady_clock::now();
  }
  const TrainingConfig& training = config_.training;
  const int64_t own_sequences = training.global_batch_size / config_.data_parallel(communicator_.size());
  StepReport report;
  report.step = completed_steps_ + 1;
  const bool with_telemetry = declared_.telemetry && declared_.telemetry->is_due(report.step);
  std::vector<PendingComparison> comparisons;
  if (declared_.optimizer.releases_gradients()) release_update(report);
  bound_.begin_step();
  for (int64_t done = 0; done < own_sequences; done += training.micro_batch_size) {
    const ParameterExchange::Place place = {done == 0, done + training.micro_batch_size == own_sequences};
    const MicroBatch next = loader_->next();
    if (place.is_first) report.num_targets = count_targets(next);
    const Model::Batch batch = on_host(next, done);
    const Model::LossOptions options = bound_.loss_options(report.num_targets);
    if (place.is_first && declared_.checks.replay_is_due(report.step)) {
      queue_replayed(batch, options, place, with_telemetry, comparisons);
    } else {
      const BoundRun::MicroBatch how = bound_.begin_micro_batch(place, with_telemetry);
      declared_.model.accumulate_gradients(device_, batch, options, declared_.optimizer.gradients(),
                                           how.accumulation, how.queueing);
    }
    report.data = next.start;
    position_ = next.after;
  }
  report.data_wait_seconds = loader_->wait_seconds() - std::exchange(data_wait_told_, loader_->wait_seconds());

  std::optional<StepReport> previous = finish();
  if (previous && !previous->is_finite() && training.non_finite == NonFinitePolicy::kStop) return previous;
  end_step(std::move(report), with_telemetry, std::move(comparisons));
  if (!previous && finishes_early()) return finish();
  return previous;
}

// Queues the update, and what follows it.
void TrainingRun::end_step(StepReport report, bool with_telemetry, std::vector<PendingComparison> comparisons) {
  PendingStep result = declared_.optimizer.releases_gradients() ? bound_.end_update() : queue_update(report);
  if (hashed_step_ == completed_steps_) comparisons.push_back(compare_state());
  last_staged_.clear();
  std::optional<PendingTelemetry> telemetry;
  if (with_telemetry) telemetry = declared_.telemetry->queue(device_, declared_.model, declared_.optimizer);
  bound_.weights_stepped();
  ++completed_steps_;
  unfinished_.emplace(UnfinishedStep{std::move(report), std::move(result), std::move(telemetry), device_.mark(),
                                     std::move(comparisons), nullptr});
  after_update(*unfinished_);
}

// All ranks come to finish() at the same point of their programs, for they compare what they have in common there.
// A GPU's result may be ready on one rank and not on another; a CPU's always is.
bool TrainingRun::finishes_early() const {
  const bool alike = communicator_.size() == 1 || device_.kind() == DeviceKind::kCpu;
  return alike && unfinished_->result.ready();
}

std::optional<StepReport> TrainingRun::finish() {
  if (!unfinished_) return std::nullopt;
  StepReport report = std::move(unfinished_->report);
  StepResult result = unfinished_->result.wait();
  for (const PendingComparison& comparison : unfinished_->comparisons) comparison.check(report.step, place_);
  if (unfinished_->replicas) compare_replicas(unfinished_->replicas->wait(), report.step);
  if (unfinished_->telemetry) report.telemetry = unfinished_->telemetry->wait();
  report.seconds = unfinished_->end->seconds_since(*step_began_);
  step_began_ = std::move(unfinished_->end);
  // The host may look later than that: it queues ahead.
  report.finished = step_began_at_ + std::chrono::duration_cast<std::chrono::steady_clock::duration>(
                                         std::chrono::duration<double>(report.seconds));
  step_began_at_ = report.finished;
  unfinished_.reset();
  report.scalars = declared_.model.scalars(result.sums, report.num_targets);
  report.experts = declared_.model.expert_use(result.sums);
  report.loss = report.scalars.front().value;
  report.grad_norm = result.grad_norm;
  report.scalars.push_back({"grad_norm", report.grad_norm});
  report.applied = result.applied;
  report.culprit = std::move(result.culprit);
  last_norm_ = result.grad_norm;
  if (report.applied) ++applied_steps_;
  skipped_in_a_row_ = report.is_finite() ? 0 : skipped_in_a_row_ + 1;
  if (report.num_targets > 0) spikes_.add({report.loss, report.grad_norm});
  return report;
}

void TrainingRun::take_back(const StepReport& step) {
  PARKA_REQUIRE(!unfinished_ && !step.applied && step.step == completed_steps_);
  if (hashed_step_ == completed_steps_) --hashed_step_;  // its update has left everything as it was
  --completed_steps_;
  if (!step.is_finite()) --skipped_in_a_row_;
  position_ = step.data;
}

}  // namespace parka
