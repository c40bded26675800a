#include "engine/files/gemm_tuning_file.h"

#include "core/error.h"
#include "tests/support/catch.h"
#include "tests/support/temporary_folder.h"

using namespace parka;
using namespace parka::test;

namespace {

const std::vector<GemmChoice> kChoices = {{"8 x 16 x 32 bf16 NN bf16", std::string(128, 'a'), 12.5, 13.25},
                                          {"1 x 2 x 3 bf16 TT fp32 +=", std::string(128, '0'), 1.0, 1.0}};

std::string refusal(const std::string& path, const Device& device) {
  try {
    read_gemm_tuning(path, device);
  } catch (const Error& error) {
    CHECK(error.code() == ExitCode::kBadInput);
    return error.what();
  }
  return "";
}

std::string replaced(std::string text, const std::string& from, const std::string& to) {
  const size_t at = text.find(from);
  REQUIRE(at != std::string::npos);
  return text.replace(at, from.size(), to);
}

}  // namespace

TEST_CASE("a tuning file gives back what was chosen", "[engine][tuning]") {
  const TemporaryFolder folder;
  const auto device = make_cpu_device();
  const std::string path = folder / "tuning.json";
  write_gemm_tuning(path, kChoices, *device);
  const std::vector<GemmChoice> read = read_gemm_tuning(path, *device);
  REQUIRE(read.size() == kChoices.size());
  for (size_t i = 0; i < read.size(); ++i) {
    CHECK(read[i].gemm == kChoices[i].gemm);
    CHECK(read[i].algorithm == kChoices[i].algorithm);
    CHECK(read[i].microseconds == kChoices[i].microseconds);
    CHECK(read[i].default_microseconds == kChoices[i].default_microseconds);
  }
}

TEST_CASE("a tuning file of another GPU or library, or a damaged one, is refused", "[engine][tuning]") {
  const TemporaryFolder folder;
  const auto device = make_cpu_device();
  const std::string path = folder / "tuning.json";
  write_gemm_tuning(path, kChoices, *device);
  const std::string good = read_file(path);
  const struct {
    const char *from, *to, *message;
  } cases[] = {
      {"\"gpu\": \"CPU\"", "\"gpu\": \"NVIDIA A100\"", "made for NVIDIA A100"},
      {"\"cublaslt\": \"", "\"cublaslt\": \"9", "run `parka tune` here"},
      {"\"gemms\"", "\"gems\"", "not a file that `parka tune` wrote"},
      {"\"algorithm\": \"a", "\"algorithm\": 3, \"x\": \"a", "not a file that `parka tune` wrote"},
      {"}", "", "tuning.json"},
  };
  for (const auto& c : cases) {
    CAPTURE(c.from, c.to);
    write_file(path, replaced(good, c.from, c.to));
    CHECK(refusal(path, *device).find(c.message) != std::string::npos);
  }
  CHECK(refusal(folder / "missing.json", *device).find("missing.json") != std::string::npos);
}
