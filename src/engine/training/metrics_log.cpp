#include "engine/training/metrics_log.h"

#include <algorithm>
#include <cerrno>
#include <string_view>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/error.h"
#include "core/log/log.h"
#include "engine/files/json_text.h"

namespace parka {
namespace {

FileDescriptor open_for_adding(const std::string& path) {
  const int fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
  if (fd == -1) throw_open_error("open", path, errno);
  return FileDescriptor(fd);
}

bool is_train_record(const json& record) {
  return record.is_object() && record.value("kind", json()) == "train" && record.contains("step") &&
         record["step"].is_number_integer();
}

bool is_of_step(const json& record, int64_t step) {
  const auto at = record.find("step");
  return at != record.end() && *at == step;
}

bool ends_with_line_end(const InputFile& file) {
  char last = '\n';
  if (file.num_bytes() > 0) file.read(file.num_bytes() - 1, std::as_writable_bytes(std::span(&last, 1)));
  return last == '\n';
}

// Renames the file to the first of FILE.1, FILE.2, ... that there is not; returns that name.
std::string keep_beside(const std::string& file) {
  std::string kept;
  for (int i = 1; kept.empty() || fs::exists(fs::symlink_status(kept)); ++i) kept = fmt::format("{}.{}", file, i);
  rename_path(file, kept);
  return kept;
}

std::string line_of(const ordered_json& record) {
  constexpr auto kReplaceBadText = ordered_json::error_handler_t::replace;
  return record.dump(-1, ' ', false, kReplaceBadText) + '\n';
}

bool is_of_later_step(const json& record, int64_t step) {
  const auto it = record.find("step");
  return it != record.end() && it->is_number_integer() && *it > step;
}

// How many bytes from the end are looked at, and more up to a record of training of an earlier step: what is before
// was looked at by an earlier start, and the file of a long run takes a minute to parse.
constexpr int64_t kLooked = int64_t{16} << 20;

// The records that a resumed run takes out of the end of its metrics.
class MetricsEnd {
 public:
  MetricsEnd(const InputFile& file, int64_t step, const std::set<std::string>& made_again)
      : step_(step), made_again_(made_again) {
    for_each_line_from_end(file, [&](std::string_view line, int64_t begin) {
      const bool goes_on = take(line, file.num_bytes() - begin > kLooked);
      untouched_ = goes_on ? 0 : begin;
      return goes_on;
    });
    std::ranges::reverse(lines_);
    find_missing();
  }

  bool removes() const { return result.unreadable + result.later + result.evaluations > 0; }
  // True if it has no record at all.
  bool is_foreign() const {
    return result.unreadable > 0 && lines_.empty() && result.later == 0 && result.evaluations == 0;
  }

  void write(const InputFile& file, OutputFile& out) const {
    copy_bytes(file, 0, untouched_, out);
    for (const std::string& line : lines_) out.write(as_bytes(line + "\n"));
  }

  MetricsLog::Truncated result;

 private:
  // Returns false where no line before this one needs a look.
  bool take(std::string_view line, bool is_far) {
    const json record = parse_json_if_valid(line);
    if (!record.is_object()) {
      ++result.unreadable;
    } else if (is_of_later_step(record, step_)) {
      ++result.later;
    } else if (is_of_step(record, step_) && made_again_.contains(evaluated(record))) {
      ++result.evaluations;
    } else {
      lines_.emplace_back(line);
      if (is_train_record(record)) trained_.insert(record["step"].get<int64_t>());
      return !is_far || trained_.empty() || *trained_.begin() >= step_;
    }
    return true;
  }

  // Finds those behind the oldest step that was looked at, or behind the first if the look came to the beginning.
  void find_missing() {
    const int64_t first = untouched_ > 0 ? *trained_.begin() : 1;
    for (int64_t i = std::max<int64_t>(first, 1); i <= step_; ++i) {
      if (trained_.contains(i)) continue;
      ++result.missing;
      result.last_missing = i;
      if (result.first_missing == 0) result.first_missing = i;
    }
  }

  const int64_t step_;
  const std::set<std::string>& made_again_;
  std::vector<std::string> lines_;  // that stay, behind the first `untouched_` bytes
  int64_t untouched_ = 0;
  std::set<int64_t> trained_;
};

}  // namespace

std::string evaluated(const json& record) {
  const auto text = [&](const char* key) {
    const auto found = record.find(key);
    return found != record.end() && found->is_string() ? found->get<std::string>() : "";
  };
  const std::string kind = text("kind");
  if (kind == "eval") return "data.eval";
  if (kind == "eval_set") return "set " + text("set");
  if (kind == "sample") return "sample " + text("prompt");
  return kind == "task" ? "task " + text("task") : "";
}

MetricsLog::MetricsLog(std::string path, const RunLock* lock)
    : path_(std::move(path)), lock_(lock), file_(open_for_adding(path_)) {}

void MetricsLog::follow_path() {
  if (is_at(file_.get(), path_)) return;
  if (lock_ != nullptr) lock_->require_ours();
  file_ = open_for_adding(path_);
  log_warning("{}: was removed, moved or replaced during the run; further records go to a new file of this name",
              path_);
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

void MetricsLog::write(const ordered_json& record) {
  const std::lock_guard lock(mutex_);
  follow_path();
  append(line_of(record));
}

void MetricsLog::write_first(const ordered_json& record) {
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
  if (!file_exists(path)) {
    Truncated nothing;
    nothing.missing = step;
    if (step > 0) nothing.first_missing = 1, nothing.last_missing = step;
    return nothing;
  }
  const InputFile file(fs::canonical(path));
  MetricsEnd end(file, step, made_again);
  if (end.is_foreign()) {
    end.result.set_aside = keep_beside(file.path());
  } else if (end.removes() || !ends_with_line_end(file)) {
    replace_file(file.path(), [&](OutputFile& out) { end.write(file, out); });
  }
  return end.result;
}

std::string MetricsLog::begin_anew(const std::string& path) {
  if (!file_exists(path)) return {};
  const InputFile file(fs::canonical(path));
  bool has_steps = false;
  for_each_line_from_end(file, [&](std::string_view line, int64_t /*begin*/) {
    has_steps = is_train_record(parse_json_if_valid(line));
    return !has_steps;
  });
  if (has_steps) return keep_beside(file.path());
  if (file.num_bytes() > 0) replace_file(file.path(), "");
  return {};
}

}  // namespace parka
