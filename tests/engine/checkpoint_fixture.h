#pragma once
#include <algorithm>
#include <cstring>
#include <filesystem>
#include <functional>
#include <map>
#include <random>
#include <set>
#include <string>
#include <vector>

#include <sys/wait.h>
#include <unistd.h>

#include "core/error.h"
#include "engine/checkpoint/checkpoint.h"
#include "tests/support/catch.h"
#include "tests/support/temporary_folder.h"

// Checkpoints to save, damage and compare.
namespace parka::test {

inline HostTensor random_tensor(const std::string& name, DType dtype, std::vector<int64_t> shape, uint64_t seed) {
  HostTensor tensor{name, dtype, std::move(shape), {}};
  tensor.bytes.resize(static_cast<size_t>(num_bytes_of(tensor.dtype, tensor.shape)));
  std::mt19937_64 random(seed);
  for (std::byte& b : tensor.bytes) b = static_cast<std::byte>(random());
  return tensor;
}

// One tensor of every dtype, odd sizes, a scalar and an empty one among them; different bytes for every version.
inline CheckpointContents small_contents(int64_t step, uint64_t version = 0) {
  const uint64_t seed = 1000 * static_cast<uint64_t>(step) + 10 * version;
  CheckpointContents contents;
  contents.step = step;
  contents.state = {{"data", {{"epoch", 1}, {"sequence", 123456789012345}}},
                    {"version", version},
                    {"seed", 18446744073709551615u},
                    {"learning_rate", 0.1 + 0.2},
                    {"name", "Übung \"1\"\n"}};
  contents.tensors.push_back(random_tensor("codes", DType::kE4M3, {7, 5}, seed + 1));
  contents.tensors.push_back(random_tensor("blocks.0.weight", DType::kF32, {3, 4}, seed + 2));
  contents.tensors.push_back(random_tensor("moment", DType::kE5M2, {13}, seed + 3));
  contents.tensors.push_back(random_tensor("norm", DType::kBF16, {2, 3, 1}, seed + 4));
  contents.tensors.push_back(random_tensor("count", DType::kI32, {}, seed + 5));
  contents.tensors.push_back(random_tensor("empty", DType::kF32, {0, 8}, seed + 6));
  contents.tensors.push_back(random_tensor("remainder", DType::kU16, {9}, seed + 7));
  contents.tensors.push_back(random_tensor("flags", DType::kU8, {3}, seed + 8));
  return contents;
}

inline CheckpointContents read_contents(const LoadedCheckpoint& loaded) {
  CheckpointContents contents{loaded.step(), loaded.state(), {}};
  for (const SafetensorsEntry& tensor : loaded.tensors()) {
    contents.tensors.push_back({tensor.name, tensor.dtype, tensor.shape, loaded.read(tensor)});
  }
  return contents;
}

// Equal to the bit; the order of tensors is the file's business.
inline bool same(CheckpointContents a, CheckpointContents b) {
  const auto by_name = [](const HostTensor& x, const HostTensor& y) { return x.name < y.name; };
  std::sort(a.tensors.begin(), a.tensors.end(), by_name);
  std::sort(b.tensors.begin(), b.tensors.end(), by_name);
  return a.step == b.step && a.state == b.state &&
         std::equal(a.tensors.begin(), a.tensors.end(), b.tensors.begin(), b.tensors.end(),
                    [](const HostTensor& x, const HostTensor& y) {
                      return x.name == y.name && x.dtype == y.dtype && x.shape == y.shape && x.bytes == y.bytes;
                    });
}

// What load_newest finds, with what it refused on the way.
struct Newest {
  std::optional<CheckpointContents> contents;
  std::vector<std::string> refusals;
};

inline Newest read_newest(const std::string& folder) {
  Newest newest;
  const auto loaded = load_newest(folder, [&](const std::string& message) { newest.refusals.push_back(message); });
  if (loaded) newest.contents = read_contents(*loaded);
  return newest;
}

inline std::set<std::string> names_in(const std::string& folder) {
  std::set<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) names.insert(entry.path().filename());
  return names;
}

inline void copy_folder(const std::string& from, const std::string& to) {
  std::filesystem::remove_all(to);
  std::filesystem::copy(from, to, std::filesystem::copy_options::recursive);
}

// The Error that `action` throws; fails the test when it throws none.
template <typename Action>
Error error_of(Action action) {
  try {
    action();
  } catch (const Error& e) {
    return e;
  }
  FAIL("no Error was thrown");
  throw std::logic_error("not reached");
}

inline bool mentions(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// Runs `body` in a child process; its result, or 128 + the signal that ended it.
inline int run_in_child(const std::function<int()>& body) {
  const pid_t child = ::fork();
  if (child == 0) {
    int result = 99;
    try {
      result = body();
    } catch (...) {
    }
    ::_exit(result);  // not exit(): the test runner's clean-up belongs to the parent
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

}  // namespace parka::test
