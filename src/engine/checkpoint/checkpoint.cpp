#include "engine/checkpoint/checkpoint.h"

#include <algorithm>
#include <filesystem>
#include <tuple>
#include <utility>

#include "core/error.h"
#include "core/heartbeat.h"
#include "core/log/log.h"
#include "core/parallel.h"
#include "engine/checkpoint/checkpoint_index.h"
#include "engine/checkpoint/checkpoint_layout.h"
#include "engine/checkpoint/checkpoint_verify.h"
#include "engine/files/json_text.h"

namespace parka {
namespace {

// Checkpoints that are removed while they are read, one after the other: the run that saves is faster than we are.
constexpr int kMaxRemoved = 20;

// Runs `action` on every rank. All get the texts that it returned, or throw what the lowest failing rank threw.
std::vector<std::string> agree(Communicator& ranks, const std::function<std::string()>& action) {
  if (ranks.size() == 1) return {action()};
  json outcome;
  try {
    outcome = {{"text", action()}};
  } catch (const UnknownVersion& e) {
    outcome = {{"code", static_cast<int>(e.code())}, {"message", e.what()}, {"unknown_version", true}};
  } catch (const Error& e) {
    outcome = {{"code", static_cast<int>(e.code())}, {"message", e.what()}};
  } catch (const std::exception& e) {
    outcome = {{"code", static_cast<int>(ExitCode::kInternal)}, {"message", e.what()}};
  }
  // A path in a message need not be UTF-8.
  const std::vector<std::string> outcomes =
      ranks.gather_text(outcome.dump(-1, ' ', false, json::error_handler_t::replace));
  std::vector<std::string> texts;
  texts.reserve(outcomes.size());
  for (const std::string& encoded : outcomes) {
    const json other = json::parse(encoded);
    if (other.contains("message")) {
      const std::string message = fmt::format("rank {}: {}", texts.size(), other.at("message").get<std::string>());
      if (other.contains("unknown_version")) throw UnknownVersion(message);
      throw Error(static_cast<ExitCode>(other.at("code").get<int>()), message);
    }
    texts.push_back(other.at("text").get<std::string>());
  }
  return texts;
}

// The rank that verifies each file: files go, in their order, to the rank that has the fewest bytes so far.
std::vector<int> share_out(const std::vector<Manifest::File>& files, int num_ranks) {
  std::vector<int64_t> bytes(static_cast<size_t>(num_ranks));
  std::vector<int> ranks;
  ranks.reserve(files.size());
  for (const Manifest::File& file : files) {
    const auto least = std::ranges::min_element(bytes);
    *least += file.num_bytes;
    ranks.push_back(static_cast<int>(least - bytes.begin()));
  }
  return ranks;
}

// Reads this rank's share of the files; the block sums of each file, empty for those of other ranks.
std::vector<std::string> verify_share(const std::vector<VerifiedFile>& files, const Manifest& manifest,
                                      Communicator& ranks) {
  const std::vector<int> readers = share_out(manifest.files, ranks.size());
  std::vector<std::string> sums(files.size());
  int64_t own_bytes = 0;
  for (size_t i = 0; i < files.size(); ++i) own_bytes += readers[i] == ranks.rank() ? files[i].num_bytes : 0;
  WorkProgress progress(fmt::format("verifying a checkpoint of {:.1f} GB", 1e-9 * static_cast<double>(own_bytes)),
                        own_bytes);
  parallel_for(static_cast<int64_t>(files.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (readers[i] != ranks.rank()) continue;
      const std::string& expected = manifest.files[i].checksum;
      sums[i] = files[i].opened ? verify_file(*files[i].opened, expected, progress)
                                : verify_file(InputFile(files[i].path, NoPermission::kIsIo), expected, progress);
    }
  });
  return sums;
}

// Rank 0's list of checkpoints, so that all look at the same folders.
std::vector<CheckpointInfo> list_together(const std::string& folder, Communicator& ranks) {
  // Paths need not be UTF-8, names of step folders are.
  std::vector<CheckpointInfo> checkpoints;
  const std::vector<std::string> lists = agree(ranks, [&] {
    if (ranks.rank() == 0) checkpoints = list_checkpoints(folder);
    json names = json::array();
    for (const CheckpointInfo& checkpoint : checkpoints) {
      names.push_back(std::filesystem::path(checkpoint.path).filename().string());
    }
    return names.dump();
  });
  if (ranks.rank() == 0) return checkpoints;
  for (const json& name : json::parse(lists[0])) {
    const auto step_folder = parse_step_folder_name(name.get<std::string>());
    PARKA_REQUIRE(step_folder);
    checkpoints.push_back({step_folder->step, step_folder_path(folder, step_folder->step, step_folder->kind)});
  }
  return checkpoints;
}

// The identity of a checkpoint: a checksum of those of all its bytes. Through a cache of a network file system
// ranks might see different saves of one step.
std::string identity_of(const Manifest& manifest) {
  const json identity = {
      {"step", manifest.step}, {"attempt", manifest.attempt}, {"files", encode_files(manifest.files)}};
  Checksum checksum;
  checksum.update(as_bytes(identity.dump()));
  return checksum.hex();
}

// The manifest and the files with their block sums, once all files were verified by one of the ranks.
std::pair<Manifest, std::vector<VerifiedFile>> verify_together(const std::string& path, Communicator& ranks) {
  Manifest manifest;
  std::vector<VerifiedFile> files;
  const std::vector<std::string> shares = agree(ranks, [&] {
    manifest = read_manifest(path);
    for (const Manifest::File& file : manifest.files) {
      files.push_back({(std::filesystem::path(path) / file.name).string(), file.num_bytes});
      if (files.size() > kMaxOpenFiles) continue;
      files.back().opened = std::make_shared<const InputFile>(files.back().path, NoPermission::kIsIo);
    }
    const std::vector<std::string> sums = verify_share(files, manifest, ranks);
    return json{{"identity", identity_of(manifest)}, {"sums", sums}}.dump();
  });
  const std::string identity = identity_of(manifest);
  for (const std::string& encoded : shares) {
    const json share = json::parse(encoded);
    if (share.at("identity") != identity) {
      throw_bad_input("{}: the ranks do not see the same checkpoint there; is it being replaced?", path);
    }
    for (size_t i = 0; i < files.size(); ++i) files[i].block_sums += share.at("sums").at(i).get<std::string>();
  }
  return {std::move(manifest), std::move(files)};
}

// Reads the headers of all files and checks that they hold what the manifest says.
CheckpointIndex read_index(const std::string& path, const std::vector<VerifiedFile>& verified,
                           int64_t num_tensors) {
  std::vector<CheckpointFile> files;
  files.reserve(verified.size());
  VerifiedReader reader(verified);
  for (size_t i = 0; i < verified.size(); ++i) {
    const auto read = [&](int64_t offset, std::span<std::byte> out) { reader.read(i, offset, out); };
    files.push_back({verified[i].path, read_safetensors_header(read, verified[i].num_bytes, verified[i].path)});
  }
  CheckpointIndex index = index_tensors(files);
  if (static_cast<int64_t>(index.tensors.size()) != num_tensors) {
    throw_bad_input("{}: its files hold {} tensors, its manifest says {}", path, index.tensors.size(), num_tensors);
  }
  return index;
}

// A part of a tensor that lies in one piece in a file and is not too large.
struct Read {
  size_t file = 0;
  int64_t offset = 0;
  size_t tensor = 0;
  ElementRange elements;
};

// Appends what is to be read for `elements` of a tensor.
void plan_reads(const CheckpointIndex& index, size_t tensor, ElementRange elements, std::vector<Read>& reads) {
  const int64_t element_bytes = size_of(index.tensors[tensor].dtype);
  const int64_t max_elements = LoadedCheckpoint::kMaxPieceBytes / element_bytes;
  const auto& pieces = index.pieces[tensor];
  auto piece = std::ranges::upper_bound(pieces, elements.begin, {}, [](const auto& p) { return p.range.end; });
  for (; piece != pieces.end() && piece->range.begin < elements.end; ++piece) {
    const int64_t end = std::min(piece->range.end, elements.end);
    for (int64_t begin = std::max(piece->range.begin, elements.begin); begin < end; begin += max_elements) {
      reads.push_back({piece->file,
                       piece->offset + (begin - piece->range.begin) * element_bytes,
                       tensor,
                       {begin, std::min(begin + max_elements, end)}});
    }
  }
}

// Reads that lie close together and are made at once: `num_reads` of them, in whole blocks of a file.
struct Window {
  BlockRange blocks;
  size_t num_reads = 0;
};

// Enough blocks for all threads, each several.
constexpr int64_t kWindowBytes = 32 << 20;

// The windows of reads in the order of the files. A block that is not wanted is in none.
std::vector<Window> plan_windows(const std::vector<Read>& reads, const std::vector<SafetensorsEntry>& tensors,
                                 const std::vector<VerifiedFile>& files) {
  std::vector<Window> windows;
  for (const Read& read : reads) {
    const int64_t end = read.offset + read.elements.size() * size_of(tensors[read.tensor].dtype);
    const BlockRange blocks = blocks_around(read.file, files[read.file].num_bytes, read.offset, end);
    if (!windows.empty()) {
      Window& last = windows.back();
      const int64_t joined_end = std::max(last.blocks.end, blocks.end);
      if (blocks.file == last.blocks.file && blocks.begin <= last.blocks.end &&
          joined_end - last.blocks.begin <= kWindowBytes) {
        last.blocks.end = joined_end;
        ++last.num_reads;
        continue;
      }
    }
    windows.push_back({blocks, 1});
  }
  return windows;
}

}  // namespace

std::vector<CheckpointInfo> list_checkpoints(const std::string& folder) {
  std::vector<CheckpointInfo> checkpoints;
  for (const StepFolder& found : list_step_folders(folder)) {
    if (found.kind == StepFolderKind::kComplete || found.kind == StepFolderKind::kDisplaced) {
      checkpoints.push_back({found.step, step_folder_path(folder, found.step, found.kind)});
    }
  }
  return checkpoints;
}

LoadedCheckpoint load_checkpoint(const std::string& path, Communicator& ranks) {
  auto [manifest, files] = verify_together(path, ranks);
  CheckpointIndex index;
  agree(ranks, [&, num_tensors = manifest.num_tensors, &verified = files] {
    index = read_index(path, verified, num_tensors);
    return std::string();
  });
  LoadedCheckpoint loaded;
  loaded.step_ = manifest.step;
  loaded.path_ = path;
  loaded.state_ = std::move(manifest.state);
  loaded.files_ = std::make_shared<const std::vector<VerifiedFile>>(std::move(files));
  loaded.index_ = std::make_shared<const CheckpointIndex>(std::move(index));
  return loaded;
}

const std::vector<SafetensorsEntry>& LoadedCheckpoint::tensors() const {
  return base_ ? with_base_ : index_->tensors;
}

void LoadedCheckpoint::set_base(std::shared_ptr<const LoadedCheckpoint> base,
                                const std::vector<std::string>& names) {
  base_ = std::move(base);
  with_base_ = index_->tensors;
  for (const std::string& name : names) {
    const SafetensorsEntry* tensor = base_->find(name);
    if (tensor == nullptr) throw_bad_input("{}: lacks the tensor {}", base_->path(), printable(name));
    with_base_.push_back(*tensor);
    of_base_.insert(name);
  }
}

const SafetensorsEntry* LoadedCheckpoint::find(const std::string& name) const {
  if (of_base_.contains(name)) return base_->find(name);
  const auto found = index_->by_name.find(name);
  return found == index_->by_name.end() ? nullptr : &index_->tensors[found->second];
}

void LoadedCheckpoint::read_elements(const SafetensorsEntry& tensor, ElementRange range,
                                     std::span<std::byte> bytes) const {
  const int64_t size = size_of(tensor.dtype);
  PARKA_REQUIRE(static_cast<int64_t>(bytes.size()) == range.size() * size);
  read_ranges({{tensor.name, range}}, [&](const SafetensorsEntry&, int64_t first_element, ByteSpan piece) {
    std::memcpy(bytes.data() + (first_element - range.begin) * size, piece.data(), piece.size());
  });
}

std::vector<std::byte> LoadedCheckpoint::read(const SafetensorsEntry& tensor) const {
  std::vector<std::byte> bytes(static_cast<size_t>(tensor.num_bytes));
  read_elements(tensor, {0, num_elements_of(tensor.shape)}, bytes);
  return bytes;
}

void LoadedCheckpoint::read_ranges(const std::vector<TensorRange>& ranges, const RangeCallback& callback) const {
  std::vector<TensorRange> own = ranges, of_base;
  for (const TensorRange& range : ranges) {
    if (of_base_.contains(range.name)) of_base.push_back(range);
  }
  std::erase_if(own, [&](const TensorRange& range) { return of_base_.contains(range.name); });
  read_own_ranges(own, callback);
  if (!of_base.empty()) base_->read_ranges(of_base, callback);
}

void LoadedCheckpoint::read_own_ranges(const std::vector<TensorRange>& ranges,
                                       const RangeCallback& callback) const {
  std::vector<Read> reads;
  for (const TensorRange& range : ranges) {
    const SafetensorsEntry* tensor = find(range.name);
    if (tensor == nullptr) throw_bad_input("{}: lacks the tensor {}", path_, printable(range.name));
    const ElementRange& elements = range.elements;
    PARKA_REQUIRE(elements.begin >= 0 && elements.begin <= elements.end &&
                  elements.end <= num_elements_of(tensor->shape));
    plan_reads(*index_, static_cast<size_t>(tensor - index_->tensors.data()), elements, reads);
  }
  std::ranges::sort(
      reads, [](const Read& a, const Read& b) { return std::tie(a.file, a.offset) < std::tie(b.file, b.offset); });
  const std::vector<Window> windows = plan_windows(reads, index_->tensors, *files_);
  std::vector<BlockRange> blocks;
  blocks.reserve(windows.size());
  for (const Window& window : windows) blocks.push_back(window.blocks);
  WorkProgress progress("reading a checkpoint", static_cast<int64_t>(blocks.size()));
  BlockReadAhead reader(*files_, std::move(blocks));
  auto read = reads.begin();
  for (const Window& window : windows) {
    const ByteSpan bytes = reader.next();
    heartbeat();
    progress.add(1);
    for (size_t i = 0; i < window.num_reads; ++i, ++read) {
      const SafetensorsEntry& tensor = index_->tensors[read->tensor];
      callback(tensor, read->elements.begin,
               bytes.subspan(static_cast<size_t>(read->offset - window.blocks.begin),
                             static_cast<size_t>(read->elements.size() * size_of(tensor.dtype))));
    }
  }
}

std::optional<LoadedCheckpoint> load_newest(const std::string& folder,
                                            const std::function<void(const std::string& message)>& report,
                                            Communicator& ranks, std::vector<CheckpointInfo>* refused) {
  std::vector<CheckpointInfo> checkpoints = list_together(folder, ranks);
  size_t num_refused = 0;
  for (int num_removed = 0; num_refused < checkpoints.size();) {
    const CheckpointInfo checkpoint = checkpoints[num_refused];
    try {
      LoadedCheckpoint loaded = load_checkpoint(checkpoint.path, ranks);
      if (refused)
        refused->assign(checkpoints.begin(), checkpoints.begin() + static_cast<std::ptrdiff_t>(num_refused));
      return loaded;
    } catch (const UnknownVersion&) {
      throw;
    } catch (const Error& e) {
      if (e.code() != ExitCode::kBadInput) {
        throw Error(e.code(),
                    fmt::format("checkpoint of step {} could not be read: {}; no older one is used in its "
                                "place; try again, or move it away",
                                checkpoint.step, e.what()));
      }
      std::vector<CheckpointInfo> now = list_together(folder, ranks);
      if (std::ranges::find(now, checkpoint) == now.end() && ++num_removed <= kMaxRemoved) {
        checkpoints = std::move(now);
        num_refused = 0;
        continue;
      }
      if (report) report(fmt::format("checkpoint of step {} refused: {}", checkpoint.step, e.what()));
      ++num_refused;
    }
  }
  if (checkpoints.empty()) return std::nullopt;
  throw_bad_input(
      "{}: none of its {} checkpoints can be loaded (reasons above); restore one from a backup, or move its step_* "
      "folders away to train from the start",
      folder, checkpoints.size());
}

void set_refused_aside(const std::vector<CheckpointInfo>& refused) {
  for (const CheckpointInfo& checkpoint : refused) {
    log_warning(
        "the run resumes from an older checkpoint; the refused one is now {}, which is never loaded and never "
        "removed",
        set_aside(checkpoint.path));
  }
  if (!refused.empty()) sync_directory(std::filesystem::path(refused[0].path).parent_path().string());
}

}  // namespace parka
