#include "engine/training/metrics_log.h"

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <limits>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/error.h"

namespace parka {
namespace {

namespace fs = std::filesystem;

FileDescriptor open_for_adding(const std::string& path) {
  const int fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
  if (fd == -1) throw_open_error("open", path, errno);
  return FileDescriptor(fd);
}

void for_each_line(std::string_view all, const std::function<void(std::string_view line)>& action) {
  for (size_t begin = 0; begin < all.size();) {
    const size_t end = std::min(all.find('\n', begin), all.size());
    action(all.substr(begin, end - begin));
    begin = end + 1;
  }
}

bool is_train_record(const nlohmann::json& record) {
  return record.is_object() && record.value("kind", nlohmann::json()) == "train" && record.contains("step") &&
         record["step"].is_number_integer();
}

bool is_of_step(const nlohmann::json& record, int64_t step) {
  const auto at = record.find("step");
  return at != record.end() && *at == step;
}

// Renames the file to the first of FILE.1, FILE.2, ... that there is not; returns that name.
std::string keep_beside(const std::string& file) {
  std::string kept;
  for (int i = 1; kept.empty() || fs::exists(fs::symlink_status(kept)); ++i) kept = fmt::format("{}.{}", file, i);
  rename_path(file, kept);
  return kept;
}

std::string line_of(const nlohmann::ordered_json& record) {
  constexpr auto kReplaceBadText = nlohmann::ordered_json::error_handler_t::replace;
  return record.dump(-1, ' ', false, kReplaceBadText) + '\n';
}

bool is_of_later_step(const nlohmann::json& record, int64_t step) {
  const auto it = record.find("step");
  return it != record.end() && it->is_number_integer() && *it > step;
}

}  // namespace

std::string evaluated(const nlohmann::json& record) {
  const auto text = [&](const char* key) {
    const auto found = record.find(key);
    return found != record.end() && found->is_string() ? found->get<std::string>() : "";
  };
  const std::string kind = text("kind");
  if (kind == "eval") return "data.eval";
  if (kind == "eval_set") return "set " + text("set");
  return kind == "task" ? "task " + text("task") : "";
}

MetricsLog::MetricsLog(std::string path, MetricsHooks hooks)
    : path_(std::move(path)), hooks_(std::move(hooks)), file_(open_for_adding(path_)) {}

void MetricsLog::follow_path() {
  if (is_at(file_.get(), path_)) return;
  if (hooks_.check_folder) hooks_.check_folder();
  file_ = open_for_adding(path_);
  if (hooks_.report) {
    hooks_.report(fmt::format(
        "{}: was removed, moved or replaced during the run; further records go to a new file of this name", path_));
  }
}

void MetricsLog::append(const std::string& lines) {
  const off_t end_before = ::lseek(file_.get(), 0, SEEK_END);
  try {
    write_fully(file_.get(), as_bytes(end_before == 0 && !first_.empty() ? first_ + lines : lines), path_);
  } catch (const Error&) {
    // A full disk may have taken half of the line; where that cannot be undone truncate_after will.
    if (end_before == -1 || ::ftruncate(file_.get(), end_before) == -1) throw;
    throw;
  }
}

void MetricsLog::write(const nlohmann::ordered_json& record) {
  const std::lock_guard lock(mutex_);
  follow_path();
  append(line_of(record));
}

void MetricsLog::write_first(const nlohmann::ordered_json& record) {
  write(record);
  const std::lock_guard lock(mutex_);
  first_ = line_of(record);
}

void MetricsLog::sync() {
  const std::lock_guard lock(mutex_);
  // EINVAL: nothing that could be made durable, as /dev/null.
  if (::fdatasync(file_.get()) == -1 && errno != EINVAL) throw_io_error("sync", path_, errno);
}

MetricsLog::Truncated MetricsLog::truncate_after(const std::string& path, int64_t step,
                                                 const std::set<std::string>& made_again) {
  Truncated result;
  std::error_code error;
  const bool is_there = fs::exists(path, error);
  const std::string all = is_there ? read_text(path, std::numeric_limits<int64_t>::max()) : "";
  std::string kept;
  std::vector<bool> has_record(static_cast<size_t>(step) + 1);  // of a training step
  for_each_line(all, [&](std::string_view line) {
    const auto record = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (!record.is_object()) {
      ++result.unreadable;
    } else if (is_of_later_step(record, step)) {
      ++result.later;
    } else if (is_of_step(record, step) && made_again.contains(evaluated(record))) {
      ++result.evaluations;
    } else {
      kept.append(line) += '\n';
      if (!is_train_record(record)) return;
      const auto of_step = record["step"].get<int64_t>();
      if (of_step >= 0) has_record[static_cast<size_t>(of_step)] = true;
    }
  });
  for (int64_t i = 1; i <= step; ++i) {
    if (has_record[static_cast<size_t>(i)]) continue;
    ++result.missing;
    result.last_missing = i;
    if (result.first_missing == 0) result.first_missing = i;
  }
  if (result.unreadable > 0 && kept.empty() && result.later == 0 && result.evaluations == 0) {
    result.set_aside = keep_beside(fs::canonical(path));
  } else if (kept != all) {
    replace_file(fs::canonical(path), kept);
  }
  return result;
}

std::string MetricsLog::begin_anew(const std::string& path) {
  std::error_code error;
  if (!fs::exists(path, error)) return {};
  const std::string all = read_text(path, std::numeric_limits<int64_t>::max());
  bool has_steps = false;
  for_each_line(all, [&](std::string_view line) {
    has_steps = has_steps || is_train_record(nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false));
  });
  const std::string file = fs::canonical(path);
  if (!has_steps) {
    if (!all.empty()) replace_file(file, "");
    return {};
  }
  return keep_beside(file);
}

}  // namespace parka
