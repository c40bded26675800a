#include "engine/config/distributed_config.h"

#include <string_view>

#include <fmt/format.h>

#include "core/error.h"

namespace parka {
namespace {

// Ranks that share sequences divide their tokens, and in attention the heads.
void check_context_sizes(const Config& c) {
  const int64_t shared_by = c.distributed.context_parallel;
  const auto require_multiple = [&](std::string_view key, int64_t value) {
    if (value % shared_by == 0) return;
    throw_bad_input("distributed.context_parallel = {} does not divide {} = {}; change one of them", shared_by, key,
                    value);
  };
  require_multiple("data.sequence_length", c.data.sequence_length);
  require_multiple("model.num_heads", c.model.num_heads);
  require_multiple(c.model.num_kv_heads == 0 ? "model.num_heads" : "model.num_kv_heads", c.model.kv_heads());
}

void check_context(const Config& c) {
  if (c.distributed.context_parallel == 1) return;
  check_context_sizes(c);
  const auto refuse = [&](std::string_view what, std::string_view instead) {
    throw_bad_input("{} does not go with distributed.context_parallel = {}; {}, or set context_parallel = 1", what,
                    c.distributed.context_parallel, instead);
  };
  if (c.model.vision.exists()) refuse("model.vision.tower", "train without images");
  if (c.finetune.method == FinetuneMethod::kQst) refuse("finetune.method = qst", "use method = lora");
  if (c.finetune.method == FinetuneMethod::kLora && c.finetune.dropout > 0) {
    refuse("finetune.dropout", "set dropout = 0");
  }
  if (!c.evaluation.tasks.empty()) {
    refuse("evaluation.tasks", "evaluate tasks with `parka eval`, whose one rank has its sequences alone");
  }
}

}  // namespace

void check_distributed(const Config& c) {
  check_context(c);
  if (c.distributed.shard_size != 0 && c.distributed.zero_stage == 0) {
    throw_bad_input(
        "distributed.shard_size = {} has no meaning with zero_stage = 0, which shards nothing; set it to 0",
        c.distributed.shard_size);
  }
  // Only the codes of FP8 weights are gathered.
  if (c.distributed.zero_stage == 3 && c.precision.has_fp8() && c.precision.eval == EvalNumerics::kBf16) {
    throw_bad_input(
        "distributed.zero_stage = 3 with FP8 GEMMs has no bf16 weights to evaluate with; use precision.eval = "
        "same, or zero_stage = 2");
  }
  if (c.distributed.zero_stage == 3 && c.telemetry.interval > 0) {
    throw_bad_input("telemetry.interval = {} needs whole weights; use distributed.zero_stage = 2, or interval = 0",
                    c.telemetry.interval);
  }
}

std::string sharing_ranks(const Config& config) {
  const int64_t shared_by = config.distributed.context_parallel;
  return shared_by == 1 ? "" : fmt::format(", of which {} share each sequence", shared_by);
}

std::string divided_by_context(const Config& config) {
  const int64_t shared_by = config.distributed.context_parallel;
  return shared_by == 1 ? "" : fmt::format(" / distributed.context_parallel {}", shared_by);
}

}  // namespace parka
