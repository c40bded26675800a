#include "engine/huggingface/value_check.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <span>

#include <fmt/format.h>

#include "core/error.h"
#include "engine/files/json_text.h"

namespace parka {
namespace {

constexpr int64_t kPage = 4096;  // of a file that has holes
constexpr const char* kRemedy = "as in a file that was not downloaded whole: download it again, or save it again";

bool is_not_zero(std::byte b) { return b != std::byte{0}; }

// The part that `name` has more than `wanted`, in one piece: "_orig_mod."; empty: it is another tensor.
std::string added_to(const std::string& wanted, const std::string& name) {
  if (name.size() <= wanted.size()) return {};
  const auto common = std::ranges::mismatch(wanted, name).in1 - wanted.begin();
  const size_t dot = common == 0 ? std::string::npos : wanted.rfind('.', static_cast<size_t>(common) - 1);
  const size_t begin = dot == std::string::npos ? 0 : dot + 1;
  std::string added = name.substr(begin, name.size() - wanted.size());
  const bool fits = name.substr(begin + added.size()) == wanted.substr(begin);
  // "layers.0." would be another tensor.
  const bool is_wrapper = added.ends_with('.') && added.find_first_of("0123456789\"\\") == std::string::npos;
  return fits && is_wrapper ? added : std::string();
}

}  // namespace

ValueCheck::ValueCheck(const InputFile& file, const SafetensorsEntry& entry, bool may_be_zero)
    : file_(file), entry_(entry), may_be_zero_(may_be_zero) {}

void ValueCheck::add(DType dtype, ByteSpan piece) {
  if (!all_finite(dtype, piece)) {
    throw_bad_input("{}: {} holds NaN or infinite values; download it again, or save a model that is finite",
                    file_.path(), printable(entry_.name));
  }
  const int64_t size = size_of(dtype), rows = entry_.shape.size() < 2 ? 1 : std::max<int64_t>(1, entry_.shape[0]);
  row_bytes_ = num_elements_of(entry_.shape) * size / rows;
  // Zeros of a page fill one of these steps, so what lies within one need not be looked at.
  constexpr size_t kStep = kPage / 2;
  for (size_t begin = 0; begin < piece.size(); begin += kStep) {
    const ByteSpan step = piece.subspan(begin, std::min(kStep, piece.size() - begin));
    const auto first = std::ranges::find_if(step, is_not_zero);
    if (first != step.end()) {
      end_zeros(at_ + (first - step.begin()) / size * size);
      const auto last = std::find_if(step.rbegin(), step.rend(), is_not_zero).base() - step.begin();
      zeros_ = at_ + (last + size - 1) / size * size;
    }
    // fp16 is slow to decode, and none of its values is too large.
    if (dtype != DType::kF16 || at_ % (8 * kStep) == 0) add_magnitudes(dtype, step);
    at_ += static_cast<int64_t>(step.size());
  }
}

void ValueCheck::add_magnitudes(DType dtype, ByteSpan step) {
  constexpr float kLarge = 1 << 20, kSmallAsBf16 = 0x1p-4f, kLargeAsBf16 = 4;
  std::array<float, kPage> values;
  const std::span<float> decoded = std::span(values).first(step.size() / static_cast<size_t>(size_of(dtype)));
  decode_floats(dtype, step, decoded);
  float largest = 0;
  for (const float value : decoded) {
    const float magnitude = std::abs(value);
    largest = std::max(largest, magnitude);
    sum_ += magnitude;
    num_values_ += magnitude > 0;
    num_as_bf16_ += magnitude >= kSmallAsBf16 && magnitude < kLargeAsBf16;
  }
  if (largest >= kLarge) refuse_values(fmt::format("values up to {:.1e}", largest));
  is_fp16_ = dtype == DType::kF16;
}

// Numbers of bf16 that are read as fp16 lie all around 1, and those of fp16 that are read as bf16 around 0.
void ValueCheck::check_magnitudes() const {
  constexpr int64_t kLeast = 256;
  constexpr double kSmall = 1e-6;
  if (entry_.shape.size() < 2 || num_values_ < kLeast) return;
  const double mean = sum_ / static_cast<double>(num_values_);
  if ((is_fp16_ && 1000 * num_as_bf16_ >= 999 * num_values_) || (mean < kSmall && !may_be_zero_)) {
    refuse_values(fmt::format("values of about {:.1e}, and none far from that", mean));
  }
}

void ValueCheck::refuse_values(const std::string& which) const {
  throw_bad_input(
      "{}: {} has {}, which are no weights: its dtype in the header, {}, is wrong, or it is damaged; download it again, "
      "or save it again",
      file_.path(), printable(entry_.name), which, name_of(entry_.dtype));
}

bool ValueCheck::finish() {
  check_magnitudes();
  if (zeros_ > 0 || at_ == 0) {
    end_zeros(at_);
  } else if (!may_be_zero_) {
    throw_bad_input("{}: {} is all zeros, {}", file_.path(), printable(entry_.name), kRemedy);
  }
  return has_zero_rows_ || (zeros_ == 0 && at_ > 0);
}

void ValueCheck::end_zeros(int64_t end) {
  if (end - zeros_ < kPage) return;
  const auto is_within_row = [&](int64_t at) { return at % row_bytes_ != 0; };
  const auto is_page = [&](int64_t at) { return (entry_.offset + at) % kPage == 0; };
  const bool begins = is_within_row(zeros_), ends = is_within_row(end);
  const bool ends_file = end == entry_.num_bytes && entry_.offset + end == file_.num_bytes();
  const bool is_in_one_row = zeros_ / row_bytes_ == (end - 1) / row_bytes_;
  const bool is_hole =
      is_in_one_row ? (begins && (is_page(zeros_) || ends_file)) || (ends && is_page(end)) : begins || ends;
  if (is_hole) refuse_hole(end - zeros_);
  has_zero_rows_ = has_zero_rows_ || !(begins || ends);
}

void ValueCheck::refuse_hole(int64_t num_bytes) const {
  throw_bad_input("{}: {} has a hole of {} bytes of zeros, {}", file_.path(), printable(entry_.name), num_bytes,
                  kRemedy);
}

bool may_begin_as_zeros(const std::string& name) {
  constexpr std::string_view kEnds[] = {"bias", "o_proj.weight", "out_proj.weight", "down_proj.weight",
                                        "fc2.weight"};
  return std::ranges::any_of(kEnds, [&](std::string_view end) { return name.ends_with(end); });
}

void refuse_missing(const std::string& where, const std::string& wanted, const std::vector<std::string>& names) {
  for (const std::string& name : names) {
    const std::string added = added_to(wanted, name);
    if (added.empty()) continue;
    throw_bad_input(
        "{}: has the tensor {} in the place of {}: \"{}\" is a wrapper's prefix, as torch.compile (_orig_mod.) and DDP "
        "(module.) add it; save the model within the wrapper, or rename all tensors in Python by "
        "name.replace(\"{}\", \"\", 1)",
        where, printable(name), wanted, printable(added), printable(added));
  }
  throw_bad_input("{}: the tensor {} is missing", where, wanted);
}

}  // namespace parka
