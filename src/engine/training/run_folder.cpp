#include "engine/training/run_folder.h"

#include <algorithm>
#include <climits>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/log/log.h"
#include "data/read_only_file.h"
#include "engine/checkpoint/checkpoint.h"
#include "engine/checkpoint/checkpoint_layout.h"
#include "engine/files/file_io.h"
#include "engine/files/json_text.h"

namespace parka {
namespace {

constexpr int64_t kMaxConfigBytes = 64 << 20;
// The name that a save by several ranks needs; numbers of steps, saves and ranks grow.
constexpr std::string_view kLongestName =
    "/step_1234567890.tmp/attempt_0123456789abcdef_1234567890.ranks/rank_123456.failed.tmp";

std::string config_path(const std::string& folder) { return folder + "/config.json"; }

bool has_been_run_in(const std::string& folder) {
  return file_exists(folder + "/lock") || !list_step_folders(folder).empty();
}

// True if this is how a run writes its config, also one of an older Parka, which had fewer keys: every section, and
// not a byte that the writer would not have put there.
bool is_resolved_config(const std::string& text) {
  const ordered_json root = parse_ordered_json_if_valid(text);
  if (!root.is_object() || root.dump(2) + "\n" != text) return false;
  constexpr const char* kSections[] = {"model", "precision", "optimizer", "data", "training", "checkpoint"};
  return std::ranges::all_of(kSections, [&](const char* section) {
    const auto found = root.find(section);
    return found != root.end() && found->is_object();
  });
}

// True if a run wrote a line of this file.
bool has_record_of_run(const std::string& path) {
  const InputFile file(path);
  bool found = file.num_bytes() == 0;
  for_each_line_from_end(file, [&](std::string_view line, int64_t /*begin*/) {
    const json record = parse_json_if_valid(line);
    found = record.is_object() && record.contains("kind") && record.contains("step");
    return !found;
  });
  return found;
}

void check_config(const std::string& folder, bool has_been_run, const std::string& config_text) {
  const std::string path = config_path(folder);
  if (!file_exists(path)) return;
  const std::string text = read_text(path, kMaxConfigBytes);
  if (text == config_text || (has_been_run && is_resolved_config(text))) return;
  throw_bad_input(
      "{}: was not written by a run, and a run keeps its resolved config under this name: rename the file, or "
      "choose another checkpoint.folder",
      path);
}

void check_metrics(const std::string& folder, bool has_been_run) {
  const std::string path = folder + "/metrics.jsonl";
  if (std::error_code ignored; file_exists(path) && !fs::is_regular_file(path, ignored)) {
    throw_bad_input("{}: is not a regular file, and a run must read its metrics again: remove it", path);
  }
  if (has_been_run || !file_exists(path) || has_record_of_run(path)) return;
  throw_bad_input(
      "{}: was not written by a run, and a run writes its metrics to this name: rename the file, or choose another "
      "checkpoint.folder",
      path);
}

// A run among data or the files of a model would be taken for a part of them, and be removed or copied with them.
void refuse_other_content(const std::string& folder) {
  constexpr std::string_view kExtensions[] = {".npy", ".bin", ".idx", ".parquet", ".pixels", ".safetensors"};
  for (const std::string& name : list_names(folder)) {
    const std::string extension = fs::path(name).extension().string();
    if (name != "data.json" && std::ranges::find(kExtensions, extension) == std::end(kExtensions)) continue;
    throw_bad_input("checkpoint.folder: {} has {}, as a folder of data or of a model; give the run one of its own",
                    folder, printable(name));
  }
}

// True if `name` turns up in the folder. A network file system may be late.
bool turns_up(const std::string& folder, const std::string& name, std::chrono::milliseconds patience) {
  const auto deadline = std::chrono::steady_clock::now() + patience;
  for (;;) {
    try {
      const std::vector<std::string> names = list_names(folder);
      if (std::ranges::find(names, name) != names.end()) return true;
    } catch (const Error&) {
      return false;  // no folder, or none that may be read
    }
    if (std::chrono::steady_clock::now() >= deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
}

// Removes its file in any case.
class MarkFile {
 public:
  explicit MarkFile(std::string path) : path_(std::move(path)) { OutputFile(path_).close(); }
  MarkFile& operator=(MarkFile&&) = delete;
  ~MarkFile() {
    std::error_code ignored;
    fs::remove(path_, ignored);
  }

 private:
  std::string path_;
};

}  // namespace

void check_run_folder(const std::string& folder, const std::string& config_text) {
  if (folder.size() + kLongestName.size() >= PATH_MAX) {
    throw_bad_input(
        "checkpoint.folder: its path has {} characters, at most {} are possible: a save needs names "
        "of {} more below it",
        folder.size(), PATH_MAX - 1 - kLongestName.size(), kLongestName.size());
  }
  const bool has_been_run = has_been_run_in(folder);
  check_config(folder, has_been_run, config_text);
  check_metrics(folder, has_been_run);
  if (!has_been_run && is_folder(folder)) refuse_other_content(folder);
}

void write_run_config(const std::string& folder, const std::string& config_text,
                      const std::string& file_of_command_line) {
  const std::string path = config_path(folder);
  std::error_code error;
  if (file_exists(path)) {
    if (read_text(path, kMaxConfigBytes) == config_text) return;
    if (fs::equivalent(path, file_of_command_line, error)) {
      log_info(
          "{}: stays as it is, because it is the config of this command; checkpoints hold the values of "
          "--set",
          path);
      return;
    }
  }
  replace_file(path, config_text);
}

void clear_write_tests(const std::string& folder) {
  for (const std::string& name : list_names(folder)) {
    std::error_code ignored;
    if (name.starts_with(kWriteTestPrefix)) fs::remove(fs::path(folder) / name, ignored);
  }
}

void require_one_folder(Launch& launch, const std::string& folder, std::chrono::milliseconds patience) {
  if (launch.size() == 1) return;
  const std::string name =
      fmt::format("{}{}", kWriteTestPrefix, launch.hosts().gather_text(make_save_id()).front());
  std::optional<MarkFile> mark;
  if (launch.rank() == 0) mark.emplace((fs::path(folder) / name).string());
  launch.hosts().barrier();
  std::error_code error;
  const std::string where = fmt::format("{}:{}", launch.host(), fs::absolute(folder, error).string());
  const bool seen = turns_up(folder, name, patience);
  const std::vector<std::string> answers = launch.hosts().gather_text((seen ? "+" : "-") + where);
  std::string blind;
  for (size_t rank = 0; rank < answers.size(); ++rank) {
    if (answers[rank].starts_with('+')) continue;
    blind += fmt::format("{}rank {} at {}", blind.empty() ? "" : ", ", rank, answers[rank].substr(1));
  }
  if (blind.empty()) return;
  throw_bad_input(
      "checkpoint.folder: the ranks do not see the same folder: rank 0 has {}, which differs from that of {}; "
      "give it as an absolute path on a file system that all hosts share",
      answers[0].substr(1), blind);
}

}  // namespace parka
