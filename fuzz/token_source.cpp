#include <algorithm>
#include <filesystem>

#include "data/token_files.h"
#include "engine/files/json_text.h"
#include "fuzz/target.h"

using namespace parka;
using namespace parka::fuzz;

namespace {

// Names that patterns find something among, and a folder.
std::string make_sources() {
  const std::string path = folder() / "sources";
  std::filesystem::create_directories(path + "/more");
  for (const char* name : {"a.npy", "b.bin", "b.idx", "a.npy.mask", "[x].npy", "more/c.npy"}) {
    test::write_file(path + "/" + name, std::string(64, '\0'));
  }
  return path + "/";
}

}  // namespace

// An entry of data.train: a name, or a pattern of names. One that leaves the folder of the test would be a walk
// over the machine, and one with many stars takes glob(3) exponential time.
FUZZ_TARGET(token_source) {
  static const std::string sources = make_sources();
  for (const char* above : {"..", ".?", ".*", ".["}) {
    if (input.find(above) != std::string_view::npos) return;
  }
  if (std::any_of(input.begin(), input.end(), is_control)) return;
  if (std::count(input.begin(), input.end(), '*') > 3) return;
  const std::string source = sources + std::string(input);
  accepts([&] { require(!expand_source(source).empty(), "a source is nothing"); });
  accepts([&] { TokenFiles({source}, TokenType::kUint16, 8, 1000, {.loss_mask = true}); });
}
