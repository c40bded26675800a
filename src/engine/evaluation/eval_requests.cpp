#include "engine/evaluation/eval_requests.h"

#include <algorithm>
#include <charconv>
#include <utility>

#include "core/error.h"
#include "engine/config/data_description.h"
#include "engine/files/file_io.h"
#include "engine/files/json_text.h"

namespace parka {
namespace {

constexpr std::string_view kKind = "parka requests";
constexpr int64_t kVersion = 1, kVersionWithImages = 2;
constexpr size_t kMostChoices = 1000;

constexpr const char* kRemedy = "make the file again with parka prepare-eval";

std::vector<int32_t> tokens_in(const JsonReader& reader, const char* key, int64_t vocab_size) {
  const json& list = reader.member(key);
  if (!list.is_array() || list.empty()) reader.fail(fmt::format("\"{}\" is not a list of token ids", key));
  std::vector<int32_t> ids;
  for (const json& id : list) {
    const std::optional<int64_t> count = parse_count(id);
    if (!count) reader.fail(fmt::format("\"{}\" has {}, which is not a token id", key, printable(id.dump())));
    if (*count >= vocab_size) {
      throw_bad_input(
          "{}: \"{}\" has token id {}, but the model's vocabulary is {}; prepare the task with the model's tokenizer",
          reader.where(), key, *count, vocab_size);
    }
    ids.push_back(static_cast<int32_t>(*count));
  }
  return ids;
}

// A list of token ids that a choice has itself, or else its document.
std::vector<int32_t> own_or_shared(const JsonReader& line, const JsonReader& choice, const char* key,
                                   int64_t vocab_size) {
  return tokens_in(choice.has(key) ? choice : line, key, vocab_size);
}

uint64_t read_checksum(const JsonReader& reader) {
  constexpr int kHexadecimal = 16;
  const std::string text = reader.text("checksum");
  uint64_t value = 0;
  const auto end = std::from_chars(text.data(), text.data() + text.size(), value, kHexadecimal);
  if (end.ec != std::errc() || end.ptr != text.data() + text.size()) reader.fail("\"checksum\" is not hexadecimal");
  return value;
}

std::vector<TaskImage> read_images(const JsonReader& line, const EvalTask& task) {
  std::vector<TaskImage> images;
  if (!line.has("images")) return images;
  const json& listed = line.member("images");
  if (!task.pixels || !listed.is_array()) line.fail("\"images\" is not a list of images of a task with images");
  for (const json& image : listed) {
    const JsonReader reader(image, line.where() + ", an image", kRemedy);
    images.push_back({reader.integer("image", 0, task.pixels->num_images() - 1), read_checksum(reader)});
  }
  return images;
}

// Slots where images are, and nowhere else; `rules` of the model. Text without images has none.
void check_slots(const JsonReader& reader, const ImageRules& rules, const TaskDocument& document) {
  if (!rules.any()) return;
  const auto slots_in = [&](const std::vector<int32_t>& ids) { return std::ranges::count(ids, rules.token); };
  const auto wanted = static_cast<int64_t>(document.images.size()) * rules.slots;
  for (const TaskChoice& choice : document.choices) {
    if (slots_in(choice.context) != wanted || slots_in(choice.continuation) != 0 || slots_in(choice.domain) != 0) {
      reader.fail(fmt::format("a choice does not have {} slots of {} images, in its context alone", wanted,
                              document.images.size()));
    }
  }
}

TaskDocument read_document(const JsonReader& reader, const EvalTask& task, const ImageRules& rules,
                           int64_t vocab_size, int64_t sequence_length) {
  const TaskMetric metric = task.metric;
  TaskDocument document;
  const json& choices = reader.member("choices");
  if (!choices.is_array() || choices.size() < 2 || choices.size() > kMostChoices) {
    reader.fail(fmt::format("\"choices\" is not a list of 2 to {}", kMostChoices));
  }
  for (const json& choice : choices) {
    const JsonReader own(choice, reader.where() + ", a choice", kRemedy);
    TaskChoice one;
    one.context = own_or_shared(reader, own, "context", vocab_size);
    one.continuation = tokens_in(own, "continuation", vocab_size);
    one.num_characters = own.integer("characters", 1, kMaxDimension);
    one.num_bytes = own.integer("bytes", 1, kMaxDimension);
    if (metric == TaskMetric::kPmiDc) one.domain = own_or_shared(reader, own, "domain", vocab_size);
    const auto length = static_cast<int64_t>(one.continuation.size());
    if (length > sequence_length) {
      throw_bad_input(
          "{}: a continuation of {} tokens does not fit into the model's context of {}; leave the task out",
          reader.where(), length, sequence_length);
    }
    document.choices.push_back(std::move(one));
  }
  document.label = reader.integer("label", 0, static_cast<int64_t>(choices.size()) - 1);
  document.images = read_images(reader, task);
  check_slots(reader, rules, document);
  return document;
}

TaskMetric read_metric(const JsonReader& reader) {
  const std::string name = reader.text("metric");
  for (const auto& [metric, metric_name] : EnumNames<TaskMetric>::kAll) {
    if (name == metric_name) return metric;
  }
  reader.fail(fmt::format("\"metric\" is {}, not acc, len_norm or pmi_dc", printable(name)));
}

// A task with images fits models that make as many rows of images as large, and mark them with the same id.
void open_images(const JsonReader& line, const ImageRules& rules, EvalTask& task) {
  const JsonReader images(line.member("images"), line.where() + ": \"images\"", kRemedy);
  constexpr int64_t kMost = kMaxDimension;
  const ImageRules own = {images.integer("token", 0, kMost), images.integer("slots", 1, kMost),
                          images.integer("size", 1, kMost)};
  if (!rules.any()) {
    throw_bad_input("{}: the task has images, and the model's model.vision.tower is none; leave it out", task.path);
  }
  if (own != rules) {
    throw_bad_input(
        "{}: images have {} slots of id {} and {} pixels a side, the model's {} of id {} and {}; make the file again for "
        "this model",
        task.path, own.slots, own.token, own.size, rules.slots, rules.token, rules.size);
  }
  task.images = own;
  const std::string path = task.path + ".pixels";
  task.pixels = std::make_shared<PixelFile>(path);
  if (task.pixels->height() != own.size || task.pixels->width() != own.size) {
    throw_bad_input("{}: has images of {} x {} pixels, not {} a side; make it again with parka prepare-eval", path,
                    task.pixels->width(), task.pixels->height(), own.size);
  }
}

// Returns how many documents follow, at least.
int64_t read_header(const json& line, const JsonReader& reader, const ImageRules& rules, EvalTask& task) {
  if (line.value("kind", json()) != kKind) {
    throw_bad_input("{}: is not the first line of a request file; make one with parka prepare-eval",
                    reader.where());
  }
  const json& version = reader.member("version");
  if (version != kVersion && version != kVersionWithImages) {
    reader.fail(fmt::format("\"version\" is not {} or {}", kVersion, kVersionWithImages));
  }
  task.name = reader.text("task");
  task.metric = read_metric(reader);
  task.tokenizer = described_tokenizer(line);
  task.tokens = described_text(line, "tokens_xxh3_128");
  if (version == kVersionWithImages) open_images(reader, rules, task);
  return reader.has("documents") ? reader.integer("documents", 0, kMaxDimension) : 0;
}

}  // namespace

EvalTask read_requests(const std::string& path, int64_t vocab_size, int64_t sequence_length,
                       const ImageRules& images) {
  constexpr int64_t kLargestFile = int64_t{4} << 30;
  const std::string all = read_text(path, kLargestFile);
  EvalTask task{.path = path, .name = {}, .metric = TaskMetric::kAcc, .documents = {}};
  int64_t number = 0, least = 0;
  for (size_t begin = 0; begin < all.size(); ++number) {
    const size_t end = std::min(all.find('\n', begin), all.size());
    const std::string where = fmt::format("{}, line {}", path, number + 1);
    const json line =
        parse_json_text(std::string_view(all).substr(begin, end - begin), where, JsonComments::kRefused);
    const JsonReader reader(line, where, kRemedy);
    begin = end + 1;
    if (number == 0) {
      least = read_header(line, reader, images, task);
    } else {
      task.documents.push_back(read_document(reader, task, images, vocab_size, sequence_length));
    }
  }
  if (task.documents.empty()) {
    throw_bad_input("{}: has no documents; make it with parka prepare-eval", path);
  }
  if (const size_t found = task.documents.size(); found < static_cast<size_t>(least)) {
    throw_bad_input(
        "{}: is cut: it has {} documents, and \"documents\" in its first line says {}; copy it again, or correct that "
        "number if fewer are meant",
        path, found, least);
  }
  return task;
}

}  // namespace parka
