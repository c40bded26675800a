#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "core/tensor.h"

namespace parka {

// Names a tensor of a MemoryPlan.
struct TensorId {
  int index = -1;
  bool valid() const { return index >= 0; }
};

// Parts of a step, as bits. Tensors without a common phase may share memory.
using PhaseMask = uint32_t;
inline constexpr PhaseMask kAllPhases = ~PhaseMask{0};

// The memory of a tensor: on the device, or on its host where the device can access it.
enum class MemoryPlace : uint8_t { kDevice, kHost };

// All tensors that a run will hold on a device and beside it, declared before anything is allocated. The same
// declarations serve `parka plan`, which only adds up sizes, and `parka train`, which allocates exactly this, once.
class MemoryPlan {
 public:
  struct Entry {
    std::string category;  // "weights", "saved activations", ...: a line of the printed plan
    std::string name;
    DType dtype;
    std::vector<int64_t> shape;
    int64_t bytes;
    PhaseMask phases;
    MemoryPlace place;
    int64_t offset = -1;               // from the start of the arena's memory in `place`; set by finish()
    std::vector<int64_t> larger = {};  // bytes that finish() may make of it
  };

  static constexpr int64_t kAlignment = 256;  // of every tensor, in bytes

  // Declares a tensor. A tensor of all phases never shares memory; one in host memory is of all phases.
  // Throws Error(kBadInput) if it is too large for any machine.
  TensorId add(std::string category, std::string name, DType dtype, std::vector<int64_t> shape,
               PhaseMask phases = kAllPhases, MemoryPlace place = MemoryPlace::kDevice);

  // Declares `bytes` of a few phases; finish() makes it the most of `larger`, ascending, that fits the arena.
  TensorId add_growing(std::string category, std::string name, int64_t bytes, std::vector<int64_t> larger,
                       PhaseMask phases);

  // A tensor is needed in these phases, too.
  void add_phases(TensorId id, PhaseMask phases) { entries_.at(static_cast<size_t>(id.index)).phases |= phases; }

  // Assigns offsets: first the tensors of all phases, one after another, then the transient ones, packed closely so
  // that no two with a common phase overlap. Tensors in host memory lie one after another there. The same
  // declarations get the same offsets. Nothing may be added afterwards.
  void finish();

  bool finished() const { return total_bytes_ >= 0; }
  int64_t total_bytes() const;       // size of the arena on the device
  int64_t total_host_bytes() const;  // and in host memory
  const std::vector<Entry>& entries() const { return entries_; }
  const Entry& operator[](TensorId id) const { return entries_.at(static_cast<size_t>(id.index)); }

  struct CategoryTotal {
    std::string category;
    int64_t bytes;
    int64_t num_tensors;
  };
  // Bytes on the device per category, in order of first declaration. Memory that several categories share counts
  // for the first one. So the totals add up to total_bytes(), and dropping a later category saves its own total.
  std::vector<CategoryTotal> summary() const;
  // Likewise of what is in host memory; the totals add up to total_host_bytes().
  std::vector<CategoryTotal> host_summary() const;

 private:
  static int64_t aligned(int64_t bytes);

  std::vector<Entry> entries_;
  int64_t total_bytes_ = -1, total_host_bytes_ = 0;
};

}  // namespace parka
