#include <chrono>
#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include <fcntl.h>
#include <unistd.h>

#include <fmt/format.h>

#include "core/error.h"
#include "core/parallel.h"
#include "engine/checkpoint/checkpoint.h"
#include "engine/files/safetensors.h"
#include "kernels/device/device.h"
#include "model/parameter_table.h"
#include "optim/optimizer.h"

// Prints how fast the host does what a start of `parka train` waits for: loading a checkpoint, and giving new
// weights their values. The checkpoint has the tensors of a run with bf16 weights, split masters and FP8 moments,
// and is written into the folder first.
namespace {

using namespace parka;

constexpr int64_t kParameterElements = 32 << 20;
constexpr int64_t kBytesPerParameter = 6;  // and the moments' maxima

double seconds_of(const std::function<void()>& work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

void print_rate(const std::string& what, int64_t bytes, double seconds) {
  fmt::print("{:<44} {:8.2f} s  {:8.2f} GB/s\n", what, seconds, 1e-9 * static_cast<double>(bytes) / seconds);
}

HostTensor tensor_of(const std::string& name, DType dtype, int64_t count, uint8_t byte) {
  HostTensor tensor{name, dtype, {count}, {}};
  tensor.bytes.resize(static_cast<size_t>(count * size_of(dtype)));
  for (size_t i = 0; i < tensor.bytes.size(); ++i) {
    tensor.bytes[i] = static_cast<std::byte>(byte ^ (i * 0x9e3779b97f4a7c15u >> 59));  // finite in every format
  }
  return tensor;
}

CheckpointContents contents_of(int64_t num_parameters) {
  CheckpointContents contents{.step = 1, .state = {}};
  for (int64_t i = 0; i < num_parameters; ++i) {
    const std::string name = fmt::format("parameter.{}", i);
    contents.tensors.push_back(tensor_of(name + ".master", DType::kU16, kParameterElements, 0x55));
    for (const char* moment : {".exp_avg", ".exp_avg_sq"}) {
      contents.tensors.push_back(tensor_of(name + moment, DType::kE4M3, kParameterElements, 0x31));
      contents.tensors.push_back(
          tensor_of(name + moment + ".amax", DType::kF32, kParameterElements / kMomentGroup, 0x31));
    }
    contents.tensors.push_back(tensor_of(name, DType::kBF16, kParameterElements, 0x31));
  }
  return contents;
}

// So that the next read comes from the disk.
void drop_from_memory(const std::string& folder) {
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    const int file = ::open(entry.path().c_str(), O_RDONLY);
    if (file == -1) continue;
    ::posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED);
    ::close(file);
  }
}

void measure_loading(const std::string& folder, int64_t num_bytes) {
  const int64_t num_parameters = std::max<int64_t>(1, num_bytes / (kBytesPerParameter * kParameterElements));
  const std::string run = folder + "/start_time_run";
  std::filesystem::remove_all(run);
  save_checkpoint(run, contents_of(num_parameters), {.writers = num_threads()});
  const std::string path = list_checkpoints(run).at(0).path;
  const auto device = make_cpu_device();
  int64_t bytes = 0;
  std::vector<TensorRange> ranges;
  {
    const LoadedCheckpoint loaded = load_checkpoint(path);
    for (const SafetensorsEntry& tensor : loaded.tensors()) {
      ranges.push_back({tensor.name, {0, num_elements_of(tensor.shape)}});
      bytes += tensor.num_bytes;
    }
  }
  auto* const target = static_cast<std::byte*>(device->allocate(LoadedCheckpoint::kMaxPieceBytes));
  std::memset(target, 0, LoadedCheckpoint::kMaxPieceBytes);
  drop_from_memory(path);
  print_rate("load_checkpoint, from disk", bytes, seconds_of([&] { load_checkpoint(path); }));
  print_rate("load_checkpoint, from memory", bytes, seconds_of([&] { load_checkpoint(path); }));
  const LoadedCheckpoint loaded = load_checkpoint(path);
  const auto read = [&](const LoadedCheckpoint::RangeCallback& callback) {
    return seconds_of([&] { loaded.read_ranges(ranges, callback); });
  };
  print_rate("read_ranges", bytes, read([](const SafetensorsEntry&, int64_t, ByteSpan) {}));
  print_rate("read_ranges, is finite", bytes, read([](const SafetensorsEntry& tensor, int64_t, ByteSpan piece) {
               PARKA_REQUIRE(all_finite(tensor.dtype, piece));
             }));
  print_rate("read_ranges, is finite, copied to the device", bytes,
             read([&](const SafetensorsEntry& tensor, int64_t, ByteSpan piece) {
               PARKA_REQUIRE(all_finite(tensor.dtype, piece));
               device->copy_to_device(target, piece.data(), static_cast<int64_t>(piece.size()));
             }));
  device->release(target);
  std::filesystem::remove_all(run);
}

void measure_initial_weights() {
  ModelConfig config;
  const ParameterTable table = make_parameter_table(config, false);
  const size_t index = static_cast<size_t>(table.index_of("blocks.0.qkv"));
  const ElementRange range = {0, table.all[index].numel()};
  const double seconds = seconds_of([&] { initial_weight(config, table, index, 1, range); });
  fmt::print("initial_weight, {} elements: {:.2f} ns each on {} threads\n", range.size(),
             1e9 * seconds / static_cast<double>(range.size()), num_threads());
}

}  // namespace

// start_time FOLDER [BYTES]
int main(int argc, char** argv) {
  if (argc != 2 && argc != 3) {
    fmt::print(stderr, "usage: start_time FOLDER [BYTES of the checkpoint, default 400000000]\n");
    return 2;
  }
  try {
    measure_loading(argv[1], argc == 3 ? std::stoll(argv[2]) : 400'000'000);
    measure_initial_weights();
  } catch (const std::exception& error) {
    fmt::print(stderr, "{}\n", error.what());
    return 1;
  }
  return 0;
}
