#include "engine/files/draft_folder.h"

#include <algorithm>
#include <filesystem>
#include <system_error>
#include <utility>
#include <vector>

#include "core/error.h"
#include "engine/files/file_io.h"

namespace parka {
namespace {

namespace fs = std::filesystem;

bool is_there(const std::string& path) {
  std::error_code error;
  return fs::symlink_status(path, error).type() != fs::file_type::not_found;
}

// Without slashes and dots at its end: "new/." cannot be renamed to.
std::string without_slashes(std::string path) {
  while (path.size() > 1 && (path.back() == '/' || path.ends_with("/."))) path.pop_back();
  if (path.empty()) throw_bad_input("the path of the folder to write is empty");
  return path;
}

}  // namespace

DraftFolder::DraftFolder(std::string path) : path_(without_slashes(std::move(path))), draft_(path_ + ".tmp") {
  if (is_there(path_)) throw_bad_input("{}: exists already; choose another folder, or remove it", path_);
  if (is_there(draft_)) {
    throw_bad_input("{}: exists already, perhaps left by a command that was killed; remove it", draft_);
  }
  const std::string parent = fs::path(path_).parent_path().string();
  if (!parent.empty()) make_directories(parent);
  make_directory(draft_);
}

DraftFolder::~DraftFolder() {
  std::error_code ignored;
  if (!published_) fs::remove_all(draft_, ignored);
}

void DraftFolder::publish() {
  sync_directory(draft_);
  rename_path(draft_, path_);
  published_ = true;
  const std::string parent = fs::path(path_).parent_path().string();
  sync_directory(parent.empty() ? "." : parent);
}

void write_new_file(const std::string& path, const std::string& text) {
  OutputFile file(path);
  file.write(as_bytes(text));
  file.sync();
  file.close();
}

void copy_to_new_file(const std::string& from, const std::string& to) {
  constexpr int64_t kPieceBytes = 1 << 20;
  const InputFile source(from);
  OutputFile file(to);
  std::vector<std::byte> buffer;
  for (int64_t offset = 0; offset < source.num_bytes(); offset += kPieceBytes) {
    buffer.resize(static_cast<size_t>(std::min(kPieceBytes, source.num_bytes() - offset)));
    source.read(offset, buffer);
    file.write(buffer);
  }
  file.sync();
  file.close();
}

}  // namespace parka
