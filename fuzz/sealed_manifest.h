#pragma once
#include <string>
#include <string_view>

#include <fmt/format.h>

#include "engine/files/file_io.h"

namespace parka::fuzz {

// The text of a manifest whose own checksum holds: what fuzzing alone would never find. `body` is all of it but the
// checksum and the brace that closes it.
inline std::string sealed_manifest(std::string_view body) {
  Checksum checksum;
  checksum.update(as_bytes(body));
  return fmt::format("{},\n  \"manifest_xxh3_128\": \"{}\"\n}}\n", body, checksum.hex());
}

}  // namespace parka::fuzz
