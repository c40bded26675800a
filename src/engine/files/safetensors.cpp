#include "engine/files/safetensors.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <limits>
#include <set>
#include <tuple>
#include <utility>

#include "core/error.h"
#include "core/parallel.h"
#include "engine/files/json_text.h"

namespace parka {
namespace {

constexpr int64_t kLengthBytes = 8;
constexpr int64_t kMaxHeaderBytes = 100'000'000;  // the format's own limit
constexpr int64_t kAlignment = 8;                 // of the tensors' bytes in the file, by padding the header
constexpr std::string_view kMetadataKey = "__metadata__";

constexpr std::array<std::pair<std::string_view, DType>, 9> kDTypes{{{"F32", DType::kF32},
                                                                     {"F16", DType::kF16},
                                                                     {"BF16", DType::kBF16},
                                                                     {"F8_E4M3", DType::kE4M3},
                                                                     {"F8_E5M2", DType::kE5M2},
                                                                     {"I32", DType::kI32},
                                                                     {"U16", DType::kU16},
                                                                     {"U8", DType::kU8},
                                                                     {"I64", DType::kI64}}};

void check_tensors(const std::vector<const HostTensor*>& tensors) {
  std::set<std::string_view> names{kMetadataKey};
  for (const HostTensor* tensor : tensors) {
    if (!names.insert(tensor->name).second)
      throw_internal("two tensors have the name \"{}\"", printable(tensor->name));
    int64_t expected = num_bytes_of(tensor->dtype, tensor->shape);
    if (const auto& piece = tensor->piece; piece && expected >= 0) {
      const int64_t size = size_of(tensor->dtype);
      if (!piece->lies_in(expected / size)) {
        throw_internal("tensor \"{}\" has {} elements, its piece is rows [{}, {}) and columns [{}, {}) of {}",
                       printable(tensor->name), expected / size, piece->rows.begin, piece->rows.end,
                       piece->columns.begin, piece->columns.end, piece->row_length);
      }
      expected = piece->numel() * size;
    }
    if (expected != tensor->num_bytes()) {
      throw_internal("tensor \"{}\" has {} bytes where its dtype, shape and piece say {}", printable(tensor->name),
                     tensor->num_bytes(), expected);
    }
  }
}

// The length of the JSON text, checked against what the file can hold.
int64_t decode_length(ByteSpan start, int64_t file_bytes, std::string_view where) {
  if (file_bytes < kLengthBytes || start.size() < kLengthBytes) {
    throw_bad_input("{}: has {} bytes, too few for a safetensors file", where, file_bytes);
  }
  uint64_t length = 0;
  for (int i = 0; i < kLengthBytes; ++i) length |= std::to_integer<uint64_t>(start[i]) << (8 * i);
  if (length > static_cast<uint64_t>(std::min(kMaxHeaderBytes, file_bytes - kLengthBytes))) {
    throw_bad_input("{}: claims a header of {} bytes in a file of {}: cut short, or not safetensors", where, length,
                    file_bytes);
  }
  return static_cast<int64_t>(length);
}

std::vector<int64_t> integers_in(const JsonReader& reader, const char* key) {
  const json& list = reader.member(key);
  std::vector<int64_t> values;
  for (const json& value : list) {
    const std::optional<int64_t> count = list.is_array() ? parse_count(value) : std::nullopt;
    if (!count) reader.fail(fmt::format("{} must be a list of integers from 0 to 2^63 - 1", key));
    values.push_back(*count);
  }
  return values;
}

SafetensorsEntry parse_entry(const std::string& name, const json& value, int64_t header_bytes,
                             std::string_view file) {
  const JsonReader reader(value, fmt::format("{}: tensor \"{}\"", file, printable(name)));
  if (value.size() != 3) reader.fail("must be an object of dtype, shape and data_offsets");
  const std::string format = reader.text("dtype");
  const std::optional<DType> dtype = parse_format_name(format);
  if (!dtype) reader.fail(fmt::format("dtype \"{}\" is not one that Parka reads", printable(format)));
  SafetensorsEntry entry{.name = name, .dtype = *dtype, .shape = integers_in(reader, "shape")};
  const std::vector<int64_t> range = integers_in(reader, "data_offsets");
  if (range.size() != 2 || range[0] > range[1] || range[1] > INT64_MAX - header_bytes) {
    reader.fail("data_offsets are no first byte and end of bytes in a file");
  }
  entry.offset = header_bytes + range[0];
  entry.num_bytes = range[1] - range[0];
  if (entry.num_bytes != num_bytes_of(entry.dtype, entry.shape)) {
    reader.fail(fmt::format("data_offsets span {} bytes, which is not what dtype and shape say", entry.num_bytes));
  }
  return entry;
}

std::map<std::string, std::string> parse_metadata(const json& value, std::string_view where) {
  if (!value.is_object()) throw_bad_input("{}: {} must be an object", where, kMetadataKey);
  std::map<std::string, std::string> metadata;
  for (const auto& [key, text] : value.items()) {
    if (!text.is_string()) throw_bad_input("{}: {} \"{}\" must be a string", where, kMetadataKey, printable(key));
    metadata[key] = text.get<std::string>();
  }
  return metadata;
}

// Sorts the tensors by position and checks that they fill the file's data exactly.
void check_layout(SafetensorsHeader& header, int64_t file_bytes, std::string_view where) {
  // An empty tensor has the offset of its successor and must come before it.
  const auto position = [](const SafetensorsEntry& e) { return std::tie(e.offset, e.num_bytes, e.name); };
  std::ranges::sort(header.tensors, [&](const auto& a, const auto& b) { return position(a) < position(b); });
  int64_t end = header.num_bytes;
  for (const SafetensorsEntry& entry : header.tensors) {
    if (entry.offset != end) {
      throw_bad_input("{}: tensor \"{}\" begins at byte {}, the one before it ends at {}", where,
                      printable(entry.name), entry.offset, end);
    }
    end += entry.num_bytes;
  }
  if (end == file_bytes) return;
  if (file_bytes < end) {
    throw_bad_input("{}: cut short: has {} of {} bytes; download it again, or copy it again", where, file_bytes,
                    end);
  }
  throw_bad_input("{}: tensors end at byte {}, the file at {}", where, end, file_bytes);
}

constexpr int64_t kPieceElements = 1 << 16;

template <typename Element, typename Decode>
void decode_each(ByteSpan bytes, std::span<float> values, Decode decode) {
  parallel_for(static_cast<int64_t>(values.size()), kPieceElements, [&](int64_t begin, int64_t end) {
    for (auto i = static_cast<size_t>(begin); i < static_cast<size_t>(end); ++i) {
      Element element;
      std::memcpy(&element, bytes.data() + i * sizeof(Element), sizeof(Element));
      values[i] = decode(element);
    }
  });
}

template <typename Encode>
void encode_each(std::span<const float> values, std::span<std::byte> bytes, Encode encode) {
  parallel_for(static_cast<int64_t>(values.size()), kPieceElements, [&](int64_t begin, int64_t end) {
    for (auto i = static_cast<size_t>(begin); i < static_cast<size_t>(end); ++i) {
      const auto element = encode(values[i]);
      std::memcpy(bytes.data() + i * sizeof(element), &element, sizeof(element));
    }
  });
}

// True if all elements, without their sign, are below `limit` as integers: so are the finite ones of every float
// format below the bits of its first infinity or NaN.
template <typename Bits>
bool all_below(ByteSpan bytes, Bits limit) {
  constexpr Bits kMagnitude = std::numeric_limits<Bits>::max() >> 1;
  Bits largest = 0;  // no branch for each element: compilers vectorise this
  for (size_t i = 0; i < bytes.size() / sizeof(Bits); ++i) {
    Bits bits;
    std::memcpy(&bits, bytes.data() + i * sizeof(Bits), sizeof(Bits));
    largest = std::max<Bits>(largest, bits & kMagnitude);
  }
  return largest < limit;
}

}  // namespace

std::string_view format_name(DType dtype) {
  for (const auto& [name, value] : kDTypes) {
    if (value == dtype) return name;
  }
  throw_internal("safetensors has no name for {}", name_of(dtype));
}

std::optional<DType> parse_format_name(std::string_view name) {
  for (const auto& [known, dtype] : kDTypes) {
    if (known == name) return dtype;
  }
  return std::nullopt;
}

int64_t num_bytes_of(DType dtype, const std::vector<int64_t>& shape) {
  int64_t bytes = size_of(dtype);
  for (const int64_t dim : shape) {
    if (dim < 0 || __builtin_mul_overflow(bytes, dim, &bytes)) return -1;
  }
  return bytes;
}

int64_t num_elements_of(const std::vector<int64_t>& shape) { return num_bytes_of(DType::kU8, shape); }

bool is_partial(const HostTensor& tensor) {
  return tensor.piece && tensor.piece->numel() != num_elements_of(tensor.shape);
}

void write_safetensors(const std::vector<const HostTensor*>& tensors, const SafetensorsMetadata& metadata,
                       const ByteSink& sink) {
  check_tensors(tensors);
  std::vector<const HostTensor*> ordered = tensors;
  std::ranges::stable_sort(
      ordered, [](const HostTensor* a, const HostTensor* b) { return size_of(a->dtype) > size_of(b->dtype); });
  std::vector<SafetensorsEntry> entries;
  for (const HostTensor* tensor : ordered) {
    const auto shape = is_partial(*tensor) ? std::vector<int64_t>{tensor->piece->numel()} : tensor->shape;
    entries.push_back({.name = tensor->name, .dtype = tensor->dtype, .shape = shape});
  }
  sink(as_bytes(encode_safetensors_header(entries, metadata)));
  for (const HostTensor* tensor : ordered) tensor->read(sink);
}

void write_safetensors(const std::vector<HostTensor>& tensors, const SafetensorsMetadata& metadata,
                       OutputFile& file) {
  std::vector<const HostTensor*> pointers;
  pointers.reserve(tensors.size());
  for (const HostTensor& tensor : tensors) pointers.push_back(&tensor);
  write_safetensors(pointers, metadata, [&](ByteSpan bytes) { file.write(bytes); });
  file.sync_and_close();
}

std::string encode_safetensors_header(const std::vector<SafetensorsEntry>& tensors,
                                      const SafetensorsMetadata& metadata) {
  ordered_json::object_t header;  // by its key a member would be looked for among all
  if (!metadata.empty()) header.push_back({std::string(kMetadataKey), metadata});
  int64_t begin = 0;
  for (const SafetensorsEntry& tensor : tensors) {
    const int64_t end = begin + num_bytes_of(tensor.dtype, tensor.shape);
    header.push_back(
        {tensor.name,
         {{"dtype", format_name(tensor.dtype)}, {"shape", tensor.shape}, {"data_offsets", {begin, end}}}});
    begin = end;
  }
  std::string text;
  try {
    text = ordered_json(std::move(header)).dump();
  } catch (const json::exception&) {
    throw_internal("a tensor's name is not UTF-8");
  }
  while ((kLengthBytes + static_cast<int64_t>(text.size())) % kAlignment != 0) text += ' ';
  std::string start;
  for (int i = 0; i < kLengthBytes; ++i) start += static_cast<char>(uint64_t{text.size()} >> (8 * i));
  return start + text;
}

SafetensorsHeader parse_safetensors_header(ByteSpan start, int64_t file_bytes, std::string_view where) {
  const int64_t length = decode_length(start, file_bytes, where);
  const ByteSpan bytes = start.subspan(kLengthBytes);
  if (static_cast<int64_t>(bytes.size()) < length) throw_bad_input("{}: ends inside its header", where);
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()), static_cast<size_t>(length));
  if (!text.starts_with('{')) throw_bad_input("{}: its header does not begin with '{{': not safetensors", where);
  const json root = parse_json_text(text, where, JsonComments::kRefused);

  SafetensorsHeader header;
  header.num_bytes = kLengthBytes + length;
  for (const auto& [name, value] : root.items()) {
    if (name == kMetadataKey) {
      header.metadata = parse_metadata(value, where);
    } else {
      header.tensors.push_back(parse_entry(name, value, header.num_bytes, where));
    }
  }
  check_layout(header, file_bytes, where);
  return header;
}

SafetensorsHeader read_safetensors_header(const FileReader& read, int64_t file_bytes, std::string_view where) {
  std::vector<std::byte> start(static_cast<size_t>(std::min(kLengthBytes, file_bytes)));
  read(0, start);
  start.resize(static_cast<size_t>(kLengthBytes + decode_length(start, file_bytes, where)));
  read(0, start);
  return parse_safetensors_header(start, file_bytes, where);
}

SafetensorsHeader read_safetensors_header(const InputFile& file) {
  refuse_lfs_pointer(file);
  const auto read = [&](int64_t offset, std::span<std::byte> out) { file.read(offset, out); };
  return read_safetensors_header(read, file.num_bytes(), file.path());
}

void decode_floats(DType dtype, ByteSpan bytes, std::span<float> values) {
  PARKA_REQUIRE(bytes.size() == values.size() * static_cast<size_t>(size_of(dtype)));
  switch (dtype) {
    case DType::kF32:
      if (!bytes.empty()) std::memcpy(values.data(), bytes.data(), bytes.size());
      return;
    case DType::kBF16: return decode_each<BFloat16>(bytes, values, decode_bf16);
    case DType::kF16: return decode_each<Float16>(bytes, values, decode_fp16);
    default: throw_internal("{} is not a plain float", name_of(dtype));
  }
}

HostTensor float_tensor(std::string name, std::vector<int64_t> shape, std::span<const float> values) {
  const ByteSpan bytes = std::as_bytes(values);
  return {std::move(name), DType::kF32, std::move(shape), {bytes.begin(), bytes.end()}};
}

void encode_floats(std::span<const float> values, DType dtype, std::span<std::byte> bytes) {
  PARKA_REQUIRE(bytes.size() == values.size() * static_cast<size_t>(size_of(dtype)));
  switch (dtype) {
    case DType::kF32:
      if (!bytes.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
      return;
    case DType::kBF16: return encode_each(values, bytes, encode_bf16);
    case DType::kF16: return encode_each(values, bytes, encode_fp16);
    default: throw_internal("{} is not a plain float", name_of(dtype));
  }
}

bool piece_is_finite(DType dtype, ByteSpan bytes) {
  switch (dtype) {
    case DType::kF32: return all_below<uint32_t>(bytes, 0x7f800000u);
    case DType::kBF16: return all_below<uint16_t>(bytes, 0x7f80u);
    case DType::kF16: return all_below<uint16_t>(bytes, 0x7c00u);
    case DType::kE4M3: return all_below<uint8_t>(bytes, 0x7fu);
    case DType::kE5M2: return all_below<uint8_t>(bytes, 0x7cu);
    case DType::kI32:
    case DType::kU16:
    case DType::kU8:
    case DType::kI8:
    case DType::kI64: return true;
  }
  throw_internal("unknown dtype {}", static_cast<int>(dtype));
}

bool all_finite(std::span<const float> values) { return all_finite(DType::kF32, std::as_bytes(values)); }

bool all_finite(DType dtype, ByteSpan bytes) {
  constexpr int64_t kPieceBytes = 256 << 10;
  std::atomic<bool> finite = true;
  parallel_for(static_cast<int64_t>(bytes.size()), kPieceBytes, [&](int64_t begin, int64_t end) {
    const ByteSpan piece = bytes.subspan(static_cast<size_t>(begin), static_cast<size_t>(end - begin));
    if (finite && !piece_is_finite(dtype, piece)) finite = false;
  });
  return finite;
}

}  // namespace parka
