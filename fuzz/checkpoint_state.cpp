#include "engine/checkpoint/checkpoint.h"
#include "engine/checkpoint/checkpoint_layout.h"
#include "engine/checkpoint/saved_state.h"
#include "engine/huggingface/huggingface_origin.h"
#include "engine/training/run_data.h"
#include "fuzz/sealed_manifest.h"
#include "fuzz/target.h"

using namespace parka;
using namespace parka::fuzz;

// The state in a checkpoint whose checksums hold, written by another version of Parka or another program.
FUZZ_TARGET(checkpoint_state) {
  const std::string body = fmt::format(
      R"({{"format": "parka-checkpoint", "version": 1, "step": 7, "files": [], "tensors": 0, "complete": true, )"
      R"("state": {})",
      input);
  place_file(std::string(kManifestName), sealed_manifest(body));
  std::optional<LoadedCheckpoint> checkpoint;
  if (!accepts([&] { checkpoint = load_checkpoint(folder().path().string()); })) return;
  accepts([&] { config_of(*checkpoint); });
  accepts([&] { inference_config_of(*checkpoint, {"training.steps=3"}); });
  accepts([&] { max_positions_of(*checkpoint, 2048); });
  accepts([&] { find_origin(checkpoint->path(), checkpoint->state(), [](const std::string&) {}); });
  accepts([&] {
    const SavedProgress progress = read_progress(*checkpoint);
    file_differences(progress.files, progress.files);
    file_differences(progress.files, {{{"name", "a.npy"}, {"bytes", 1}, {"fingerprint", 2}, {"checksum", "c"}}});
  });
}
