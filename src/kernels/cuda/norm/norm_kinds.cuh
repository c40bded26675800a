#pragma once
#include <type_traits>

#include "core/error.h"
#include "kernels/ops/norm/norm.h"

namespace parka::cuda {

// Calls f with a constant for a kind of norm, to instantiate a kernel for it. kNone is no norm.
template <typename F>
void with_norm_kind(NormKind kind, const F& f) {
  switch (kind) {
    case NormKind::kLayerNorm: f(std::integral_constant<NormKind, NormKind::kLayerNorm>()); return;
    case NormKind::kRmsNorm: f(std::integral_constant<NormKind, NormKind::kRmsNorm>()); return;
    case NormKind::kAffineLayerNorm: f(std::integral_constant<NormKind, NormKind::kAffineLayerNorm>()); return;
    case NormKind::kNone: PARKA_REQUIRE(!"a norm");
  }
}

}  // namespace parka::cuda
