#pragma once
#include <functional>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "engine/checkpoint/checkpoint.h"
#include "engine/checkpoint/checkpoint_layout.h"
#include "engine/files/file_io.h"

// The steps of a save that change the file system.
namespace parka {

// Announces each step to the observer of the save before it is done, one at a time, from any thread.
class ObservedFiles {
 public:
  explicit ObservedFiles(const SaveOptions& options)
      : observer_(options.observer), in_background_(options.in_background) {}

  void make_directory(const std::string& path);
  void sync_directory(const std::string& path);
  void rename(const std::string& from, const std::string& to);
  void remove(const std::string& path);
  // Creates a file with the bytes that `produce` passes to its argument, and makes it durable.
  Manifest::File write_file(const std::string& path, const std::function<void(const ByteSink&)>& produce);
  Manifest::File write_text(const std::string& path, std::string_view text);

 private:
  void announce(std::string_view action, const std::string& path);

  const std::function<void(std::string_view)>& observer_;
  const bool in_background_;
  std::mutex mutex_;
};

// Throws Error(kInternal) when two tensors have one name.
void check_names_unique(const std::vector<HostTensor>& tensors);

// Writes `tensors` into files of about options.max_shard_bytes in `folder`, whose names `name_of` gives, up to
// options.writers at a time; calls `before_file` before each. Pieces without elements are left out. The files are
// in the order of the tensors. Throws the first error when all writers have ended.
std::vector<Manifest::File> write_shards(ObservedFiles& files, const std::string& folder,
                                         const std::vector<HostTensor>& tensors, const SaveOptions& options,
                                         const std::function<std::string(size_t index)>& name_of,
                                         const std::function<void()>& before_file = {});

}  // namespace parka
