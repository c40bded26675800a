#include "core/log/log.h"

#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

namespace parka {
namespace {

spdlog::level::level_enum level_of(LogLevel level) {
  switch (level) {
    case LogLevel::kInfo: return spdlog::level::info;
    case LogLevel::kWarning: return spdlog::level::warn;
    case LogLevel::kError: break;
  }
  return spdlog::level::err;
}

}  // namespace

void log_to_stderr(bool with_times) {
  spdlog::set_default_logger(spdlog::stderr_logger_mt("parka"));
  spdlog::set_pattern(with_times ? "%Y-%m-%d %H:%M:%S %v" : "%v");
}

void log_from(LogLevel level) { spdlog::set_level(level_of(level)); }

void flush_log() { spdlog::default_logger()->flush(); }

void log_line(LogLevel level, const std::string& line) {
  spdlog::log(level_of(level), spdlog::string_view_t(line));
}

void log_formatted(LogLevel level, fmt::string_view format, fmt::format_args args) {
  if (spdlog::should_log(level_of(level))) log_line(level, fmt::vformat(format, args));
}

}  // namespace parka
