#include <cmath>

#include "engine/config/config.h"

namespace parka {

LoraRules FinetuneConfig::lora_rules() const {
  if (method != FinetuneMethod::kLora) return {};
  const auto r = static_cast<double>(rank);
  return {rank, alpha / (rslora ? std::sqrt(r) : r), targets};
}

ParameterRules Config::parameter_rules() const {
  return {optimizer.frozen, optimizer.lr_patterns, optimizer.lr_factors, finetune.lora_rules(), finetune.base};
}

}  // namespace parka
