#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace parka {

// Which source each sequence of a run comes from. At every moment the share of each source is exact to within half
// a sequence for each split that leads to it: less than half the number of sources, and less than one sequence for
// three sources or fewer.
//
// The first source takes round(share * n) of the first n sequences. The second takes its share of the rest in the
// same way, and so on. That is a function of n alone, in integers: a run may be resumed anywhere, on any number of
// ranks, and the same weights give the same sequence on any machine.
class Mixture {
 public:
  // Only the ratios of the weights count. Throws Error(kBadInput) if there are none, or one is not positive.
  explicit Mixture(const std::vector<double>& weights);

  size_t num_sources() const { return takes_.size(); }

  // Of each source, its part of what the sources before it leave, exactly as it is used: mixtures of the same parts
  // draw the same sequence. They are no weights.
  std::vector<double> parts() const;

  // Sequence n of the run: the `index`-th one, from 0, that `source` gives.
  struct Draw {
    size_t source;
    int64_t index;
    bool operator==(const Draw&) const = default;
  };
  Draw at(int64_t n) const;

  // How many of the first n sequences each source gives.
  std::vector<int64_t> counts(int64_t n) const;

 private:
  std::vector<uint64_t> takes_;  // of what the sources before leave, in units of 2^-62; the last takes all
};

}  // namespace parka
