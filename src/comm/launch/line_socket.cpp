#include "comm/launch/line_socket.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstring>
#include <utility>

#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "core/error.h"

namespace parka {
namespace {

// Parka never sends longer lines.
constexpr size_t kLongestLine = size_t{1} << 20;

bool would_block() { return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR; }

bool lacks_resources() { return errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM; }

[[noreturn]] void throw_no_connection() {
  throw_bad_input("no connection to another rank can be had: {}; raise the limit of open files (ulimit -Hn)",
                  std::strerror(errno));
}

// The addresses of a name or numeric address, or why it has none.
struct Addresses {
  std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> first = {nullptr, ::freeaddrinfo};
  std::string error;  // empty: none
};

// Without a name: of the loopback, or with AI_PASSIVE of all interfaces.
Addresses resolve(const char* name, int port, int flags) {
  addrinfo hints{};
  hints.ai_flags = AI_NUMERICSERV | flags;
  hints.ai_socktype = SOCK_STREAM;
  Addresses all;
  addrinfo* first = nullptr;
  const int failure = ::getaddrinfo(name, std::to_string(port).c_str(), &hints, &first);
  all.first.reset(first);
  if (failure != 0) all.error = failure == EAI_SYSTEM ? std::strerror(errno) : ::gai_strerror(failure);
  return all;
}

// A socket that listens there; -1 if the address family or the port is not available.
int listen_on(const addrinfo& address) {
  const int fd = ::socket(address.ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) return -1;
  // A port is free again as soon as nobody listens on it, though connections of an earlier run may linger there.
  const int on = 1, off = 0;
  ::setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  if (address.ai_family == AF_INET6) ::setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof(off));  // IPv4 too
  if (::bind(fd, address.ai_addr, address.ai_addrlen) == 0 && ::listen(fd, SOMAXCONN) == 0) return fd;
  const int reason = errno;
  ::close(fd);
  errno = reason;
  return -1;
}

// Empty where it has none.
std::string numeric_address(const sockaddr* address, socklen_t length) {
  std::array<char, NI_MAXHOST> text{};
  const int failure = ::getnameinfo(address, length, text.data(), text.size(), nullptr, 0, NI_NUMERICHOST);
  return failure == 0 ? text.data() : "";
}

Connection connect_to(const addrinfo& address, double seconds) {
  const int fd = ::socket(address.ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0 && lacks_resources()) throw_no_connection();
  int failure = errno;
  if (fd >= 0) {
    failure = ::connect(fd, address.ai_addr, address.ai_addrlen) == 0 ? 0 : errno;
    if (failure == EINPROGRESS) {
      pollfd writable{fd, POLLOUT, 0};
      ::poll(&writable, 1, static_cast<int>(1000 * seconds));
      socklen_t length = sizeof(failure);
      ::getsockopt(fd, SOL_SOCKET, SO_ERROR, &failure, &length);
      if (failure == 0 && (writable.revents & POLLOUT) == 0) failure = ETIMEDOUT;
    }
    if (failure == 0) return {std::make_unique<LineSocket>(fd), Connection::Failure::kNone, ""};
    ::close(fd);
  }
  using Failure = Connection::Failure;
  return {nullptr, failure == ECONNREFUSED ? Failure::kRefused : Failure::kOther, std::strerror(failure)};
}

}  // namespace

LineSocket::LineSocket(int fd) : fd_(fd) {
  const int on = 1;
  ::setsockopt(fd_, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  ::fcntl(fd_, F_SETFL, ::fcntl(fd_, F_GETFL) | O_NONBLOCK);
}

LineSocket::~LineSocket() { close(); }

void LineSocket::close() {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

void LineSocket::end_sending() {
  flush();
  if (fd_ >= 0) ::shutdown(fd_, SHUT_WR);
}

void LineSocket::send(std::string_view line) {
  const size_t begin = outgoing_.size();
  outgoing_ += line;
  std::replace(outgoing_.begin() + static_cast<std::ptrdiff_t>(begin), outgoing_.end(), '\n', ' ');
  outgoing_ += '\n';
  flush();
}

void LineSocket::flush() {
  while (fd_ >= 0 && !outgoing_.empty()) {
    const ssize_t sent = ::send(fd_, outgoing_.data(), outgoing_.size(), MSG_NOSIGNAL);
    if (sent < 0) {
      // receive() reports a failed connection as closed, after it has returned what had arrived.
      if (!would_block()) outgoing_.clear();
      return;
    }
    outgoing_.erase(0, static_cast<size_t>(sent));
  }
}

std::vector<std::string> LineSocket::receive() {
  std::array<char, 4096> buffer;
  while (fd_ >= 0) {
    const ssize_t count = ::recv(fd_, buffer.data(), buffer.size(), 0);
    if (count > 0) incoming_.append(buffer.data(), static_cast<size_t>(count));
    if (count == 0 || (count < 0 && !would_block()) || incoming_.size() > kLongestLine) close();
    if (count <= 0) break;
  }
  std::vector<std::string> lines;
  for (size_t end = incoming_.find('\n'); end != std::string::npos; end = incoming_.find('\n')) {
    lines.push_back(incoming_.substr(0, end));
    incoming_.erase(0, end + 1);
  }
  return lines;
}

bool LineSocket::has_ended() const {
  char next = 0;
  const ssize_t count = ::recv(fd_, &next, 1, MSG_PEEK | MSG_DONTWAIT);
  return count == 0 || (count < 0 && !would_block());
}

Listener::Listener(Reach reach, int port) {
  // Without IPv6, as in many containers, or without IPv4, the other one does.
  const bool is_network = reach == Reach::kNetwork;
  const Addresses all = resolve(nullptr, port, is_network ? AI_PASSIVE : 0);
  for (const int family : {is_network ? AF_INET6 : AF_INET, is_network ? AF_INET : AF_INET6}) {
    for (const addrinfo* i = all.first.get(); i != nullptr && fd_ < 0; i = i->ai_next) {
      if (i->ai_family == family) fd_ = listen_on(*i);
    }
  }
  if (fd_ < 0) {
    if (port == 0) throw_bad_input("cannot listen on any TCP port: {}", std::strerror(errno));
    throw_bad_input(
        "cannot listen on TCP port {}: {}; another rank 0, another run or another program may have it: give each process "
        "its own RANK, and each run on this host a MASTER_PORT of its own",
        port, std::strerror(errno));
  }
  sockaddr_in6 bound{};  // the port is at the same place for both families
  socklen_t length = sizeof(bound);
  ::getsockname(fd_, reinterpret_cast<sockaddr*>(&bound), &length);
  port_ = ntohs(bound.sin6_port);
}

Listener::~Listener() {
  if (fd_ >= 0) ::close(fd_);
}

std::unique_ptr<LineSocket> Listener::accept() const {
  const int fd = ::accept4(fd_, nullptr, nullptr, SOCK_CLOEXEC);
  if (fd < 0 && lacks_resources()) throw_no_connection();
  return fd < 0 ? nullptr : std::make_unique<LineSocket>(fd);
}

std::string peer_of(int fd) {
  sockaddr_storage address{};
  socklen_t length = sizeof(address);
  auto* const generic = reinterpret_cast<sockaddr*>(&address);
  const std::string text = ::getpeername(fd, generic, &length) == 0 ? numeric_address(generic, length) : "";
  return text.empty() ? "an unknown address" : text;
}

std::vector<std::string> own_addresses() {
  std::vector<std::string> addresses;
  ifaddrs* all = nullptr;
  if (::getifaddrs(&all) != 0) return addresses;
  for (const ifaddrs* i = all; i != nullptr; i = i->ifa_next) {
    if (i->ifa_addr == nullptr || (i->ifa_flags & IFF_UP) == 0 || (i->ifa_flags & IFF_LOOPBACK) != 0) continue;
    const int family = i->ifa_addr->sa_family;
    if (family != AF_INET && family != AF_INET6) continue;
    if (family == AF_INET6 &&
        IN6_IS_ADDR_LINKLOCAL(&reinterpret_cast<const sockaddr_in6*>(i->ifa_addr)->sin6_addr)) {
      continue;  // means nothing on another host
    }
    const socklen_t length = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
    const std::string text = numeric_address(i->ifa_addr, length);
    if (!text.empty()) addresses.push_back(text);
  }
  ::freeifaddrs(all);
  return addresses;
}

Connection connect_to(const std::string& address, int port, double seconds) {
  // A container without /etc/hosts would ask its name server for localhost.
  const Addresses all = resolve(address == "localhost" ? nullptr : address.c_str(), port, 0);
  Connection last{nullptr, Connection::Failure::kUnknownName, all.error};
  for (const addrinfo* i = all.first.get(); i != nullptr && !last.socket; i = i->ai_next) {
    last = connect_to(*i, seconds);
  }
  return last;
}

void wait_readable(const std::vector<int>& descriptors, double seconds) {
  std::vector<pollfd> polled;
  polled.reserve(descriptors.size());
  for (int fd : descriptors) polled.push_back({fd, POLLIN, 0});
  ::poll(polled.data(), polled.size(), std::max(0, static_cast<int>(std::ceil(1000 * seconds))));
}

double seconds_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace parka
