#pragma once
#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "engine/checkpoint/checkpoint.h"
#include "kernels/device/device.h"
#include "optim/optimizer.h"

namespace parka {

// The masters and states that a checkpoint has in other formats than an optimizer, which are rounded to the
// optimizer's: as fp32 values, as an update would store them, by the CPU. A master that the new form holds exactly
// keeps its value; where masters change, the weights that the model computes with are set from them. States of
// another update rule are left out, and those that the checkpoint lacks for that begin at zero.
class StateConversion {
 public:
  // Unless it may round, there is one to convert: an fp32 master apart from its weight, as earlier versions saved
  // it.
  StateConversion(const LoadedCheckpoint& checkpoint, const Optimizer& optimizer, bool may_round);

  // True if run() sets this tensor of the checkpoint or of the optimizer, so that it cannot be taken as it is.
  bool covers(const std::string& tensor) const { return covered_.contains(tensor); }

  // States that begin at zero: "momentum of 24 parameters", or nothing.
  std::vector<std::string> zeroed() const;

  // Sets this rank's part of all of them. Throws Error(kBadInput) where the checkpoint lacks one, or has one that
  // no format is or that is not finite.
  void run(Device& device, Optimizer& optimizer) const;

 private:
  const LoadedCheckpoint& checkpoint_;
  std::set<std::string> covered_;
  std::map<std::string, std::set<std::string>, std::less<>> zeroed_;  // tensors by the state's name
};

}  // namespace parka
