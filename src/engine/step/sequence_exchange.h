#pragma once
#include <cstdint>

#include "comm/communicator.h"
#include "model/layers/context_exchange.h"

namespace parka {

// The ranks of Peers::kContext as the model's attention sees them. The communicator must outlive it.
class SequenceExchange final : public ContextExchange {
 public:
  // The name of the device's waits (Device::time_wait).
  static constexpr const char* kWait = "exchanged sequences";

  explicit SequenceExchange(Communicator& communicator) : communicator_(communicator) {}
  int64_t place() const override { return communicator_.place_in(Peers::kContext); }
  void all_to_all(Device& device, const TensorView& in, const TensorView& out) override;

 private:
  Communicator& communicator_;
};

}  // namespace parka
