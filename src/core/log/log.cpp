#include "core/log/log.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <string_view>

#include <sys/ioctl.h>
#include <unistd.h>

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

std::string word_of(LogLevel level) {
  if (level == LogLevel::kInfo) return "";
  const bool is_warning = level == LogLevel::kWarning;
  const char* word = is_warning ? "warning:" : "error:";
  const bool is_plain = log_columns() == 0 || std::getenv("NO_COLOR") != nullptr;
  return is_plain ? fmt::format("{} ", word) : fmt::format("\x1b[{}m{}\x1b[0m ", is_warning ? 33 : 31, word);
}

constexpr const char* kLineStart = "\r\x1b[K";  // the beginning of a line, whose rest is erased

std::atomic<int64_t> num_warnings = 0;

}  // namespace

void log_to_stderr(bool with_times) {
  spdlog::set_default_logger(spdlog::stderr_logger_mt("parka"));
  spdlog::set_pattern(line_start() + (with_times ? "%Y-%m-%d %H:%M:%S %v" : "%v"));
}

size_t terminal_columns(int file) {
  winsize size = {};
  return isatty(file) != 0 && ioctl(file, TIOCGWINSZ, &size) == 0 ? size.ws_col : 0;
}

size_t log_columns() {
  const char* kind = std::getenv("TERM");
  const bool is_dumb = kind == nullptr || std::string_view(kind) == "dumb";
  return is_dumb ? 0 : terminal_columns(STDERR_FILENO);
}

std::string line_start() { return log_columns() > 0 ? kLineStart : ""; }

void show_line(const std::string& line) {
  const size_t columns = log_columns();
  if (columns == 0 || !spdlog::should_log(spdlog::level::info)) return;
  std::string shown = as_line(line);
  shown.resize(std::min(shown.size(), columns - 1));
  std::fprintf(stderr, "%s%s", kLineStart, shown.c_str());
  std::fflush(stderr);
}

void log_from(LogLevel level) { spdlog::set_level(level_of(level)); }

void flush_log() { spdlog::default_logger()->flush(); }

std::string as_line(const std::string& text) {
  constexpr size_t kLongest = 4000, kKeptAtEnd = 1000;
  const auto is_inside = [&](size_t at) { return (static_cast<unsigned char>(text[at]) & 0xC0) == 0x80; };
  size_t first_cut = text.size(), last_cut = text.size();
  if (text.size() > kLongest) {
    for (first_cut = kLongest - kKeptAtEnd; first_cut > 0 && is_inside(first_cut);) --first_cut;
    for (last_cut = text.size() - kKeptAtEnd; last_cut < text.size() && is_inside(last_cut);) ++last_cut;
  }
  std::string line;
  for (size_t i = 0; i < text.size(); ++i) {
    if (i == first_cut && first_cut < last_cut) {
      line += " ... ";
      i = last_cut;
      if (i == text.size()) break;
    }
    const auto c = static_cast<unsigned char>(text[i]);
    // U+0080 to U+009F are control characters, too.
    const bool is_wide_control =
        c == 0xC2 && i + 1 < text.size() && is_inside(i + 1) && static_cast<unsigned char>(text[i + 1]) < 0xA0;
    if (c == '\n' || c == '\r' || c == '\t') {
      line += ' ';
    } else if (c < 0x20 || c == 0x7f) {
      line += fmt::format("\\x{:02x}", c);
    } else if (is_wide_control) {
      line += fmt::format("\\x{:02x}", static_cast<unsigned char>(text[++i]));
    } else {
      line += text[i];
    }
  }
  return line;
}

std::string warnings_above() {
  const int64_t warnings = num_warnings;
  return warnings == 0 ? "" : fmt::format("; {} warning{}, see above", warnings, warnings == 1 ? "" : "s");
}

void log_line(LogLevel level, const std::string& line) {
  if (level == LogLevel::kWarning) ++num_warnings;
  const std::string worded = word_of(level) + as_line(line);
  spdlog::log(level_of(level), spdlog::string_view_t(worded));
}

void log_formatted(LogLevel level, fmt::string_view format, fmt::format_args args) {
  if (spdlog::should_log(level_of(level))) log_line(level, fmt::vformat(format, args));
}

}  // namespace parka
