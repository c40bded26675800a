#include "engine/step/integrity.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

#include <fmt/ranges.h>

#include "core/bit_hash.h"
#include "engine/files/json.h"
#include "kernels/ops/elementwise/bit_hash.h"

namespace parka {
namespace {

// Weight, master, and two moments of codes, amax and exponents each; then weights that several ranks hold whole.
constexpr size_t kSlotsPerParameter = 9;
constexpr std::string_view kRemedy =
    "; its GPU or memory is faulty: take it out of service; the same command resumes from the last good checkpoint";

uint64_t hash_at(const void* table, size_t slot) {
  uint64_t hash = 0;
  std::memcpy(&hash, static_cast<const std::byte*>(table) + slot * kHashWordBytes, sizeof(hash));
  return hash;
}

// A rank's result of a check, and the one that it has heard from another.
struct Statement {
  std::string where;
  std::vector<uint64_t> hashes;
  std::vector<int64_t> groups;
};

Statement statement_of(const std::string& text) {
  const json said = json::parse(text);
  return {said.at("where"), said.at("hashes"), said.at("groups")};
}

// The ranks that differ from most of their group in tensor `i`, or all of a group without such a value.
std::vector<std::string> suspects(const std::vector<Statement>& ranks, size_t i) {
  std::map<int64_t, std::map<uint64_t, size_t>> holders;  // of each value in each group
  std::map<int64_t, size_t> members;
  for (const Statement& rank : ranks) {
    ++holders[rank.groups[i]][rank.hashes[i]];
    ++members[rank.groups[i]];
  }
  std::vector<std::string> found;
  for (const Statement& rank : ranks) {
    const int64_t group = rank.groups[i];
    const bool differs = holders[group].size() > 1;
    if (differs && 2 * holders[group][rank.hashes[i]] <= members[group]) found.push_back(rank.where);
  }
  return found;
}

}  // namespace

IntegrityChecks::IntegrityChecks(const ReliabilityConfig& config, size_t num_parameters, MemoryPlan& plan)
    : config_(config),
      table_bytes_(static_cast<int64_t>((kSlotsPerParameter * num_parameters + 1) * kHashWordBytes)) {
  for (size_t table = 0; table < kNumTables; ++table) {
    ids_[table] = plan.add(kCategory, fmt::format("hashes.{}", table), DType::kU8, {table_bytes_});
  }
}

void IntegrityChecks::bind(const Arena& arena) {
  std::transform(ids_.begin(), ids_.end(), tables_.begin(), [&](TensorId id) { return arena[id]; });
}

void IntegrityChecks::clear(Device& device, Table table) const {
  device.fill_zero(view(table).data, view(table).bytes());
}

void IntegrityChecks::hash_one(Device& device, Table table, size_t slot, const TensorView& tensor) const {
  if (tensor.numel() == 0) return;
  const auto at = static_cast<int64_t>(slot) * kHashWordBytes;
  bit_hash(device, {.x = tensor, .hash = view(table).rows(at, kHashWordBytes)});
}

void IntegrityChecks::hash(Device& device, Table table, const std::vector<TensorView>& tensors) const {
  clear(device, table);
  for (size_t i = 0; i < tensors.size(); ++i) hash_one(device, table, i, tensors[i]);
}

void IntegrityChecks::hash_watched(Device& device, Table table) const {
  clear(device, table);
  for (size_t i = 0; i < watched_.size(); ++i) hash_one(device, table, i, watched_[i].tensor.view);
}

void IntegrityChecks::hash_watched(Device& device, Table table, size_t parameter) const {
  for (size_t i = 0; i < watched_.size(); ++i) {
    if (watched_[i].tensor.parameter == parameter) hash_one(device, table, i, watched_[i].tensor.view);
  }
}

std::unique_ptr<HostRead> IntegrityChecks::read_later(Device& device, Table table) const {
  return device.copy_to_host_later(view(table).data, view(table).bytes());
}

void PendingComparison::check(int64_t step, const std::string& where) const {
  const void *first = one->wait(), *second = other->wait();
  size_t num_different = 0;
  const std::string* first_different = nullptr;
  for (size_t i = 0; i < names.size(); ++i) {
    if (hash_at(first, i) == hash_at(second, i)) continue;
    ++num_different;
    if (first_different == nullptr) first_different = &names[i];
  }
  if (first_different == nullptr) return;
  throw Error(ExitCode::kCorrupted,
              fmt::format("silent data corruption in step {} on {}: {} {} ({} of {} tensors){}", step, where,
                          *first_different, what, num_different, names.size(), kRemedy));
}

void compare_replicas(Communicator& communicator, const ReplicaHashes& own, int64_t step,
                      const std::string& where) {
  // Most often one number says that all is well.
  std::map<int64_t, uint64_t> sums;
  for (size_t i = 0; i < own.hashes.size(); ++i) sums[own.groups[i]] += mix_hash(own.hashes[i] + i);
  const json brief = std::vector<std::pair<int64_t, uint64_t>>(sums.begin(), sums.end());
  std::map<int64_t, uint64_t> known;
  bool equal = true;
  for (const std::string& text : communicator.gather_text(brief.dump())) {
    for (const auto& [group, sum] : json::parse(text).get<std::vector<std::pair<int64_t, uint64_t>>>()) {
      equal = equal && known.try_emplace(group, sum).first->second == sum;
    }
  }
  if (equal) return;
  const json whole = {{"where", where}, {"hashes", own.hashes}, {"groups", own.groups}};
  std::vector<Statement> ranks;
  for (const std::string& text : communicator.gather_text(whole.dump())) ranks.push_back(statement_of(text));
  for (size_t i = 0; i < own.names.size(); ++i) {
    const std::vector<std::string> found = suspects(ranks, i);
    if (found.empty()) continue;
    throw Error(
        ExitCode::kCorrupted,
        fmt::format("silent data corruption by step {}: {} differs between ranks that must hold the same: {}{}",
                    step, own.names[i], fmt::join(found, " and "), kRemedy));
  }
  throw_internal("replicas differ and no tensor does");
}

}  // namespace parka
