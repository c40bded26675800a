#include "comm/launch/meeting.h"

#include <array>
#include <fstream>
#include <random>
#include <sstream>
#include <utility>

#include <unistd.h>

#include <fmt/format.h>

namespace parka {
namespace {

constexpr double kConnectTrySeconds = 3;  // for one address

}  // namespace

std::string random_token() {
  std::random_device device;
  return fmt::format("{:08x}{:08x}", device(), device());
}

std::string host_key() {
  std::array<char, 256> name{};
  ::gethostname(name.data(), name.size() - 1);
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  return fmt::format("{}/{}", name.data(), boot);
}

std::vector<std::unique_ptr<LineSocket>> accept_ranks(const Listener& listener, const std::string& token, int first,
                                                      int size, double seconds) {
  std::vector<std::unique_ptr<LineSocket>> ranks(static_cast<size_t>(size)), strangers;
  const double end = seconds_now() + seconds;
  for (int missing = size - first; missing > 0 && seconds_now() < end;) {
    std::vector<int> descriptors = {listener.fd()};
    for (const auto& stranger : strangers) descriptors.push_back(stranger ? stranger->fd() : -1);
    wait_readable(descriptors, end - seconds_now());
    while (std::unique_ptr<LineSocket> socket = listener.accept()) strangers.push_back(std::move(socket));
    for (auto& stranger : strangers) {
      if (!stranger) continue;
      const std::vector<std::string> lines = stranger->receive();
      if (lines.empty() && !stranger->closed()) continue;
      std::istringstream in(lines.empty() ? "" : lines[0]);
      std::string its_token;
      int rank = -1;
      in >> its_token >> rank;
      const bool expected = !stranger->closed() && its_token == token && rank >= first && rank < size &&
                            !ranks[static_cast<size_t>(rank)];
      if (expected) {
        stranger->send("welcome");
        ranks[static_cast<size_t>(rank)] = std::move(stranger);
        --missing;
      }
      stranger.reset();
    }
  }
  return ranks;
}

std::unique_ptr<LineSocket> connect_to_rank(const std::vector<std::string>& addresses, int port,
                                            const std::string& token, int rank, double seconds) {
  const double end = seconds_now() + seconds;
  while (seconds_now() < end) {
    for (const std::string& address : addresses) {
      std::unique_ptr<LineSocket> socket = connect_to(address, port, kConnectTrySeconds);
      if (!socket) continue;
      socket->send(fmt::format("{} {}", token, rank));
      const double answer_by = seconds_now() + kConnectTrySeconds;
      // Something else may listen there: a port of the same number on another network.
      while (!socket->closed() && seconds_now() < answer_by) {
        wait_readable({socket->fd()}, answer_by - seconds_now());
        const std::vector<std::string> lines = socket->receive();
        if (!lines.empty() && lines[0] == "welcome" && !socket->closed()) return socket;
      }
    }
    wait_readable({}, kConnectTrySeconds / 10);
  }
  return nullptr;
}

std::string join(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : " ") + word;
  return text;
}

}  // namespace parka
