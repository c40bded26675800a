#include "comm/transport.h"

#include <algorithm>
#include <array>
#include <climits>

#include <mpi.h>

#include "comm/launch/start_wait.h"
#include "core/error.h"

namespace parka {
namespace {

constexpr int kTag = 1;
constexpr const char* kHint =
    "a rank hangs or is stopped, is another command than parka train, or its host or network is down";

void check(int status, const char* what) {
  if (status == MPI_SUCCESS) return;
  std::array<char, MPI_MAX_ERROR_STRING> text{};
  int length = 0;
  MPI_Error_string(status, text.data(), &length);
  throw Error(ExitCode::kRankLost, fmt::format("{}: MPI: {}", what, std::string(text.data(), length)));
}

class MpiTransport final : public Transport {
 public:
  MpiTransport() {
    check(MPI_Comm_rank(MPI_COMM_WORLD, &rank_), "rank");
    check(MPI_Comm_size(MPI_COMM_WORLD, &size_), "size");
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::string name() const override { return "MPI"; }

  void connect_all() override {}
  void send(const void* data, int64_t bytes, int to) override {
    if (bytes == 0) return;
    PARKA_REQUIRE(bytes <= INT_MAX);
    requests_.emplace_back();
    check(MPI_Isend(data, static_cast<int>(bytes), MPI_BYTE, to, kTag, MPI_COMM_WORLD, &requests_.back()), "send");
  }
  void receive(void* data, int64_t bytes, int from) override {
    if (bytes == 0) return;
    PARKA_REQUIRE(bytes <= INT_MAX);
    requests_.emplace_back();
    check(MPI_Irecv(data, static_cast<int>(bytes), MPI_BYTE, from, kTag, MPI_COMM_WORLD, &requests_.back()),
          "receive");
  }
  void wait() override {
    const int status = MPI_Waitall(static_cast<int>(requests_.size()), requests_.data(), MPI_STATUSES_IGNORE);
    requests_.clear();
    check(status, "exchange");
  }

  std::vector<std::string> gather_text(const std::string& text) override;
  void limit_waits(const WaitTimes* times) override {
    limit_.reset();
    if (times != nullptr) {
      limit_ = std::make_unique<WaitLimit>(fmt::format("rank {} waits for the other ranks to agree", rank_), kHint,
                                           *times);
    }
  }
  void finish() override { check(MPI_Finalize(), "MPI_Finalize"); }

 private:
  int rank_ = 0, size_ = 1;
  std::vector<MPI_Request> requests_;
  std::unique_ptr<WaitLimit> limit_;
};

std::vector<std::string> MpiTransport::gather_text(const std::string& text) {
  const auto length = static_cast<int>(text.size());
  std::vector<int> lengths(static_cast<size_t>(size_)), offsets(static_cast<size_t>(size_));
  check(MPI_Allgather(&length, 1, MPI_INT, lengths.data(), 1, MPI_INT, MPI_COMM_WORLD), "gather_text");
  int64_t total = 0;
  for (int r = 0; r < size_; ++r) {
    offsets[r] = static_cast<int>(total);
    total += lengths[r];
    PARKA_REQUIRE(total <= INT_MAX);
  }
  std::string all(static_cast<size_t>(total), '\0');
  check(MPI_Allgatherv(text.data(), length, MPI_BYTE, all.data(), lengths.data(), offsets.data(), MPI_BYTE,
                       MPI_COMM_WORLD),
        "gather_text");
  std::vector<std::string> texts;
  texts.reserve(static_cast<size_t>(size_));
  for (int r = 0; r < size_; ++r) {
    texts.push_back(all.substr(static_cast<size_t>(offsets[r]), static_cast<size_t>(lengths[r])));
  }
  return texts;
}

}  // namespace

bool built_with_mpi() { return true; }

std::string mpi_library() {
  std::array<char, MPI_MAX_LIBRARY_VERSION_STRING> version{};
  int length = 0;
  check(MPI_Get_library_version(version.data(), &length), "version");
  std::string library(version.data(), length);
  library.resize(std::min(library.size(), library.find_first_of(",\n")));
  return library;
}

std::unique_ptr<Transport> join_over_mpi(int rank, const WaitTimes& times) {
  const WaitLimit limit(fmt::format("rank {} waits in MPI_Init for the other ranks", rank), kHint, times);
  int provided = 0;
  check(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &provided), "MPI_Init");
  // MPI returns error codes, from which check() makes one line that names the collective.
  check(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN), "error handler");
  return std::make_unique<MpiTransport>();
}

}  // namespace parka
