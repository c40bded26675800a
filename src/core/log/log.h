#pragma once
#include <string>

#include <fmt/format.h>

// The log of a process: lines on stderr once log_to_stderr() was called, on stdout before. spdlog writes them; its
// headers would take the compiler seconds in each file. Any thread may call any of it.
namespace parka {

enum class LogLevel { kInfo, kWarning, kError };

// Lines of warnings and errors begin with that word, in colour on a terminal: who looks for them finds all of them.
// From now on lines go to stderr, with date and time before each where that is wanted.
void log_to_stderr(bool with_times);
// Lines below this level are left out.
void log_from(LogLevel level);
void flush_log();

// Columns of the terminal behind a file descriptor; 0: there is none. log_columns() is that of the log.
size_t terminal_columns(int file);
size_t log_columns();
// Shows a line on the log's terminal until the next line of the log, or another such one, takes its place.
void show_line(const std::string& line);
// What to print before a line that does not go through the log, to take such a place: empty where there is none.
std::string line_start();

// "; 2 warnings, see above" for the last line of a log, where there were any; else nothing.
std::string warnings_above();

// `text`, which may quote what comes from anywhere, for a terminal: control characters are escaped, or blanks where
// they end lines, and of a very long text the middle is left out.
std::string as_line(const std::string& text);

void log_line(LogLevel level, const std::string& line);
void log_formatted(LogLevel level, fmt::string_view format, fmt::format_args args);

template <typename... Args>
void log_info(fmt::format_string<Args...> format, Args&&... args) {
  log_formatted(LogLevel::kInfo, format, fmt::make_format_args(args...));
}

template <typename... Args>
void log_warning(fmt::format_string<Args...> format, Args&&... args) {
  log_formatted(LogLevel::kWarning, format, fmt::make_format_args(args...));
}

template <typename... Args>
void log_error(fmt::format_string<Args...> format, Args&&... args) {
  log_formatted(LogLevel::kError, format, fmt::make_format_args(args...));
}

}  // namespace parka
