#include "engine/metrics_log.h"

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <limits>
#include <string_view>
#include <system_error>
#include <utility>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/error.h"

namespace parka {
namespace {

FileDescriptor open_for_adding(const std::string& path) {
  const int fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
  if (fd == -1) throw_open_error("open", path, errno);
  return FileDescriptor(fd);
}

bool is_of_later_step(const nlohmann::json& record, int64_t step) {
  const auto it = record.find("step");
  return it != record.end() && it->is_number_integer() && *it > step;
}

}  // namespace

MetricsLog::MetricsLog(std::string path, MetricsHooks hooks)
    : path_(std::move(path)), hooks_(std::move(hooks)), file_(open_for_adding(path_)) {}

void MetricsLog::follow_path() {
  if (is_at(file_.get(), path_)) return;
  if (hooks_.check_folder) hooks_.check_folder();
  file_ = open_for_adding(path_);
  if (hooks_.report) {
    hooks_.report(fmt::format(
        "{}: was removed, moved or replaced while the run goes on; further records go to the file of this name",
        path_));
  }
}

void MetricsLog::write(const nlohmann::ordered_json& record) {
  constexpr auto kReplaceBadText = nlohmann::ordered_json::error_handler_t::replace;
  follow_path();
  const std::string line = record.dump(-1, ' ', false, kReplaceBadText) + '\n';
  const off_t end_before = ::lseek(file_.get(), 0, SEEK_END);
  try {
    write_fully(file_.get(), as_bytes(line), path_);
  } catch (const Error&) {
    // A full disk may have taken half of the line; where that cannot be undone truncate_after will.
    if (end_before == -1 || ::ftruncate(file_.get(), end_before) == -1) throw;
    throw;
  }
}

MetricsLog::Removed MetricsLog::truncate_after(const std::string& path, int64_t step) {
  Removed removed;
  std::error_code error;
  if (!std::filesystem::exists(path, error)) return removed;
  const std::string all = read_text(path, std::numeric_limits<int64_t>::max());
  std::string kept;
  for (size_t begin = 0; begin < all.size();) {
    const size_t end = std::min(all.find('\n', begin), all.size());
    const std::string_view line(all.data() + begin, end - begin);
    begin = end + 1;
    const auto record = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (!record.is_object()) {
      ++removed.unreadable;
    } else if (is_of_later_step(record, step)) {
      ++removed.later;
    } else {
      kept.append(line) += '\n';
    }
  }
  if (kept != all) replace_file(path, kept);
  return removed;
}

}  // namespace parka
