// `parka` in whose training one bit is flipped, as by faulty hardware, on a CPU: what the checks for silent data
// corruption are tested with. The environment variable FLIP=TARGET:STEP:RANK:SEED says which:
//   weight, moment   of a weight, or of another tensor of the state, after the update of the step
//   gradient         of a gradient after the step's first micro-batch
//   gemm             of what one matrix product writes in the step's first micro-batch
// SEED chooses the tensor, with a probability by its bytes, and the bit. If the step is replayed, `gradient` and
// `gemm` hit the first of the two computations. What is flipped is told on stderr.
//
// The linker puts the functions below in front of the program's own (--wrap, tests/CMakeLists.txt).
#include <cstdio>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "comm/launch/launch.h"
#include "core/bit_hash.h"
#include "core/error.h"
#include "engine/commands/commands.h"
#include "engine/step/integrity.h"
#include "engine/training/training_run.h"
#include "kernels/ops/gemm/gemm.h"

namespace parka {
namespace {

struct Flip {
  std::string target;  // empty: no flip
  int64_t step = 0, rank = 0;
  uint64_t seed = 0;
  bool is_done = false;

  bool hits(std::string_view of, int64_t at, int64_t on) const {
    return !is_done && target == of && step == at && rank == on;
  }
  uint64_t draw(uint64_t n) const { return mix_hash(mix_hash(seed + 1) + hash_place(n)); }
};

Flip read_flip() {
  Flip flip;
  const char* text = std::getenv("FLIP");
  if (text == nullptr) return flip;
  char target[16] = {};
  long long step = 0, rank = 0;
  unsigned long long seed = 0;
  if (std::sscanf(text, "%15[a-z]:%lld:%lld:%llu", target, &step, &rank, &seed) != 4) {
    std::fprintf(stderr, "flipping_parka: cannot read FLIP=\"%s\"\n", text);
    std::_Exit(99);
  }
  return {.target = target, .step = step, .rank = rank, .seed = seed};
}

Flip flip = read_flip();
int64_t this_rank = 0;
TrainingRun* stepping = nullptr;  // the run of the step under way
int64_t num_gemms = 0;            // of that step

int64_t step_under_way() { return stepping->completed_steps() + 1; }

void flip_bit(const std::string& name, const TensorView& x, int64_t bit) {
  flip.is_done = true;
  std::fprintf(stderr, "flipping bit %d of byte %lld of %s\n", static_cast<int>(bit % 8),
               static_cast<long long>(bit / 8), name.c_str());
  static_cast<std::byte*>(x.data)[bit / 8] ^= std::byte{1} << (bit % 8);
}

using Named = std::pair<std::string, TensorView>;
void flip_one_of(const std::vector<Named>& tensors) {
  int64_t total = 0;
  for (const auto& [name, x] : tensors) total += x.bytes();
  PARKA_REQUIRE(total > 0);
  auto at = static_cast<int64_t>(flip.draw(0) % static_cast<uint64_t>(total));
  for (const auto& [name, x] : tensors) {
    if (at < x.bytes()) return flip_bit(name, x, 8 * at + static_cast<int64_t>(flip.draw(1) % 8));
    at -= x.bytes();
  }
}

void flip_state(const TrainingRun& run) {
  std::vector<Named> tensors;
  for (const NamedTensor& tensor : run.tensors()) {
    const bool is_weight = tensor.name == run.model().parameters().all[tensor.parameter].name;
    if (is_weight == (flip.target == "weight")) tensors.emplace_back(tensor.name, tensor.view);
  }
  flip_one_of(tensors);
}

// Which parameter's gradient is hit, a trained one; each is hashed where it is complete.
size_t chosen_gradient() {
  const std::vector<int> trained = stepping->model().parameters().trained();
  return static_cast<size_t>(trained[flip.draw(0) % trained.size()]);
}

}  // namespace
}  // namespace parka

using namespace parka;

extern "C" {

std::unique_ptr<Communicator> __real__ZN5parka6Launch17make_communicatorERNS_6DeviceE(Launch*, Device&);
std::unique_ptr<Communicator> __wrap__ZN5parka6Launch17make_communicatorERNS_6DeviceE(Launch* launch,
                                                                                      Device& device) {
  auto communicator = __real__ZN5parka6Launch17make_communicatorERNS_6DeviceE(launch, device);
  this_rank = communicator->rank();
  return communicator;
}

std::optional<StepReport> __real__ZN5parka11TrainingRun4stepEv(TrainingRun*);
std::optional<StepReport> __wrap__ZN5parka11TrainingRun4stepEv(TrainingRun* run) {
  stepping = run;
  num_gemms = 0;
  auto report = __real__ZN5parka11TrainingRun4stepEv(run);
  stepping = nullptr;
  for (const char* target : {"weight", "moment"}) {
    if (flip.hits(target, run->completed_steps(), this_rank)) flip_state(*run);
  }
  return report;
}

using Table = IntegrityChecks::Table;
void __real__ZNK5parka15IntegrityChecks8hash_oneERNS_6DeviceENS0_5TableEmRKNS_10TensorViewE(const IntegrityChecks*,
                                                                                            Device&, Table, size_t,
                                                                                            const TensorView&);
void __wrap__ZNK5parka15IntegrityChecks8hash_oneERNS_6DeviceENS0_5TableEmRKNS_10TensorViewE(
    const IntegrityChecks* checks, Device& device, Table table, size_t slot, const TensorView& tensor) {
  if (table == Table::kFirstGradients && stepping != nullptr &&
      flip.hits("gradient", step_under_way(), this_rank) && slot == chosen_gradient()) {
    const std::string& parameter = stepping->model().parameters().all[slot].name;
    flip_one_of({{parameter + ".gradient", tensor}});
  }
  __real__ZNK5parka15IntegrityChecks8hash_oneERNS_6DeviceENS0_5TableEmRKNS_10TensorViewE(checks, device, table,
                                                                                         slot, tensor);
}

void __real__ZN5parka4gemmERNS_6DeviceERKNS_4GemmE(Device&, const Gemm&);
void __wrap__ZN5parka4gemmERNS_6DeviceERKNS_4GemmE(Device& device, const Gemm& a) {
  __real__ZN5parka4gemmERNS_6DeviceERKNS_4GemmE(device, a);
  if (stepping == nullptr || !flip.hits("gemm", step_under_way(), this_rank)) return;
  const auto of_micro_batch = static_cast<uint64_t>(9 * stepping->config().model.num_layers);
  const auto chosen = static_cast<int64_t>(flip.draw(0) % of_micro_batch);
  if (num_gemms++ != chosen) return;
  const auto bit = static_cast<int64_t>(flip.draw(1) >> 8) % (8 * a.out.bytes());
  flip_bit("the output of a matrix product", a.out, bit);
}

}  // extern "C"

int main(int argc, char** argv) { return run_command_line(argc, argv); }
