#pragma once
#include <functional>
#include <optional>
#include <utility>

#include "engine/step/parameter_exchange.h"
#include "model/unit_hooks.h"
#include "optim/optimizer.h"

namespace parka {

// Updates each unit while backward goes on (optimizer.release_gradients): the hooks of such a run, which pass on
// all that they are told to ParameterExchange where there is one. With several ranks the gradients of a unit are
// reduced while backward is at the next one, behind which the unit is updated: the two buffers that units take in
// turn suffice. On one rank a unit is updated at once.
class ReleasedUpdates final : public UnitHooks {
 public:
  // `exchange`: null where there is nothing to bring together. `are_several`: there are several ranks, whose
  // gradients it reduces. All must live as long as this.
  ReleasedUpdates(Optimizer& optimizer, const ParameterTable& table, ParameterExchange* exchange, bool are_several)
      : optimizer_(optimizer), table_(table), exchange_(exchange), are_several_(are_several) {
    PARKA_REQUIRE(exchange != nullptr || !are_several);
  }

  // Arguments of Optimizer::step_unit().
  struct Arguments {
    Optimizer::Update update;
    Optimizer::SumOverRanks sums;
    std::function<void(size_t parameter)> before_update;
  };
  // The next micro-batch makes this update. One without leaves all weights as they are.
  void set_update(Arguments arguments) { arguments_ = std::move(arguments); }
  // The next micro-batch leaves the update to the one behind it, by which it is computed again.
  void hold_update() { is_held_ = true; }
  // The same as ParameterExchange::on_gradient().
  void on_gradient(std::function<void(int parameter)> called) { gradient_complete_ = std::move(called); }

  void before_forward(Device& device, int unit) override;
  void before_backward(Device& device, int unit) override;
  void after_backward(Device& device, int unit) override;

 private:
  void update(Device& device, int unit);

  Optimizer& optimizer_;
  const ParameterTable& table_;
  ParameterExchange* exchange_;
  bool are_several_;
  std::optional<Arguments> arguments_;
  bool is_held_ = false;
  std::function<void(int parameter)> gradient_complete_;
};

}  // namespace parka
