#include "engine/commands/device_setup.h"

#include "engine/files/gemm_tuning_file.h"
#include "tests/engine/named_device.h"
#include "tests/support/catch.h"
#include "tests/support/refusal.h"
#include "tests/support/temporary_folder.h"

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

TEST_CASE("a tuning file of the training is no condition to use its checkpoint", "[engine][tuning]") {
  const TemporaryFolder folder;
  const NamedDevice here("Card A"), elsewhere("Card B");
  Config config;
  CHECK(inference_gemms(config, {}, here).empty());
  const std::string path = config.device.gemm_tuning = folder / "tuning.json";
  const std::vector<std::string> given = {"model.d_model=8", "device.gemm_tuning=" + path};
  CHECK(inference_gemms(config, {"model.d_model=8"}, here).empty());  // there is no such file
  CHECK_FALSE(refusal([&] { inference_gemms(config, given, here); }).empty());
  write_gemm_tuning(path, {{"a product", "0123", 3, 4}}, here);
  CHECK(inference_gemms(config, {}, here).size() == 1);
  CHECK(inference_gemms(config, given, here).size() == 1);
  CHECK(inference_gemms(config, {}, elsewhere).empty());
  CHECK(refusal([&] { inference_gemms(config, given, elsewhere); }).find("made for Card A") != std::string::npos);
}
