#include "engine/text/image_prompt.h"

#include <algorithm>
#include <array>

#include <fmt/ranges.h>

#include "core/error.h"
#include "engine/text/python_helper.h"
#include "model/vision/image_embedding.h"

namespace parka {
namespace {

constexpr std::string_view kPlaceholder = "<image>";

// The texts between images.
std::vector<std::string> pieces_of(const std::string& text) {
  std::vector<std::string> pieces;
  size_t begin = 0;
  for (size_t at = 0; (at = text.find(kPlaceholder, begin)) != std::string::npos;
       begin = at + kPlaceholder.size()) {
    pieces.push_back(text.substr(begin, at - begin));
  }
  pieces.push_back(text.substr(begin));
  return pieces;
}

// RFC 4648, without checks: of a helper's answer.
std::vector<uint8_t> decode_base64(const std::string& text) {
  constexpr std::string_view kDigits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::array<uint8_t, 256> value{};
  for (size_t i = 0; i < kDigits.size(); ++i) value[static_cast<uint8_t>(kDigits[i])] = static_cast<uint8_t>(i);
  std::vector<uint8_t> bytes;
  bytes.reserve(text.size() / 4 * 3);
  uint32_t bits = 0;
  int num_bits = 0;
  for (const char c : text) {
    if (c == '=') break;
    bits = bits << 6 | value[static_cast<uint8_t>(c)];
    num_bits += 6;
    if (num_bits < 8) continue;
    num_bits -= 8;
    bytes.push_back(static_cast<uint8_t>(bits >> num_bits));
  }
  return bytes;
}

std::vector<std::string> helper_arguments(const std::string& geometry, const std::string& processor,
                                          const TowerConfig& tower) {
  std::vector<std::string> arguments = {"--tower", tower.kind == TowerKind::kClip ? "clip" : "siglip",
                                        "--size",  fmt::format("{}", tower.image_size),
                                        "--mean",  fmt::format("{}", fmt::join(tower.pixel_mean, ","))};
  if (!geometry.empty()) arguments.insert(arguments.end(), {"--geometry", geometry});
  if (!processor.empty()) arguments.insert(arguments.end(), {"--processor", processor});
  return arguments;
}

std::vector<uint8_t> read_pixels(const std::vector<std::string>& paths, const std::vector<std::string>& arguments,
                                 int64_t bytes_of_image) {
  PythonHelper helper("image_helper.py", arguments);
  helper.receive();  // its geometry
  std::vector<uint8_t> pixels;
  for (const std::string& path : paths) {
    const std::vector<uint8_t> one = decode_base64(helper.ask({{"image", path}}).at("pixels").get<std::string>());
    if (static_cast<int64_t>(one.size()) != bytes_of_image) {
      throw_io("image_helper.py: {} bytes of pixels, not {}", one.size(), bytes_of_image);
    }
    pixels.insert(pixels.end(), one.begin(), one.end());
  }
  return pixels;
}

}  // namespace

ImagePrompt make_image_prompt(const std::string& text, const std::vector<std::string>& paths,
                              const std::string& geometry, const std::string& processor, const VisionConfig& vision,
                              TextCodec& codec) {
  std::vector<std::string> pieces = pieces_of(text);
  if (pieces.size() == 1) {
    std::string in_front;
    for (size_t i = 0; i < paths.size(); ++i) in_front += fmt::format("{}\n", kPlaceholder);
    pieces = pieces_of(in_front + text);
  }
  if (pieces.size() - 1 != paths.size()) {
    throw_bad_input("--prompt has {} {}, and there are {} --image; make them as many, or leave {} out",
                    pieces.size() - 1, kPlaceholder, paths.size(), kPlaceholder);
  }
  const std::vector<std::vector<int32_t>> ids = codec.encode_pieces(pieces);
  ImagePrompt prompt;
  prompt.images.num_slots = ImageEmbedding::num_slots(vision);
  for (size_t i = 0; i < ids.size(); ++i) {
    if (std::ranges::count(ids[i], vision.image_token) > 0) {
      throw_bad_input("--prompt: its text has the token {}, which marks images; write it otherwise",
                      vision.image_token);
    }
    if (i > 0) {
      prompt.images.first_slots.push_back(static_cast<int64_t>(prompt.tokens.size()));
      prompt.tokens.insert(prompt.tokens.end(), static_cast<size_t>(prompt.images.num_slots),
                           static_cast<int32_t>(vision.image_token));
    }
    prompt.tokens.insert(prompt.tokens.end(), ids[i].begin(), ids[i].end());
  }
  const int64_t size = vision.tower.image_size;
  prompt.images.pixels = read_pixels(paths, helper_arguments(geometry, processor, vision.tower), 3 * size * size);
  return prompt;
}

}  // namespace parka
