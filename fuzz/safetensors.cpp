#include "engine/files/safetensors.h"

#include <limits>

#include "fuzz/target.h"

using namespace parka;
using namespace parka::fuzz;

namespace {

// What the header promises of every file.
void check_layout(const SafetensorsHeader& header, int64_t file_bytes) {
  int64_t end = header.num_bytes;
  for (const SafetensorsEntry& entry : header.tensors) {
    require(entry.offset == end, "a tensor does not begin where the one before it ends");
    require(entry.num_bytes == num_bytes_of(entry.dtype, entry.shape), "a tensor has not the bytes of its shape");
    end += entry.num_bytes;
  }
  require(end == file_bytes, "tensors do not end with the file");
}

void check_round_trip(const SafetensorsHeader& header, int64_t data_bytes) {
  const std::string start = encode_safetensors_header(header.tensors, header.metadata);
  const auto written =
      parse_safetensors_header(as_bytes(start), static_cast<int64_t>(start.size()) + data_bytes, "written");
  require(written.metadata == header.metadata, "metadata changes when it is written");
  require(written.tensors.size() == header.tensors.size(), "the number of tensors changes when they are written");
  for (size_t i = 0; i < written.tensors.size(); ++i) {
    const SafetensorsEntry &a = written.tensors[i], &b = header.tensors[i];
    require(a.name == b.name && a.dtype == b.dtype && a.shape == b.shape, "a tensor changes when it is written");
  }
}

}  // namespace

// A safetensors file, and the same header in files of other sizes.
FUZZ_TARGET(safetensors) {
  const auto size = static_cast<int64_t>(input.size());
  for (const int64_t file_bytes : {size, std::numeric_limits<int64_t>::max()}) {
    SafetensorsHeader header;
    if (!accepts([&] { header = parse_safetensors_header(as_bytes(input), file_bytes, "file"); })) continue;
    check_layout(header, file_bytes);
    require_accepted("a header as it was written",
                     [&] { check_round_trip(header, file_bytes - header.num_bytes); });
  }
  const std::string path = place_file("file.safetensors", input);
  if (!input.empty()) accepts([&] { read_safetensors_header(InputFile(path)); });
}
