#include "engine/step/sequence_exchange.h"

#include "kernels/device/device.h"

namespace parka {

void SequenceExchange::all_to_all(Device& device, const TensorView& in, const TensorView& out) {
  communicator_.all_to_all(device, in, out, Peers::kContext);
  device.time_wait(kWait, [&] { communicator_.wait(device, communicator_.last_queued()); });
}

}  // namespace parka
