#include "engine/files/gemm_tuning_file.h"

#include "fuzz/target.h"

using namespace parka;
using namespace parka::fuzz;

// What `parka tune` writes; the seeds are files for the CPU.
FUZZ_TARGET(gemm_tuning) {
  static const std::unique_ptr<Device> device = make_cpu_device();
  test::write_file(folder() / "tuning.json", std::string(input));
  std::vector<GemmChoice> choices;
  if (!accepts([&] { choices = read_gemm_tuning(folder() / "tuning.json", *device); })) return;
  write_gemm_tuning(folder() / "written.json", choices, *device);
  require_accepted("a tuning file as it was written", [&] {
    const std::vector<GemmChoice> again = read_gemm_tuning(folder() / "written.json", *device);
    require(again.size() == choices.size(), "the number of choices changes when they are written");
    for (size_t i = 0; i < again.size(); ++i) {
      require(again[i].gemm == choices[i].gemm && again[i].algorithm == choices[i].algorithm &&
                  again[i].microseconds == choices[i].microseconds,
              "a choice changes when it is written");
    }
  });
}
