#include "engine/checkpoint/checkpoint_layout.h"
#include "engine/files/json_text.h"
#include "fuzz/sealed_manifest.h"
#include "fuzz/target.h"

using namespace parka;
using namespace parka::fuzz;

namespace {

bool same(const Manifest& a, const Manifest& b) {
  return a.step == b.step && a.state == b.state && encode_files(a.files) == encode_files(b.files) &&
         a.num_tensors == b.num_tensors && a.num_ranks == b.num_ranks && a.attempt == b.attempt;
}

}  // namespace

// A checkpoint's manifest, as it is and with a checksum that holds; and a list of files such as ranks leave for
// each other.
FUZZ_TARGET(manifest) {
  accepts([&] { parse_manifest(input, "manifest"); });
  accepts([&] { parse_files(parse_json_text(input, "files", JsonComments::kRefused), "files"); });
  Manifest manifest;
  if (!accepts([&] { manifest = parse_manifest(sealed_manifest(input), "manifest"); })) return;
  require_accepted("a manifest as it was written", [&] {
    require(same(parse_manifest(encode_manifest(manifest), "written"), manifest),
            "a manifest changes when it is written");
  });
}
