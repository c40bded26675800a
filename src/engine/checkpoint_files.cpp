#include "engine/checkpoint_files.h"

#include <algorithm>
#include <filesystem>
#include <set>

#include "core/error.h"
#include "engine/checkpoint_index.h"
#include "engine/json_text.h"

namespace parka {
namespace {

namespace fs = std::filesystem;

constexpr size_t kWritePieceBytes = 256 << 10;

// Cuts the list where the next tensor would make a file larger than `max_bytes`.
std::vector<std::vector<const HostTensor*>> split_into_shards(const std::vector<HostTensor>& tensors,
                                                              int64_t max_bytes) {
  std::vector<std::vector<const HostTensor*>> shards;
  int64_t filled = 0;
  for (const HostTensor& tensor : tensors) {
    if (tensor.bytes.empty() && is_partial(tensor)) continue;
    const auto bytes = static_cast<int64_t>(tensor.bytes.size());
    if (shards.empty() || (bytes > max_bytes - filled && !shards.back().empty())) {
      shards.emplace_back();
      filled = 0;
    }
    shards.back().push_back(&tensor);
    filled += bytes;
  }
  return shards;
}

}  // namespace

void ObservedFiles::announce(std::string_view action, const std::string& path) const {
  if (observer_) observer_(fmt::format("{} {}", action, path));
}

void ObservedFiles::make_directory(const std::string& path) {
  announce("make", path);
  parka::make_directory(path);
}

void ObservedFiles::sync_directory(const std::string& path) {
  announce("sync", path);
  parka::sync_directory(path);
}

void ObservedFiles::rename(const std::string& from, const std::string& to) {
  announce("rename", from);
  rename_path(from, to);
}

void ObservedFiles::remove(const std::string& path) {
  announce("remove", path);
  remove_tree(path);
}

Manifest::File ObservedFiles::write_file(const std::string& path,
                                         const std::function<void(const ByteSink&)>& produce) {
  announce("create", path);
  OutputFile file(path);
  produce([&](ByteSpan bytes) {
    while (!bytes.empty()) {
      const ByteSpan piece = bytes.first(std::min(kWritePieceBytes, bytes.size()));
      announce("write", path);
      file.write(piece);
      bytes = bytes.subspan(piece.size());
    }
  });
  announce("sync", path);
  file.sync();
  file.close();
  return {fs::path(path).filename().string(), file.num_bytes(), file.checksum()};
}

Manifest::File ObservedFiles::write_text(const std::string& path, std::string_view text) {
  return write_file(path, [&](const ByteSink& sink) { sink(as_bytes(text)); });
}

void check_names_unique(const std::vector<HostTensor>& tensors) {
  std::set<std::string_view> names;
  for (const HostTensor& tensor : tensors) {
    if (!names.insert(tensor.name).second)
      throw_internal("two tensors have the name \"{}\"", printable(tensor.name));
  }
}

std::vector<Manifest::File> write_shards(ObservedFiles& files, const std::string& folder,
                                         const std::vector<HostTensor>& tensors, int64_t max_shard_bytes,
                                         const std::function<std::string(size_t index)>& name_of,
                                         const std::function<void()>& before_file) {
  std::vector<Manifest::File> written;
  for (const auto& shard : split_into_shards(tensors, max_shard_bytes)) {
    if (before_file) before_file();
    written.push_back(
        files.write_file((fs::path(folder) / name_of(written.size())).string(),
                         [&](const ByteSink& sink) { write_safetensors(shard, describe_pieces(shard), sink); }));
  }
  return written;
}

}  // namespace parka
