// How a TrainingRun hands over what a checkpoint holds, and takes it over.
#include <algorithm>
#include <cstring>
#include <numeric>
#include <string>
#include <unordered_map>
#include <utility>

#include <fmt/ranges.h>

#include "core/bit_hash.h"
#include "engine/checkpoint/checkpoint_base.h"
#include "engine/checkpoint/checkpoint_layout.h"
#include "engine/checkpoint/checkpoint_states.h"
#include "engine/checkpoint/saved_state.h"
#include "engine/config/config_io.h"
#include "engine/files/safetensors.h"
#include "engine/training/run_data.h"
#include "engine/training/training_run.h"

namespace parka {
namespace {

// Throws when `config` cannot go on from the checkpoint; returns how it goes on differently.
ResumeDifferences check_resumable(const LoadedCheckpoint& checkpoint, const Config& config, bool converts_states) {
  const Config saved = config_of(checkpoint);
  ResumeDifferences differences = resume_differences(saved, config);
  std::vector<std::string>&refused = differences.refused, &converted = differences.converted;
  if (refused.empty() && (converted.empty() || converts_states)) return differences;
  const bool may_be_converted = refused.empty();
  if (!converts_states) refused.insert(refused.end(), converted.begin(), converted.end());
  throw_bad_input(
      "{}: the checkpoint belongs to another config: {}; change it back, {}or train in another checkpoint.folder",
      checkpoint.path(), fmt::join(refused, "; "),
      may_be_converted ? "go on with --convert-states, which rounds masters and states to the new formats, and "
                         "begins those of another optimizer at zero, "
                       : "");
}

// True if two values of checkpoint.init_from name the same, which may have moved to another folder.
bool is_same_source(const std::string& one, const std::string& other) {
  const auto name = [](const std::string& path) {
    const fs::path plain = (fs::path(path) / "").lexically_normal().parent_path();
    if (run_folder_of(plain).empty()) return plain.filename();
    return plain.parent_path().filename() / plain.filename();
  };
  return name(one) == name(other);
}

// True if the checkpoint at `found` is what checkpoint.init_from names, itself or the folder that it is in.
bool is_named_by(const std::string& init_from, const fs::path& found) {
  if (init_from.empty()) return false;
  const fs::path given = (fs::absolute(init_from) / "").lexically_normal().parent_path();
  return given == found || given == found.parent_path();
}

constexpr int64_t kPieceBytes = int64_t{4} << 20;  // a multiple of kHashWordBytes

// A state that could not be loaded again must not take the place of a checkpoint that can.
[[noreturn]] void throw_not_finite(const std::string& what) {
  throw Error(
      ExitCode::kNonFinite,
      fmt::format("NaN or infinite values {}; the step was not saved, and the checkpoints before it are kept: "
                  "lower optimizer.lr, and start the same command again",
                  what));
}

// A tensor in a staging buffer, held against the hash that the device has made of it.
class StagedTensor final : public TensorSource {
 public:
  // The hashes are the buffer's first tensor, of which this tensor's is number `slot`.
  StagedTensor(StagingBuffer& buffer, size_t index, size_t slot, const TensorView& tensor, std::string what)
      : buffer_(buffer),
        index_(index),
        slot_(slot),
        num_bytes_(tensor.bytes()),
        dtype_(tensor.dtype),
        what_(std::move(what)) {}

  int64_t num_bytes() const override { return num_bytes_; }
  void read(const ByteSink& sink) const override {
    const ByteSpan bytes = buffer_.wait(index_);
    uint64_t hash = 0, expected = 0;
    bool finite = true;
    for (size_t at = 0; at < bytes.size(); at += kPieceBytes) {
      const ByteSpan piece = bytes.subspan(at, std::min(static_cast<size_t>(kPieceBytes), bytes.size() - at));
      sink(piece);
      hash += bit_hash_of(piece, at);
      finite = finite && piece_is_finite(dtype_, piece);
    }
    std::memcpy(&expected, buffer_.wait(0).data() + slot_ * kHashWordBytes, sizeof(expected));
    if (hash == expected && finite) return;
    if (hash == expected) throw_not_finite(what_);
    throw Error(
        ExitCode::kCorrupted,
        fmt::format("silent data corruption {} is not what its update left: memory of the device or the host, or "
                    "the copy between them, has changed it; it was not saved",
                    what_));
  }

 private:
  StagingBuffer& buffer_;
  size_t index_, slot_;
  int64_t num_bytes_;
  DType dtype_;
  std::string what_;
};

// A tensor on the device, which passes through a little host memory.
class DeviceTensor final : public TensorSource {
 public:
  DeviceTensor(Device& device, const TensorView& tensor, std::string what)
      : device_(device), tensor_(tensor), what_(std::move(what)) {}

  int64_t num_bytes() const override { return tensor_.bytes(); }
  void read(const ByteSink& sink) const override {
    std::vector<std::byte> piece;
    for (int64_t at = 0; at < num_bytes(); at += kPieceBytes) {
      piece.resize(static_cast<size_t>(std::min(kPieceBytes, num_bytes() - at)));
      device_.copy_to_host(piece.data(), static_cast<const std::byte*>(tensor_.data) + at,
                           static_cast<int64_t>(piece.size()));
      sink(piece);
      if (!piece_is_finite(tensor_.dtype, piece)) throw_not_finite(what_);
    }
  }

 private:
  Device& device_;
  TensorView tensor_;
  std::string what_;
};

}  // namespace

int64_t staging_bytes(const Config& config, const DeclaredRun& run, int64_t num_ranks) {
  if (!config.checkpoint.async) return 0;
  const auto place_of = [&](const ParameterInfo& p, int64_t elements, DType dtype) {
    const Shard among_copies = {0, num_ranks / p.placement.num_parts()};
    return StagingBuffer::place_of(among_copies.own(elements).size() * size_of(dtype));
  };
  int64_t bytes = 0;
  const bool has_base = config.finetune.method != FinetuneMethod::kFull && !config.checkpoint.init_from.empty();
  const ParameterTable& table = run.model.parameters();
  for (const ParameterInfo& p : table.all) {
    if ((has_base && !p.trainable) || p.is_coded()) continue;
    bytes += place_of(p, p.own_elements().size(), config.precision.compute);
  }
  for (const MemoryPlan::Entry& entry : run.plan.entries()) {
    if (entry.category != kMasterCategory && entry.category != kStateCategory) continue;
    std::string name = entry.name;  // of a parameter, and of its state
    while (table.index_of(name) < 0) name.resize(name.rfind('.'));
    bytes += place_of(table.all[static_cast<size_t>(table.index_of(name))], entry.bytes / size_of(entry.dtype),
                      entry.dtype);
  }
  return bytes + StagingBuffer::place_of(run.checks.table_bytes());
}

bool save_is_due(const Config& config, int64_t step) {
  const CheckpointConfig& checkpoint = config.checkpoint;
  return (checkpoint.interval > 0 && step % checkpoint.interval == 0) ||
         (checkpoint.save_final && step == config.training.steps);
}

json TrainingRun::saved_state() const {
  json state = {{"applied_steps", applied_steps_},
                {"data",
                 {{"epoch", position_.epoch},
                  {"consumed", position_.consumed},
                  {"fingerprint", data_fingerprint_},
                  {"files", data_files_}}},
                {"tokens", completed_steps_ * tokens_per_step()},
                {"config", to_json(config_)},
                {"config_hash", config_hash(config_)}};
  // Files may have moved from one to another.
  if (!config_.data.weights.empty()) state["data"]["source_sequences"] = data_.source_sequences();
  if (!base_.is_null()) state[kBaseKey] = base_;
  if (config_.optimizer.release_gradients) state["last_norm"] = last_norm_;
  if (skipped_in_a_row_ > 0) state["skipped_in_a_row"] = skipped_in_a_row_;
  if (config_.training.spike_window == 0) return state;
  json& recent = state["recent_steps"] = json::array();
  for (const SpikeGuard::Step& step : spikes_.steps()) recent.push_back({step.loss, step.grad_norm});
  return state;
}

// The tensors of a checkpoint that this rank writes, without their bytes, and the elements of each.
std::vector<HostTensor> TrainingRun::saved_pieces(std::vector<TensorView>& parts) const {
  const bool several = communicator_.size() > 1;
  const std::vector<ParameterInfo>& parameters = declared_.model.parameters().all;
  std::vector<HostTensor> pieces;
  for (const NamedTensor& tensor : tensors()) {
    HostTensor host{tensor.name, tensor.view.dtype, tensor.shape, {}, {}, {}};
    const TensorView flat = tensor.view.reshaped({tensor.view.numel()});
    // All ranks that have a tensor save it, a part each.
    const int64_t parts_of_all = parameters[tensor.parameter].placement.num_parts();
    const Shard among_copies = {communicator_.rank() / parts_of_all, communicator_.size() / parts_of_all};
    const ElementBox own = among_copies.own(tensor.box, num_elements_of(tensor.shape));
    if (several) host.piece = own;
    parts.push_back(flat.rows(tensor.box.place_of(own.run(0).begin), own.numel()));
    pieces.push_back(std::move(host));
  }
  return pieces;
}

// For messages.
std::string TrainingRun::name_in_step(const std::string& tensor) const {
  return fmt::format("in step {} on {}: {}", completed_steps_, place_, tensor);
}

void TrainingRun::prepare_staging() {
  if (staging_) return;
  std::vector<TensorView> parts;
  saved_pieces(parts);
  int64_t bytes = StagingBuffer::place_of(declared_.checks.view(IntegrityChecks::Table::kSaved).bytes());
  for (const TensorView& part : parts) bytes += StagingBuffer::place_of(part.bytes());
  staging_ = device_.make_staging_buffer(bytes);
}

// Parameters go in the order in which the next step updates them, that of the table or, where gradients are
// released, of units in backward, so that it does not wait long for any.
void TrainingRun::stage(CheckpointContents& contents, const std::vector<TensorView>& parts) {
  // One rank saves what it watches, tensor by tensor: what is written must be what the update has left.
  const bool is_hashed = communicator_.size() == 1 && hashed_step_ == completed_steps_;
  const auto table = is_hashed ? IntegrityChecks::Table::kUpdated : IntegrityChecks::Table::kSaved;
  if (!is_hashed) declared_.checks.hash(device_, table, parts);
  // Watched for this save alone: that check stands for the one before the next update.
  if (is_hashed && !declared_.checks.state_is_due(completed_steps_)) hashed_step_ = -1;
  const std::vector<NamedTensor> all = tensors();
  std::vector<size_t> order(parts.size());
  std::iota(order.begin(), order.end(), size_t{0});
  const auto turn_of = [&](size_t i) {
    const size_t parameter = all[i].parameter;
    const int unit = declared_.model.parameters().all[parameter].unit;
    return std::pair(declared_.optimizer.releases_gradients() ? -unit : 0, parameter);
  };
  std::ranges::stable_sort(order, [&](size_t a, size_t b) { return turn_of(a) < turn_of(b); });
  std::vector<TensorView> staged = {declared_.checks.view(table)};
  last_staged_.assign(declared_.model.parameters().all.size(), 0);
  for (const size_t i : order) {
    contents.tensors[i].source =
        std::make_shared<StagedTensor>(*staging_, staged.size(), i, parts[i], name_in_step(all[i].name));
    last_staged_[all[i].parameter] = staged.size();
    staged.push_back(parts[i]);
  }
  staging_->begin(staged);
}

CheckpointContents TrainingRun::snapshot(SnapshotForm form) {
  PARKA_REQUIRE(!unfinished_);
  CheckpointContents contents{completed_steps_, saved_state(), {}};
  std::vector<TensorView> parts;
  contents.tensors = saved_pieces(parts);
  if (form == SnapshotForm::kStaged) {
    stage(contents, parts);
    return contents;
  }
  for (size_t i = 0; i < parts.size(); ++i) {
    HostTensor& tensor = contents.tensors[i];
    if (form == SnapshotForm::kDirect) {
      tensor.source = std::make_shared<DeviceTensor>(device_, parts[i], name_in_step(tensor.name));
    } else {
      tensor.bytes.resize(static_cast<size_t>(parts[i].bytes()));
      device_.copy_to_host(tensor.bytes.data(), parts[i].data, parts[i].bytes());
    }
  }
  return contents;
}

// Throws where the files are not those of the checkpoint.
void TrainingRun::check_data(const LoadedCheckpoint& checkpoint, const SavedProgress& progress) {
  const std::vector<std::string> differences =
      progress.files.is_null() ? std::vector<std::string>() : file_differences(progress.files, data_files_);
  const bool is_mixture = !config_.data.weights.empty() && !progress.source_sequences.is_null();
  if (differences.empty() && is_mixture && progress.source_sequences != json(data_.source_sequences())) {
    throw_bad_input(
        "{}: the entries of data.train have {} sequences, and had {} when the checkpoint was trained: a file has moved from "
        "one to another; restore them, or train in another checkpoint.folder",
        checkpoint.path(), json(data_.source_sequences()).dump(), progress.source_sequences.dump());
  }
  if (differences.empty() && progress.fingerprint == data_fingerprint_) {
    if (!progress.files.is_null()) keep_checksums(progress.files, data_files_);
    return;
  }
  throw_bad_input(
      "{}: data.train holds other tokens than the checkpoint was trained on{}, so its position in them means nothing; "
      "restore the files, or train in another checkpoint.folder",
      checkpoint.path(), differences.empty() ? "" : fmt::format(" ({})", differences.front()));
}

// Reads what the checkpoint names of another: the frozen weights that it was trained beside.
void TrainingRun::restore_base(const LoadedCheckpoint& checkpoint) {
  if (has_base(checkpoint)) {
    LoadedCheckpoint whole = checkpoint;
    attach_base(whole, communicator_, config_.checkpoint.init_from);
    read_weights(whole, Weights::kOfModel);  // what is added comes with the rest
    use_base(describe_base(*whole.base(), config_.checkpoint.folder));
  } else if (config_.finetune.base != BaseFormat::kCompute) {
    throw_bad_input(
        "{}: names no checkpoint with the weights of finetune.base = {}; start a new run from it with "
        "checkpoint.init_from",
        checkpoint.path(), name_of(config_.finetune.base));
  }
  const std::string source = config_of(checkpoint).checkpoint.init_from;
  std::string& given = config_.checkpoint.init_from;
  const bool is_base = has_base(checkpoint) && is_named_by(given, base_.at("checkpoint").get<std::string>());
  if (!is_base && !is_same_source(source, given)) given = source;
}

std::vector<std::string> TrainingRun::read_tensors(const LoadedCheckpoint& checkpoint, bool converts_states) {
  const StateConversion conversion(checkpoint, declared_.optimizer, /*may_round=*/converts_states);
  std::unordered_map<std::string, NamedTensor> wanted;
  for (const NamedTensor& tensor : tensors()) {
    if (!conversion.covers(tensor.name)) wanted.emplace(tensor.name, tensor);
  }
  for (const SafetensorsEntry& entry : checkpoint.tensors()) {
    if (conversion.covers(entry.name)) continue;
    const auto found = wanted.find(entry.name);
    if (found == wanted.end())
      throw_bad_input("{}: has a tensor {} that this config does not have", checkpoint.path(), entry.name);
    const NamedTensor& tensor = found->second;
    if (entry.dtype != tensor.view.dtype || entry.shape != tensor.shape) {
      throw_bad_input("{}: {} is {} [{}], this config wants {} [{}]", checkpoint.path(), entry.name,
                      name_of(entry.dtype), fmt::join(entry.shape, ", "), name_of(tensor.view.dtype),
                      fmt::join(tensor.shape, ", "));
    }
  }
  std::vector<TensorRange> ranges;
  for (const auto& [name, tensor] : wanted) {
    if (checkpoint.find(name) == nullptr) throw_bad_input("{}: lacks the tensor {}", checkpoint.path(), name);
    for (int64_t i = 0; tensor.view.numel() > 0 && i < tensor.box.num_runs(); ++i) {
      ranges.push_back({name, tensor.box.run(i)});
    }
  }
  checkpoint.read_ranges(ranges, [&](const SafetensorsEntry& entry, int64_t first_element, ByteSpan bytes) {
    if (!all_finite(entry.dtype, bytes)) {
      throw_bad_input("{}: {} holds NaN or infinite values; resume from an earlier checkpoint (move this one away)",
                      checkpoint.path(), entry.name);
    }
    const NamedTensor& tensor = wanted.at(entry.name);
    auto* const target = static_cast<std::byte*>(tensor.view.data);
    device_.copy_to_device(target + tensor.box.place_of(first_element) * size_of(entry.dtype), bytes.data(),
                           static_cast<int64_t>(bytes.size()));
  });
  conversion.run(device_, declared_.optimizer);
  return conversion.zeroed();
}

std::vector<std::string> TrainingRun::restore(const LoadedCheckpoint& checkpoint, bool converts_states) {
  const SavedProgress progress = read_progress(checkpoint);
  ResumeDifferences found = check_resumable(checkpoint, config_, converts_states);
  std::vector<std::string> differences = std::move(found.allowed);
  check_data(checkpoint, progress);
  restore_base(checkpoint);
  for (const std::string& of_states : found.converted) differences.push_back(of_states + ", converted");
  for (std::string& state : read_tensors(checkpoint, !found.converted.empty()))
    differences.push_back(std::move(state));
  completed_steps_ = checkpoint.step();
  hashed_step_ = -1;
  applied_steps_ = progress.applied_steps;
  skipped_in_a_row_ = progress.skipped_in_a_row;
  last_norm_ = progress.last_norm;
  if (declared_.optimizer.releases_gradients()) declared_.optimizer.set_last_norm(device_, last_norm_);
  spikes_.restore(progress.recent_steps);
  start_loader(progress.position);
  bound_.weights_changed();
  return differences;
}

}  // namespace parka
