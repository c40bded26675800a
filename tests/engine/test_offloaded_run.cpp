// Runs whose activations, weights or states wait in host memory.
#include <algorithm>
#include <memory>
#include <string>
#include <utility>

#include <fmt/format.h>

#include "tests/engine/training_run_fixture.h"
#include "tests/support/alone.h"
#include "tests/support/offload_plan.h"

using namespace parka;
using namespace parka::test;

namespace {

// A run of `before` goes on to the bit as one of `after` that is restored from its checkpoint.
void check_same_after_restore(const Config& before, const Config& after, Device& device,
                              const TemporaryFolder& folder) {
  static int num_saved = 0;
  TrainingRun run(before, device, alone()), restored(after, device, alone());
  run.initialize();
  for (int i = 0; i < 3; ++i) run.step();
  restored.restore(saved(run, folder / fmt::format("run{}", num_saved++), [](auto&) {}));
  for (int i = 0; i < 4; ++i) {
    const StepReport a = *run.step(), b = *restored.step();
    CHECK((a.step == b.step && a.loss == b.loss && a.grad_norm == b.grad_norm && b.applied));
  }
  const CheckpointContents a = run.snapshot(), b = restored.snapshot();
  CHECK(
      std::equal(a.tensors.begin(), a.tensors.end(), b.tensors.begin(), b.tensors.end(),
                 [](const HostTensor& x, const HostTensor& y) { return x.name == y.name && x.bytes == y.bytes; }));
}

}  // namespace

TEST_CASE("a restored run takes the same steps wherever kept activations wait", "[engine][training_run][offload]") {
  for (const char* recipe : {"fp32", "coat", "parka"}) {
    const TemporaryFolder folder;
    const auto device = make_cpu_device();
    Config plain = tiny_config(folder.path().string(), recipe);
    plain.model.num_layers = 5;
    Config offloaded = plain;
    offloaded.precision.offload_blocks = 3;
    for (const auto& [before, after] : {std::pair(plain, offloaded), std::pair(offloaded, plain)}) {
      CAPTURE(recipe, before.precision.offload_blocks);
      check_same_after_restore(before, after, *device, folder);
    }
  }
}

TEST_CASE("a restored run takes the same steps wherever weights lie", "[engine][training_run][offload]") {
  for (const char* recipe : {"fp32", "bf16", "parka"}) {
    const TemporaryFolder folder;
    const auto device = make_cpu_device();
    Config plain = tiny_config(folder.path().string(), recipe);
    plain.model.num_layers = 4;
    Config offloaded = plain;
    offloaded.optimizer.offload = offloaded.precision.offload_weights = true;
    for (const auto& [before, after] :
         {std::pair(plain, offloaded), std::pair(offloaded, plain), std::pair(offloaded, offloaded)}) {
      CAPTURE(recipe, before.precision.offload_weights, after.precision.offload_weights);
      check_same_after_restore(before, after, *device, folder);
    }
  }
}

TEST_CASE("a restored run takes the same steps wherever masters and moments are",
          "[engine][training_run][offload]") {
  for (const char* recipe : {"fp32", "bf16", "coat", "parka"}) {
    const TemporaryFolder folder;
    const auto device = make_cpu_device();
    Config plain = tiny_config(folder.path().string(), recipe);
    plain.telemetry.interval = 2;
    Config offloaded = plain;
    offloaded.optimizer.offload = true;
    for (const auto& [before, after] : {std::pair(plain, offloaded), std::pair(offloaded, plain)}) {
      CAPTURE(recipe, before.optimizer.offload);
      TrainingRun run(before, *device, alone()), restored(after, *device, alone());
      run.initialize();
      for (int i = 0; i < 3; ++i) run.step();
      const LoadedCheckpoint checkpoint =
          saved(run, folder / fmt::format("run{}", before.optimizer.offload), [](auto&) {});
      CHECK(restored.restore(checkpoint).size() == 1);  // the key itself
      for (int i = 0; i < 4; ++i) {
        const StepReport a = *run.step(), b = *restored.step();
        CHECK((a.step == b.step && a.loss == b.loss && a.grad_norm == b.grad_norm && b.applied));
        REQUIRE(a.telemetry.has_value() == b.telemetry.has_value());
        if (a.telemetry) {
          CHECK(telemetry_records(*a.telemetry, a.step, run.model().parameters()) ==
                telemetry_records(*b.telemetry, b.step, run.model().parameters()));
        }
      }
      const CheckpointContents a = run.snapshot(), b = restored.snapshot();
      CHECK(std::equal(
          a.tensors.begin(), a.tensors.end(), b.tensors.begin(), b.tensors.end(),
          [](const HostTensor& x, const HostTensor& y) { return x.name == y.name && x.bytes == y.bytes; }));
    }
  }
}

TEST_CASE("the plan of a run has less of what offloaded blocks keep, and of nothing more",
          "[engine][training_run][offload]") {
  const TemporaryFolder folder;
  for (const char* recipe : {"fp32", "bf16", "fp8_linear", "fp8_block", "coat", "parka"}) {
    for (const DeviceKind kind : {DeviceKind::kCpu, DeviceKind::kCuda}) {
      for (const Recompute recompute : {Recompute::kNone, Recompute::kBlock}) {
        for (const EvalNumerics eval : {EvalNumerics::kSame, EvalNumerics::kBf16}) {
          CAPTURE(recipe, kind == DeviceKind::kCuda, name_of(recompute), name_of(eval));
          Config config = tiny_config(folder.path().string(), recipe);
          config.model.num_layers = 8;
          config.precision.recompute = recompute;
          if (config.precision.compute == DType::kBF16) config.precision.eval = eval;
          const DeclaredRun plain(config, kind);
          for (const int64_t blocks : {1, 6}) {
            CAPTURE(blocks);
            config.precision.offload_blocks = blocks;
            const DeclaredRun offloaded(config, kind);
            check_offloaded(offloaded.plan, plain.plan, blocks);
            CHECK(offloaded.plan.total_bytes() < plain.plan.total_bytes());
          }
        }
      }
    }
  }
}

namespace {

// Bytes of weights that a plan has in a place.
int64_t weight_bytes(const MemoryPlan& plan, MemoryPlace place) {
  int64_t bytes = 0;
  for (const MemoryPlan::Entry& entry : plan.entries()) {
    if (entry.category == "weights" && entry.place == place) bytes += entry.bytes;
  }
  return bytes;
}

bool declares(const MemoryPlan& plan, const std::string& category) {
  return std::any_of(plan.entries().begin(), plan.entries().end(),
                     [&](const MemoryPlan::Entry& entry) { return entry.category == category; });
}

}  // namespace

TEST_CASE("linear weights are planned in host memory, with buffers on the device where GEMMs or ranks read them",
          "[engine][training_run][offload]") {
  struct Case {
    const char* recipe;
    WeightCopies copies;
    int64_t stage;
    bool has_buffers;
  };
  for (const Case& c : {Case{"bf16", WeightCopies::kAuto, 0, true}, Case{"parka", WeightCopies::kNone, 0, true},
                        Case{"parka", WeightCopies::kRows, 0, false}, Case{"parka", WeightCopies::kBoth, 2, true},
                        Case{"bf16", WeightCopies::kAuto, 3, true}, Case{"parka", WeightCopies::kRows, 3, true}}) {
    CAPTURE(c.recipe, name_of(c.copies), c.stage);
    const TemporaryFolder folder;
    Config config = tiny_config(folder.path().string(), c.recipe);
    config.distributed.zero_stage = c.stage;
    config.model.num_layers = 6;
    config.precision.weight_copies = c.copies;
    config.optimizer.offload = true;
    const auto declared = [](const Config& of) {
      return std::make_unique<DeclaredRun>(of, DeviceKind::kCpu, zero_of(of, 0, 2));
    };
    const auto plain = declared(config);
    config.precision.offload_weights = true;
    const auto offloaded = declared(config);
    const int64_t all = weight_bytes(plain->plan, MemoryPlace::kDevice);
    const int64_t in_host = weight_bytes(offloaded->plan, MemoryPlace::kHost);
    CHECK(weight_bytes(plain->plan, MemoryPlace::kHost) == 0);
    CHECK(in_host > all / 2);
    CHECK(weight_bytes(offloaded->plan, MemoryPlace::kDevice) == all - in_host);
    CHECK(offloaded->plan.total_bytes() < plain->plan.total_bytes());
    CHECK(declares(offloaded->plan, "gathered weights") == c.has_buffers);
  }
}
