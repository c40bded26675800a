#pragma once
#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "comm/communicator.h"
#include "core/memory/memory_plan.h"
#include "core/placement.h"
#include "engine/config/config.h"
#include "kernels/device/arena.h"
#include "optim/optimizer.h"

namespace parka {

// Checks for silent data corruption. A step is deterministic to the bit, so results computed twice, memory that
// nothing has written, and tensors that several ranks hold must be equal. The checks hash them on the device and
// compare. A difference throws Error(kCorrupted), which names step, rank, host, GPU and tensor.
class IntegrityChecks {
 public:
  // The kinds of memory that are hashed; each has its own table.
  enum class Table : uint8_t {
    kFirstGradients,  // of the micro-batch that is computed twice, and its loss
    kSecondGradients,
    kUpdated,    // weights and states after an update
    kUnchanged,  // the same before the next one
    kSaved,      // the tensors that a checkpoint is written from
  };

  static constexpr const char* kCategory = "checks";
  // Declares the tables in the plan, under kCategory.
  IntegrityChecks(const ReliabilityConfig& config, size_t num_parameters, MemoryPlan& plan);
  void bind(const Arena& arena);

  bool replay_is_due(int64_t step) const { return is_due(config_.replay_interval, step); }
  bool state_is_due(int64_t step) const { return is_due(config_.state_interval, step); }
  bool watches_state() const { return config_.state_interval > 0; }

  // A tensor that an update leaves, and the ranks that hold the same.
  struct Watched {
    NamedTensor tensor;
    int64_t replicas = 0;  // the same number on all ranks that have it
  };
  void watch(std::vector<Watched> watched) { watched_ = std::move(watched); }
  const std::vector<Watched>& watched() const { return watched_; }
  // Queues their hashes, each into the slot of its index: all after clearing the table, or those of a parameter.
  void hash_watched(Device& device, Table table) const;
  void hash_watched(Device& device, Table table, size_t parameter) const;
  // The same of other tensors.
  void hash(Device& device, Table table, const std::vector<TensorView>& tensors) const;
  void clear(Device& device, Table table) const;
  void hash_one(Device& device, Table table, size_t slot, const TensorView& tensor) const;
  int64_t table_bytes() const { return table_bytes_; }
  // [slots * 8] uint8, little-endian hashes.
  TensorView view(Table table) const { return tables_.at(static_cast<size_t>(table)); }
  std::unique_ptr<HostRead> read_later(Device& device, Table table) const;

 private:
  static bool is_due(int64_t interval, int64_t step) { return interval > 0 && step % interval == 0; }

  static constexpr size_t kNumTables = 5;
  ReliabilityConfig config_;
  int64_t table_bytes_;
  std::array<TensorId, kNumTables> ids_;
  std::array<TensorView, kNumTables> tables_;
  std::vector<Watched> watched_;
};

// Two tables that are being copied to the host and must be equal.
struct PendingComparison {
  std::unique_ptr<HostRead> one, other;
  std::vector<std::string> names;  // of the tensors, by slot
  std::string what;                // after a tensor's name: "differs when its micro-batch is computed twice"

  // Waits; throws if they differ. The error names the first such tensor of the list.
  void check(int64_t step, const std::string& where) const;
};

// Which tensors several ranks hold.
struct ReplicaHashes {
  std::vector<std::string> names;
  std::vector<uint64_t> hashes;
  std::vector<int64_t> groups;  // ranks that have the same number here hold the same tensor
};
// Throws the same Error(kCorrupted) on all ranks unless the ranks of each group agree about every tensor. All ranks
// must call this, with the same tensors; groups may differ from tensor to tensor.
void compare_replicas(Communicator& communicator, const ReplicaHashes& own, int64_t step, const std::string& where);

}  // namespace parka
