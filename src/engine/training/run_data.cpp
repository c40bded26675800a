#include "engine/training/run_data.h"

#include <algorithm>
#include <string>

#include <fmt/format.h>

#include "core/heartbeat.h"
#include "engine/config/data_description.h"
#include "engine/files/file_io.h"
#include "engine/files/json_text.h"

namespace parka {

nlohmann::json describe_files(const TokenFiles& files, bool checksum, Communicator& communicator) {
  nlohmann::json all = nlohmann::json::array();
  for (const TokenFiles::FileIdentity& identity : files.identities()) {
    all.push_back({{"name", recordable_path(identity.name)},
                   {"bytes", identity.bytes},
                   {"fingerprint", identity.fingerprint}});
  }
  if (!checksum) return all;
  heartbeat("reading data.train");
  const std::vector<const ReadOnlyFile*> opened = files.files();
  const auto rank = static_cast<size_t>(communicator.rank()), size = static_cast<size_t>(communicator.size());
  // Each rank reads a file of every round. Ranks meet after a round, so that none waits long for another.
  const std::vector<std::string> counts = communicator.gather_text(std::to_string(opened.size()));
  if (std::any_of(counts.begin(), counts.end(), [&](const std::string& count) { return count != counts[0]; })) {
    throw_bad_input("data.train: ranks see different numbers of files; give all ranks the same files");
  }
  DataDescriptions descriptions;
  for (size_t first = 0; first < opened.size(); first += size) {
    const size_t own = first + rank;
    const std::vector<std::string> of_ranks =
        communicator.gather_text(own < opened.size() ? checksum_of(*opened[own]) : "");
    for (size_t i = first; i < std::min(first + size, opened.size()); ++i) {
      descriptions.check_content(*opened[i], [&] { return of_ranks[i - first]; });
      all[i]["checksum"] = of_ranks[i - first];
    }
  }
  return all;
}

std::vector<std::string> file_differences(const nlohmann::json& saved, const nlohmann::json& now) {
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
    const nlohmann::json& first = has_more ? now[saved.size()] : saved[now.size()];
    all.push_back(fmt::format("{} is {}: there are {} files, were {}", first.at("name").dump(),
                              has_more ? "new" : "missing", now.size(), saved.size()));
  }
  return all;
}

void keep_checksums(const nlohmann::json& saved, nlohmann::json& now) {
  for (size_t i = 0; i < now.size(); ++i) {
    if (saved[i].contains("checksum")) now[i]["checksum"] = saved[i]["checksum"];
  }
}

}  // namespace parka
