#pragma once
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace parka {

// A TCP connection that carries lines of text and never makes the caller wait. A failed connection counts as
// closed.
class LineSocket {
 public:
  explicit LineSocket(int fd);  // takes it over
  ~LineSocket();
  LineSocket(const LineSocket&) = delete;
  LineSocket& operator=(const LineSocket&) = delete;

  // For poll(); -1 once closed.
  int fd() const { return fd_; }
  bool closed() const { return fd_ < 0; }

  // Queues the line, whose line breaks become spaces, and sends what the network takes.
  void send(std::string_view line);
  // Sends what is still queued.
  void flush();
  // Whole lines that have arrived, also those before the other side closed.
  std::vector<std::string> receive();
  // Tells the other side that nothing follows; it can still be heard.
  void end_sending();
  void close();

 private:
  int fd_;
  std::string incoming_, outgoing_;
};

// Waits for connections on a free port of all interfaces.
class Listener {
 public:
  Listener();
  ~Listener();
  Listener(const Listener&) = delete;
  Listener& operator=(const Listener&) = delete;

  int fd() const { return fd_; }
  int port() const { return port_; }
  // The next connection that waits; none: nullptr.
  std::unique_ptr<LineSocket> accept() const;

 private:
  int fd_ = -1, port_ = 0;
};

// Numeric addresses at which other hosts may reach this one, of all its interfaces but the loopback.
std::vector<std::string> own_addresses();

// Connects to a numeric address; nullptr where that fails or takes longer.
std::unique_ptr<LineSocket> connect_to(const std::string& address, int port, double seconds);

// Returns when one of the descriptors is readable, or `seconds` later. Negative descriptors are passed over.
void wait_readable(const std::vector<int>& descriptors, double seconds);

double seconds_now();  // of a steady clock

}  // namespace parka
