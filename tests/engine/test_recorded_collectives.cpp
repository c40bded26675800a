#include <algorithm>
#include <cstdint>
#include <numeric>
#include <string>
#include <tuple>
#include <variant>
#include <vector>

#include "engine/step/declared_run.h"
#include "engine/step/recorded_step.h"
#include "tests/engine/step_config.h"
#include "tests/support/catch.h"

using namespace parka;
using namespace parka::test;

// What a recorded step says of its collectives, against what follows from the config.
namespace {

using Kind = RecordedCollective::Kind;

std::vector<RecordedCollective> reduce_scatters(const RecordedStep::Part& part) {
  std::vector<RecordedCollective> all;
  for (const RecordedStep::Work& work : part.work) {
    const auto* collective = std::get_if<RecordedCollective>(&work);
    if (collective != nullptr && collective->kind == Kind::kReduceScatter) all.push_back(*collective);
  }
  return all;
}

// One of each parameter that is trained, those of the last unit first. Each of `ranks` gets whole groups of 128
// elements of the gradient. Where gradients are divided, ranks of a GPU exchange pieces and add them up: a rank
// reads all pieces, and what it has accumulated, and writes the sum.
std::vector<RecordedCollective> expected_of_micro_batch(const Config& config, int64_t ranks, bool is_first) {
  std::vector<RecordedCollective> all;
  const ParameterTable table =
      make_parameter_table(config.model, config.optimizer.decay_embeddings, config.parameter_rules());
  for (int unit = table.num_units() - 1; unit >= 0; --unit) {
    for (const ParameterInfo& p : table.all) {
      if (p.unit != unit || !p.trainable) continue;
      const int64_t groups = (p.rows * p.cols + 127) / 128;
      const int64_t piece = (groups + ranks - 1) / ranks * 128 * size_of(config.optimizer.gradient);
      const int64_t summed = ranks * piece + (is_first ? 1 : 2) * piece;
      all.push_back(
          {Kind::kReduceScatter, ranks * piece, Peers::kShard, config.distributed.zero_stage >= 2 ? summed : 0});
    }
  }
  return all;
}

// What other ranks send to this one: all but its own pieces.
int64_t received_bytes(const std::vector<RecordedCollective>& all, int64_t ranks) {
  return std::accumulate(all.begin(), all.end(), int64_t{0},
                         [&](int64_t sum, const RecordedCollective& collective) {
                           return sum + collective.bytes / ranks * (ranks - 1);
                         });
}

}  // namespace

TEST_CASE("a recorded step reduces the gradient of each parameter once, in whole groups for each rank",
          "[engine][recorded step]") {
  for (const char* recipe : {"fp32", "bf16", "parka"}) {
    for (const auto& [stage, ranks, shard_size] :
         {std::tuple<int64_t, int64_t, int64_t>{1, 2, 0}, {1, 3, 0}, {2, 2, 0}, {2, 6, 3}, {3, 3, 0}, {3, 4, 2}}) {
      for (const bool has_frozen : {false, true}) {
        for (const int64_t micro_batches : {1, 2, 5}) {
          CAPTURE(recipe, stage, ranks, shard_size, has_frozen, micro_batches);
          const TemporaryFolder folder;
          Config config =
              step_config(folder.path().string(), recipe, stage, /*is_llama=*/stage != 2, micro_batches, ranks);
          config.distributed.shard_size = shard_size;
          if (has_frozen) config.optimizer.frozen = {"blocks.1.*"};
          if (ranks == 3) config.optimizer.gradient = DType::kBF16;
          validate(config);
          const int64_t group = shard_size == 0 ? ranks : shard_size;
          const RecordedStep step = record_step(config, ranks);
          const size_t num_micro_batches = step.parts.size() - 1;
          for (size_t i = 0; i < num_micro_batches; ++i) {
            CAPTURE(i);
            // With whole gradients, those of all micro-batches are reduced behind the last one.
            const bool reduces = stage >= 2 || i + 1 == num_micro_batches;
            const bool is_first = stage == 1 || i == 0;
            const std::vector<RecordedCollective> expected =
                reduces ? expected_of_micro_batch(config, group, is_first) : std::vector<RecordedCollective>{};
            CHECK((reduce_scatters(step.parts[i]) == expected));
          }
          CHECK(reduce_scatters(step.parts.back()).empty());
        }
      }
    }
  }
}

TEST_CASE("the exchange buffer has room for what a rank receives of the largest unit", "[engine][recorded step]") {
  const TemporaryFolder folder;
  for (const int64_t stage : {2, 3}) {
    for (const int64_t ranks : {2, 3}) {
      CAPTURE(stage, ranks);
      const Config config = step_config(folder.path().string(), "bf16", stage, true, 2, ranks);
      const DeclaredRun declared(config, DeviceKind::kCuda, zero_of(config, 0, ranks));
      const ParameterTable& table = declared.model.parameters();
      int64_t largest = 0, at = 0;
      const std::vector<RecordedCollective> all = reduce_scatters(record_step(config, ranks).parts[0]);
      for (int unit = table.num_units() - 1; unit >= 0; --unit) {
        const auto count = static_cast<int64_t>(table.unit(unit).size());
        largest = std::max(largest, received_bytes({all.begin() + at, all.begin() + at + count}, ranks));
        at += count;
      }
      CHECK(at == static_cast<int64_t>(all.size()));
      CHECK(declared.plan[declared.exchange_buffer].bytes == largest);
    }
  }
}
