#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/dtype.h"
#include "core/element_box.h"
#include "engine/files/file_io.h"

// The safetensors format (github.com/huggingface/safetensors, "Format"): the length of the header as 8
// little-endian bytes; the header, a JSON object {"name": {"dtype", "shape", "data_offsets": [begin, end]}, ...};
// the tensors' bytes, row-major and little-endian. Dtypes F32, F16, BF16, F8_E4M3, F8_E5M2, I32, U16, U8, I64.
namespace parka {

using ByteSink = std::function<void(ByteSpan)>;

// Bytes of a tensor that are elsewhere, or still being copied to the host.
class TensorSource {
 public:
  virtual ~TensorSource() = default;
  virtual int64_t num_bytes() const = 0;
  // Passes all bytes to `sink`, in order and in parts. Throws if they are corrupted.
  virtual void read(const ByteSink& sink) const = 0;
};

// A tensor, or the piece of one that a rank of a run holds, for a file.
struct HostTensor {
  std::string name;
  DType dtype = DType::kF32;
  std::vector<int64_t> shape;                       // of the whole tensor
  std::vector<std::byte> bytes;                     // row-major; as many as dtype and shape, or the piece, say
  std::optional<ElementBox> piece = {};             // what `bytes` holds; everything where there is none
  std::shared_ptr<const TensorSource> source = {};  // where the bytes come from instead

  int64_t num_bytes() const { return source ? source->num_bytes() : static_cast<int64_t>(bytes.size()); }
  void read(const ByteSink& sink) const { source ? source->read(sink) : sink(bytes); }
};

// A tensor in a safetensors file.
struct SafetensorsEntry {
  std::string name;
  DType dtype = DType::kF32;
  std::vector<int64_t> shape;
  int64_t offset = 0;     // of its first byte, from the start of the file
  int64_t num_bytes = 0;  // size_of(dtype) times the product of shape
};

struct SafetensorsHeader {
  std::vector<SafetensorsEntry> tensors;        // in the order of their bytes in the file
  std::map<std::string, std::string> metadata;  // "__metadata__": free text by the writer
  int64_t num_bytes = 0;                        // of length and header; the tensors' bytes come next
};

// Free text of the writer; transformers requires {"format": "pt"}.
using SafetensorsMetadata = std::map<std::string, std::string>;

// Passes a whole file to `sink` in parts: the header, then each tensor's bytes. Tensors with larger elements come
// first, otherwise in the given order, so that every tensor in the file is aligned to its element size. A piece of
// a tensor becomes a tensor of one dimension, and `metadata` must say which part of which tensor it is; a piece
// that is the whole tensor keeps its shape. Throws Error(kInternal), before it passes anything, if names repeat or
// a tensor's bytes do not fit its dtype, shape and piece.
void write_safetensors(const std::vector<const HostTensor*>& tensors, const SafetensorsMetadata& metadata,
                       const ByteSink& sink);

// The same into a file, which is then durable and closed.
void write_safetensors(const std::vector<HostTensor>& tensors, const SafetensorsMetadata& metadata,
                       OutputFile& file);

// The beginning of a file, length and header, for these tensors (only name, dtype and shape count), back to back in
// this order. It is padded, so that the tensors' bytes begin at a multiple of 8.
std::string encode_safetensors_header(const std::vector<SafetensorsEntry>& tensors,
                                      const SafetensorsMetadata& metadata);

// Reads a header. `start` is the file's beginning, at least to the end of the header; `file_bytes` is the size of
// the whole file. For any bytes, either every tensor of the result lies inside the file, none overlap and no byte
// is left over; or it throws Error(kBadInput), whose message begins with `where`.
SafetensorsHeader parse_safetensors_header(ByteSpan start, int64_t file_bytes, std::string_view where);
SafetensorsHeader read_safetensors_header(const InputFile& file);
// The same through `read`, which fills its second argument from an offset in the file on.
using FileReader = std::function<void(int64_t offset, std::span<std::byte> out)>;
SafetensorsHeader read_safetensors_header(const FileReader& read, int64_t file_bytes, std::string_view where);

// A dtype as the format spells it, "BF16"; nullopt for one that Parka does not read.
std::string_view format_name(DType dtype);
std::optional<DType> parse_format_name(std::string_view name);

// Bytes of a dense tensor, or -1 when a dimension is negative or the product overflows.
int64_t num_bytes_of(DType dtype, const std::vector<int64_t>& shape);
// Elements of a dense tensor whose bytes can be counted.
int64_t num_elements_of(const std::vector<int64_t>& shape);
// True if `bytes` are not all of the tensor.
bool is_partial(const HostTensor& tensor);

// Converts weights in files to and from fp32 values, for all formats without scales.

inline bool is_plain_float(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kBF16 || dtype == DType::kF16;
}

// Exact. `bytes` holds values.size() elements of a plain float dtype, at any alignment.
void decode_floats(DType dtype, ByteSpan bytes, std::span<float> values);
// A tensor of fp32 values.
HostTensor float_tensor(std::string name, std::vector<int64_t> shape, std::span<const float> values);
// Rounds to nearest, ties to even.
void encode_floats(std::span<const float> values, DType dtype, std::span<std::byte> bytes);

bool all_finite(std::span<const float> values);
// The same for elements of any dtype, at any alignment; always true for integers. Uses all threads of
// parallel_for.
bool all_finite(DType dtype, ByteSpan bytes);
// The same on this thread alone.
bool piece_is_finite(DType dtype, ByteSpan bytes);

}  // namespace parka
