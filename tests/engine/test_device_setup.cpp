#include "engine/commands/device_setup.h"

#include "tests/support/catch.h"
#include "tests/support/refusal.h"

using namespace parka;
using namespace parka::test;

TEST_CASE("heads that are too wide for a GPU are refused before there is one", "[engine][config]") {
  const auto refused = [](const Config& config, DeviceKind device) {
    return refusal([&] { check_head_dims(config, device); });
  };
  const std::string wide =
      ": attention on a GPU takes heads of up to 512 columns; use more and narrower heads, or device.kind = cpu";
  Config config;
  config.model.given_head_dim = 512;
  CHECK(refused(config, DeviceKind::kCuda).empty());
  config.model.given_head_dim = 514;
  CHECK(refused(config, DeviceKind::kCuda) == "model.head_dim = 514" + wide);
  CHECK(refused(config, DeviceKind::kCpu).empty());

  config.device.kind = DeviceChoice::kCuda;
  CHECK(refusal([&] { make_device(config); }) == "model.head_dim = 514" + wide);
  config.device.kind = DeviceChoice::kCpu;
  CHECK(make_device(config)->kind() == DeviceKind::kCpu);

  config = {};
  config.model.num_heads = 2;
  CHECK(refused(config, DeviceKind::kCuda) == "model.d_model / model.num_heads = 1024" + wide);

  config = {};
  config.model.vision.tower = {.width = 1028, .num_heads = 2};
  CHECK(refused(config, DeviceKind::kCuda) == "model.vision.width / model.vision.num_heads = 514" + wide);
  config.model.vision.tower.kind = TowerKind::kNone;  // whose other keys mean nothing
  CHECK(refused(config, DeviceKind::kCuda).empty());

  config.finetune = {.method = FinetuneMethod::kQst, .side_head_dim = 514};
  CHECK(refused(config, DeviceKind::kCuda) == "finetune.side_head_dim = 514" + wide);
}
