#include "engine/training/run_data.h"

#include <sys/stat.h>

#include <algorithm>
#include <span>
#include <utility>

#include <fmt/format.h>

#include "core/heartbeat.h"
#include "data/xxh3.h"
#include "engine/config/data_description.h"
#include "engine/files/file_io.h"
#include "engine/files/json_text.h"

namespace parka {
namespace {

// The same for ranks that see the same files, on whatever hosts, and another where they have copies.
std::string places_of(const std::vector<const ReadOnlyFile*>& files) {
  std::vector<int64_t> places;
  for (const ReadOnlyFile* file : files) {
    struct stat status {};
    stat(file->path().c_str(), &status);
    places.insert(places.end(),
                  {static_cast<int64_t>(status.st_ino), status.st_ctim.tv_sec, status.st_ctim.tv_nsec});
  }
  return fmt::format("{:016x}", xxh3_64(std::as_bytes(std::span(places))));
}

}  // namespace

json describe_files(const TokenFiles& files, bool checksum, Communicator& communicator) {
  json all = json::array();
  for (const TokenFiles::FileIdentity& identity : files.identities()) {
    all.push_back({{"name", recordable_path(identity.name)},
                   {"bytes", identity.bytes},
                   {"fingerprint", identity.fingerprint}});
  }
  if (!checksum) return all;
  heartbeat("reading data.train");
  const std::vector<const ReadOnlyFile*> opened = files.files();
  const auto own = static_cast<size_t>(communicator.rank());
  const std::vector<std::string> counts = communicator.gather_text(std::to_string(opened.size()));
  if (std::ranges::count(counts, counts[0]) != std::ssize(counts)) {
    throw_bad_input("data.train: ranks see different numbers of files; give all ranks the same files");
  }
  // Each rank reads a file of every round. Ranks meet after a round, so that none waits long for another.
  const std::vector<std::string> places = communicator.gather_text(places_of(opened));
  std::vector<size_t> next, readers;  // of each rank: the file that it reads, and how many it passes over then
  for (const std::string& place : places) {
    next.push_back(static_cast<size_t>(std::count(places.begin(), places.begin() + std::ssize(next), place)));
    readers.push_back(static_cast<size_t>(std::ranges::count(places, place)));
  }
  DataDescriptions descriptions;
  while (std::ranges::min(next) < opened.size()) {
    const std::vector<std::string> of_ranks =
        communicator.gather_text(next[own] < opened.size() ? checksum_of(*opened[next[own]]) : "");
    for (size_t rank = 0; rank < of_ranks.size(); ++rank) {
      const size_t i = std::exchange(next[rank], next[rank] + readers[rank]);
      if (i >= opened.size()) continue;
      descriptions.check_content(*opened[i], [&] { return of_ranks[rank]; });
      if (*all[i].emplace("checksum", of_ranks[rank]).first == of_ranks[rank]) continue;
      throw_bad_input("{}: the copy of rank {} differs from that of another rank; copy it again", opened[i]->path(),
                      rank);
    }
  }
  return all;
}

std::vector<std::string> file_differences(const json& saved, const json& now) {
  std::vector<std::string> all;
  for (size_t i = 0; i < std::min(saved.size(), now.size()); ++i) {
    const auto &before = saved[i], &after = now[i];
    const std::string name = after.at("name").dump();
    const bool both = before.contains("checksum") && after.contains("checksum");
    if (before.at("name") != after.at("name")) {
      all.push_back(fmt::format("file {} is {}, was {}", i, name, before.at("name").dump()));
    } else if (before.at("bytes") != after.at("bytes")) {
      all.push_back(
          fmt::format("{} has {} bytes, had {}", name, after.at("bytes").dump(), before.at("bytes").dump()));
    } else if (before.at("fingerprint") != after.at("fingerprint") ||
               (both && before.at("checksum") != after.at("checksum"))) {
      all.push_back(fmt::format("{} holds different bytes", name));
    }
  }
  if (saved.size() != now.size()) {
    const bool has_more = now.size() > saved.size();
    const json& first = has_more ? now[saved.size()] : saved[now.size()];
    all.push_back(fmt::format("{} is {}: there are {} files, were {}", first.at("name").dump(),
                              has_more ? "new" : "missing", now.size(), saved.size()));
  }
  return all;
}

void keep_checksums(const json& saved, json& now) {
  for (size_t i = 0; i < now.size(); ++i) {
    if (saved[i].contains("checksum")) now[i]["checksum"] = saved[i]["checksum"];
  }
}

}  // namespace parka
