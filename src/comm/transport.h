#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace parka {
struct WaitTimes;

// The exchange of ranks between their hosts: messages from one rank to another, and agreement of all. Only one
// thread may use it. If another rank cannot be reached, its functions throw Error(kRankLost).
class Transport {
 public:
  virtual ~Transport() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;

  // ---- Messages ----

  // Must be called by all ranks before the first message.
  virtual void connect_all() = 0;
  // These queue a message, whose memory must stay as it is until wait() returns. Messages from one rank to another
  // arrive in order; the receiver knows their size. A message of no bytes is none.
  virtual void send(const void* data, int64_t bytes, int to) = 0;
  virtual void receive(void* data, int64_t bytes, int from) = 0;
  // Returns when all queued messages are sent and received.
  virtual void wait() = 0;

  // ---- Agreement; all but limit_waits() wait for all ranks ----

  // `text` of every rank, in the order of ranks; lengths may differ.
  virtual std::vector<std::string> gather_text(const std::string& text) = 0;
  // From now on a rank that keeps the others waiting for longer is lost, and nullptr: none is.
  virtual void limit_waits(const WaitTimes* times) = 0;
  // Leaves the other ranks; the last call.
  virtual void finish() = 0;
};

}  // namespace parka
