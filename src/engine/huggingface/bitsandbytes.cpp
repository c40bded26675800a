#include "engine/huggingface/bitsandbytes.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <string_view>

#include <fmt/ranges.h>

#include "core/error.h"
#include "core/number_formats.h"
#include "engine/files/json_text.h"
#include "engine/files/safetensors.h"
#include "kernels/device/device.h"
#include "kernels/ops/quantize/quantize_4bit.h"

namespace parka {
namespace {

using Place = HuggingFaceWeights::Place;

constexpr std::string_view kState = ".quant_state.bitsandbytes__";
constexpr int64_t kMaxStateBytes = 4096;

template <typename T>
std::vector<T> read_elements(const HuggingFaceWeights& weights, const Place& place) {
  std::vector<T> elements(static_cast<size_t>(place.entry.num_bytes) / sizeof(T));
  weights.files[place.file].read(place.entry.offset, std::as_writable_bytes(std::span(elements)));
  return elements;
}

TensorView view_of(const Place& place, const void* elements, DType dtype) {
  return {const_cast<void*>(elements), dtype, {place.entry.num_bytes / size_of(dtype)}};
}

// Takes the tensors of one weight out of the model's.
class Taker {
 public:
  Taker(HuggingFaceWeights& weights, std::string name, const std::string& state_name)
      : weights_(weights), name_(std::move(name)), state_name_(state_name) {}

  BitsAndBytesWeight take() {
    const json state = read_state();
    BitsAndBytesWeight weight;
    weight.format = format_of(state);
    weight.block_size = integer(state, "blocksize");
    const auto block = static_cast<uint64_t>(weight.block_size);
    if (weight.block_size < kSmallestBlock4Bit || weight.block_size > kLargestBlock4Bit ||
        !std::has_single_bit(block)) {
      refuse("blocksize", state.at("blocksize"));
    }
    SafetensorsEntry decoded = find(name_).entry;
    decoded.dtype = dtype_of(state);
    weight.is_fp16 = member(state, "dtype") == "float16";
    decoded.shape = shape_of(state);
    const int64_t count = num_elements_of(decoded.shape), blocks = ceil_div(count, weight.block_size);
    weight.codes = find(name_);
    require_codes(weight.codes, ceil_div(count, 2));
    weight.absmax = take_one(".absmax", {DType::kU8, DType::kF32}, blocks);
    check_map(take_one(".quant_map", {DType::kF32}, 16), weight.format);
    if (weight.absmax.entry.dtype == DType::kU8) {
      if (integer(state, "nested_blocksize") != kNestedBlock)
        refuse("nested_blocksize", state.at("nested_blocksize"));
      weight.nested_absmax = take_one(".nested_absmax", {DType::kF32}, ceil_div(blocks, kNestedBlock));
      weight.nested_map = take_one(".nested_quant_map", {DType::kF32}, static_cast<int64_t>(dynamic_map().size()));
      const json& offset = member(state, "nested_offset");
      if (!offset.is_number() || !std::isfinite(offset.get<double>())) refuse("nested_offset", offset);
      weight.offset = static_cast<float>(offset.get<double>());
    }
    weights_.tensors.erase(state_name_);
    weights_.tensors.at(name_).entry = decoded;
    return weight;
  }

 private:
  const std::string& path() const { return weights_.files[find(state_name_).file].path(); }

  [[noreturn]] void refuse(const char* key, const json& value) const {
    throw_bad_input("{}: {} says \"{}\": {}, which Parka does not have", path(), printable(state_name_), key,
                    printable(value.dump()));
  }

  const Place& find(const std::string& name) const {
    const auto found = weights_.tensors.find(name);
    if (found == weights_.tensors.end()) {
      throw_bad_input("{}: has {}, but the tensor {} is missing",
                      weights_.files[weights_.tensors.at(state_name_).file].path(), printable(state_name_),
                      printable(name));
    }
    return found->second;
  }

  const json& member(const json& state, const char* key) const {
    const auto found = state.find(key);
    if (found == state.end()) throw_bad_input("{}: {} lacks \"{}\"", path(), printable(state_name_), key);
    return *found;
  }

  int64_t integer(const json& state, const char* key) const {
    const json& value = member(state, key);
    if (!value.is_number_unsigned() || value.get<uint64_t>() > static_cast<uint64_t>(kLargestBlock4Bit))
      refuse(key, value);
    return value.get<int64_t>();
  }

  void require(const Place& place, std::initializer_list<DType> dtypes, int64_t count) const {
    const bool fits =
        std::ranges::count(dtypes, place.entry.dtype) > 0 && num_elements_of(place.entry.shape) == count;
    if (fits) return;
    throw_bad_input("{}: {} is {} [{}], {} elements for its weight are wanted", weights_.files[place.file].path(),
                    printable(place.entry.name), name_of(place.entry.dtype), fmt::join(place.entry.shape, ", "),
                    count);
  }

  // Their bytes may be stored as if they were elements of another format (bnb_4bit_quant_storage), for FSDP.
  void require_codes(const Place& place, int64_t num_bytes) const {
    const std::initializer_list<DType> storages = {DType::kU8, DType::kBF16, DType::kF16, DType::kF32};
    if (std::ranges::count(storages, place.entry.dtype) > 0 && place.entry.num_bytes == num_bytes) return;
    throw_bad_input("{}: {} is {} [{}], {} bytes of 4-bit codes are wanted", weights_.files[place.file].path(),
                    printable(place.entry.name), name_of(place.entry.dtype), fmt::join(place.entry.shape, ", "),
                    num_bytes);
  }

  Place take_one(const char* suffix, std::initializer_list<DType> dtypes, int64_t count) {
    const Place place = find(name_ + suffix);
    require(place, dtypes, count);
    weights_.tensors.erase(name_ + suffix);
    return place;
  }

  json read_state() const {
    const Place& place = find(state_name_);
    if (place.entry.dtype != DType::kU8 || place.entry.num_bytes > kMaxStateBytes) {
      throw_bad_input("{}: {} is no short text", path(), printable(state_name_));
    }
    const std::vector<char> text = read_elements<char>(weights_, place);
    json state = parse_json_text(std::string_view(text.data(), text.size()), path() + ": " + printable(state_name_),
                                 JsonComments::kRefused);
    if (!state.is_object()) throw_bad_input("{}: {} is no JSON object", path(), printable(state_name_));
    return state;
  }

  Format4Bit format_of(const json& state) const {
    const json& type = member(state, "quant_type");
    if (type == "nf4") return Format4Bit::kNf4;
    if (type == "fp4") return Format4Bit::kFp4;
    refuse("quant_type", type);
  }

  // fp16 values are kept in fp32.
  DType dtype_of(const json& state) const {
    const json& dtype = member(state, "dtype");
    if (dtype == "bfloat16") return DType::kBF16;
    if (dtype == "float32" || dtype == "float16") return DType::kF32;
    refuse("dtype", dtype);
  }

  std::vector<int64_t> shape_of(const json& state) const {
    const json& shape = member(state, "shape");
    const auto is_dimension = [](const json& d) {
      return d.is_number_unsigned() && d.get<uint64_t>() <= (1u << 30);
    };
    if (!shape.is_array() || shape.size() != 2 || !std::ranges::all_of(shape, is_dimension)) refuse("shape", shape);
    return shape.get<std::vector<int64_t>>();
  }

  void check_map(const Place& place, Format4Bit format) const {
    const std::vector<float> map = read_elements<float>(weights_, place);
    const Values4Bit& values = values_of(format);
    if (std::equal(map.begin(), map.end(), values.begin(), values.end(),
                   [](float a, float b) { return std::abs(a - b) <= 1e-6f; })) {
      return;
    }
    throw_bad_input("{}: {} has other values than bitsandbytes' 4-bit format", path(), printable(place.entry.name));
  }

  HuggingFaceWeights& weights_;
  std::string name_, state_name_;
};

void round_to_fp16(std::vector<float>& values) {
  std::vector<std::byte> stored(values.size() * static_cast<size_t>(size_of(DType::kF16)));
  encode_floats(values, DType::kF16, stored);
  decode_floats(DType::kF16, stored, values);
}

}  // namespace

bool is_bitsandbytes_config(const json& config, const std::string& where) {
  const auto found = config.find("quantization_config");
  if (found == config.end() || found->is_null()) return false;
  const bool is_known = found->is_object() && found->value("quant_method", json()) == "bitsandbytes" &&
                        found->value("load_in_4bit", json()) == true;
  if (is_known) return true;
  throw_bad_input(
      "{}: quantization_config = {} is not supported, but that of bitsandbytes in 4 bits; import the model in bf16, fp16 "
      "or fp32",
      where, printable(found->dump()));
}

std::unordered_map<std::string, BitsAndBytesWeight> take_bitsandbytes_weights(HuggingFaceWeights& weights) {
  std::vector<std::string> states;
  for (const auto& [name, place] : weights.tensors) {
    if (name.find(kState) != std::string::npos) states.push_back(name);
  }
  std::unordered_map<std::string, BitsAndBytesWeight> taken;
  for (const std::string& state : states) {
    const std::string name = state.substr(0, state.find(kState));
    taken.emplace(name, Taker(weights, name, state).take());
  }
  return taken;
}

std::vector<float> decode_bitsandbytes(const HuggingFaceWeights& weights, const BitsAndBytesWeight& weight,
                                       DType decoded, int64_t count) {
  const auto codes = read_elements<uint8_t>(weights, weight.codes);
  const bool is_nested = weight.absmax.entry.dtype == DType::kU8;
  const auto absmax = read_elements<std::byte>(weights, weight.absmax);
  std::vector<float> nested_absmax, map;
  Dequantize4Bit a = {.codes = view_of(weight.codes, codes.data(), DType::kU8),
                      .absmax = view_of(weight.absmax, absmax.data(), weight.absmax.entry.dtype),
                      .out = {},
                      .format = weight.format,
                      .block_size = weight.block_size};
  float offset = weight.offset;
  if (is_nested) {
    nested_absmax = read_elements<float>(weights, weight.nested_absmax);
    map = read_elements<float>(weights, weight.nested_map);
    a.map = view_of(weight.nested_map, map.data(), DType::kF32);
    a.nested_absmax = view_of(weight.nested_absmax, nested_absmax.data(), DType::kF32);
    a.offset = {&offset, DType::kF32, {1}};
  }
  const auto device = make_cpu_device();
  std::vector<float> values(static_cast<size_t>(count));
  if (decoded == DType::kF32) {
    a.out = {values.data(), DType::kF32, {count}};
    dequantize_4bit(*device, a);
    if (weight.is_fp16) round_to_fp16(values);
    return values;
  }
  std::vector<BFloat16> rounded(values.size());
  a.out = {rounded.data(), DType::kBF16, {count}};
  dequantize_4bit(*device, a);
  std::transform(rounded.begin(), rounded.end(), values.begin(), decode_bf16);
  return values;
}

}  // namespace parka
