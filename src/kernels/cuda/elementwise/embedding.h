#pragma once
#include "kernels/ops/embedding.h"

namespace parka::cuda {

void embedding_forward(Device& device, const EmbeddingForward& a);
void embedding_backward(Device& device, const EmbeddingBackward& a);

}  // namespace parka::cuda
