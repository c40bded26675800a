#include "engine/commands/device_setup.h"

#include "engine/config/config_io.h"
#include "engine/files/gemm_tuning_file.h"
#include "engine/planning/memory_advice.h"
#include "tests/engine/named_device.h"
#include "tests/support/catch.h"
#include "tests/support/refusal.h"
#include "tests/support/temporary_folder.h"

using namespace parka;
using namespace parka::test;

namespace {

// A GPU of which so much is free.
class GpuWithFree : public ForwardingDevice {
 public:
  explicit GpuWithFree(int64_t bytes) : bytes_(bytes) {}
  DeviceKind kind() const override { return DeviceKind::kCuda; }
  MemoryUse memory_use() const override { return {bytes_, bytes_}; }

 private:
  int64_t bytes_;
};

// The overrides of "... --set A --set B".
std::vector<std::string> overrides_in(const std::string& text) {
  constexpr std::string_view kSet = "--set ";
  std::vector<std::string> overrides;
  for (size_t at = text.find(kSet); at != std::string::npos; at = text.find(kSet, at)) {
    at += kSet.size();
    overrides.push_back(text.substr(at, text.find(' ', at) - at));
  }
  return overrides;
}

}  // namespace

TEST_CASE("a run that does not fit is told of changes that leave memory for NCCL", "[engine][memory advice]") {
  const std::string path = PARKA_SOURCE_DIR "/configs/llama2-7b-parka.json";
  const GivenConfig given = GivenConfig::read(path, {});
  const auto planned = [&](const std::vector<std::string>& more, int64_t gpus) {
    return planned_bytes(given.with(more), gpus);
  };
  for (const int64_t gpus : {1, 2}) {
    const GpuWithFree enough(planned({}, gpus)), little(planned({}, gpus) - 1);
    CHECK(refusal([&] { check_memory(given.with({}), given, enough, gpus); }).empty());
    const std::string message = refusal([&] { check_memory(given.with({}), given, little, gpus); });
    CAPTURE(gpus, message);
    const std::vector<std::string> changes = overrides_in(message);
    REQUIRE_FALSE(changes.empty());
    CHECK(planned(changes, gpus) <= little.memory_use().free_bytes - nccl_bytes(gpus));
  }
}

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
