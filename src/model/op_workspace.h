#pragma once
#include "core/memory_plan.h"
#include "model/kv_cache.h"
#include "model/model_config.h"
#include "model/parameter_table.h"

namespace parka {

// Declares the workspace of all ops that a model, trained or not, runs on a GPU for `tokens` tokens at a time;
// `cache` is of one that generates.
TensorId declare_op_workspace(const ModelConfig& model, const PrecisionConfig& precision, int64_t tokens,
                              const ParameterTable& table, MemoryPlan& plan, const CacheShape& cache = {});

}  // namespace parka
