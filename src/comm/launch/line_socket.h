#pragma once
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace parka {

// A TCP connection for lines of text that never blocks the caller. A failed connection counts as closed.
class LineSocket {
 public:
  explicit LineSocket(int fd);  // takes ownership
  ~LineSocket();
  LineSocket(const LineSocket&) = delete;
  LineSocket& operator=(const LineSocket&) = delete;

  // For poll(); -1 once closed.
  int fd() const { return fd_; }
  bool closed() const { return fd_ < 0; }

  // Queues the line, with line breaks replaced by spaces, and sends as much as the network takes.
  void send(std::string_view line);
  // Sends what is still queued.
  void flush();
  // The complete lines that have arrived, including those sent before the other side closed.
  std::vector<std::string> receive();
  // True if the other side has closed after all that was received. Takes nothing out of the connection.
  bool has_ended() const;
  // Closes the sending direction; receive() still works.
  void end_sending();
  void close();

 private:
  int fd_;
  std::string incoming_, outgoing_;
};

// From where a port can be reached.
enum class Reach {
  kThisHost,  // by the loopback alone
  kNetwork,   // by all interfaces
};

// Waits for connections on a port.
class Listener {
 public:
  // 0: a free port. Throws Error(kBadInput) if the port cannot be had.
  explicit Listener(Reach reach, int port = 0);
  ~Listener();
  Listener(const Listener&) = delete;
  Listener& operator=(const Listener&) = delete;

  int fd() const { return fd_; }
  int port() const { return port_; }
  // The next waiting connection, or nullptr. Throws Error(kBadInput) if this process can have no more of them.
  std::unique_ptr<LineSocket> accept() const;

 private:
  int fd_ = -1, port_ = 0;
};

// The numeric address of the other side of a connection; "an unknown address" where there is none.
std::string peer_of(int fd);

// The numeric addresses of all network interfaces of this host except the loopback.
std::vector<std::string> own_addresses();

// The result of an attempt to connect.
struct Connection {
  enum class Failure { kNone, kUnknownName, kRefused, kOther };
  std::unique_ptr<LineSocket> socket;  // nullptr if it failed
  Failure failure = Failure::kNone;
  std::string problem;  // why it failed
};
// Connects to a host by its name or numeric address, within `seconds` for each address of the name. Throws
// Error(kBadInput) if this process can have no connection at all.
Connection connect_to(const std::string& address, int port, double seconds);

// Returns when one of the descriptors is readable, at the latest after `seconds`. Ignores negative descriptors.
void wait_readable(const std::vector<int>& descriptors, double seconds);

double seconds_now();  // of a steady clock

}  // namespace parka
