#include "engine/evaluation/eval_requests.h"

#include <algorithm>
#include <charconv>
#include <utility>

#include <nlohmann/json.hpp>

#include "core/error.h"
#include "engine/config/data_description.h"
#include "engine/files/file_io.h"
#include "engine/files/json_text.h"

namespace parka {
namespace {

using nlohmann::json;

constexpr std::string_view kKind = "parka requests";
constexpr int64_t kVersion = 1, kVersionWithImages = 2;
constexpr size_t kMostChoices = 1000;

// Reads the fields of one line, with `where` ("file, line 3") in every message.
class LineReader {
 public:
  LineReader(json line, std::string where) : line_(std::move(line)), where_(std::move(where)) {
    if (!line_.is_object()) fail("is not a JSON object");
  }

  [[noreturn]] void fail(const std::string& problem) const {
    throw_bad_input("{}: {}; make the file again with scripts/prepare_eval.py", where_, problem);
  }
  const json& member(const json& object, const char* key) const {
    const auto it = object.find(key);
    if (it == object.end()) fail(fmt::format("\"{}\" is missing", key));
    return *it;
  }
  int64_t integer(const json& object, const char* key, int64_t min, int64_t max) const {
    const json& value = member(object, key);
    if (!value.is_number_integer() || value < min || value > max) {
      fail(fmt::format("\"{}\" is not an integer from {} to {}", key, min, max));
    }
    return value.get<int64_t>();
  }
  std::string text(const json& object, const char* key) const {
    const json& value = member(object, key);
    if (!value.is_string() || value.get_ref<const std::string&>().empty()) {
      fail(fmt::format("\"{}\" is not a string", key));
    }
    return value.get<std::string>();
  }
  std::vector<int32_t> tokens(const json& value, const char* key, int64_t vocab_size) const {
    if (!value.is_array() || value.empty()) fail(fmt::format("\"{}\" is not a list of token ids", key));
    std::vector<int32_t> ids;
    for (const json& id : value) {
      if (!id.is_number_integer() || id < 0) {
        fail(fmt::format("\"{}\" has {}, which is not a token id", key, printable(id.dump())));
      }
      if (id >= vocab_size) {
        throw_bad_input(
            "{}: \"{}\" has token id {}, but the model's vocabulary is {}; prepare the task with the model's "
            "tokenizer",
            where_, key, id.dump(), vocab_size);
      }
      ids.push_back(id.get<int32_t>());
    }
    return ids;
  }
  const json& line() const { return line_; }
  const std::string& where() const { return where_; }

 private:
  json line_;
  std::string where_;
};

// A list of token ids that a choice has itself, or else its document.
std::vector<int32_t> own_or_shared(const LineReader& reader, const json& choice, const char* key,
                                   int64_t vocab_size) {
  const json& holder = choice.contains(key) ? choice : reader.line();
  return reader.tokens(reader.member(holder, key), key, vocab_size);
}

uint64_t read_checksum(const LineReader& reader, const json& object) {
  constexpr int kHexadecimal = 16;
  const std::string text = reader.text(object, "checksum");
  uint64_t value = 0;
  const auto end = std::from_chars(text.data(), text.data() + text.size(), value, kHexadecimal);
  if (end.ec != std::errc() || end.ptr != text.data() + text.size()) reader.fail("\"checksum\" is not hexadecimal");
  return value;
}

std::vector<TaskImage> read_images(const LineReader& reader, const EvalTask& task) {
  std::vector<TaskImage> images;
  if (!reader.line().contains("images")) return images;
  const json& listed = reader.line().at("images");
  if (!task.pixels || !listed.is_array()) reader.fail("\"images\" is not a list of images of a task with images");
  for (const json& image : listed) {
    if (!image.is_object()) reader.fail("an image is not a JSON object");
    images.push_back(
        {reader.integer(image, "image", 0, task.pixels->num_images() - 1), read_checksum(reader, image)});
  }
  return images;
}

// Slots where images are, and nowhere else; `rules` of the model. Text without images has none.
void check_slots(const LineReader& reader, const ImageRules& rules, const TaskDocument& document) {
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

TaskDocument read_document(const LineReader& reader, const EvalTask& task, const ImageRules& rules,
                           int64_t vocab_size, int64_t sequence_length) {
  const TaskMetric metric = task.metric;
  TaskDocument document;
  const json& choices = reader.member(reader.line(), "choices");
  if (!choices.is_array() || choices.size() < 2 || choices.size() > kMostChoices) {
    reader.fail(fmt::format("\"choices\" is not a list of 2 to {}", kMostChoices));
  }
  for (const json& choice : choices) {
    if (!choice.is_object()) reader.fail("a choice is not a JSON object");
    TaskChoice one;
    one.context = own_or_shared(reader, choice, "context", vocab_size);
    one.continuation = reader.tokens(reader.member(choice, "continuation"), "continuation", vocab_size);
    one.num_characters = reader.integer(choice, "characters", 1, kMaxDimension);
    one.num_bytes = reader.integer(choice, "bytes", 1, kMaxDimension);
    if (metric == TaskMetric::kPmiDc) one.domain = own_or_shared(reader, choice, "domain", vocab_size);
    const auto length = static_cast<int64_t>(one.continuation.size());
    if (length > sequence_length) {
      throw_bad_input(
          "{}: a continuation of {} tokens does not fit into the model's context of {}; leave the task out",
          reader.where(), length, sequence_length);
    }
    document.choices.push_back(std::move(one));
  }
  document.label = reader.integer(reader.line(), "label", 0, static_cast<int64_t>(choices.size()) - 1);
  document.images = read_images(reader, task);
  check_slots(reader, rules, document);
  return document;
}

TaskMetric read_metric(const LineReader& reader) {
  const std::string name = reader.text(reader.line(), "metric");
  for (const auto& [metric, metric_name] : EnumNames<TaskMetric>::kAll) {
    if (name == metric_name) return metric;
  }
  reader.fail(fmt::format("\"metric\" is {}, not acc, len_norm or pmi_dc", printable(name)));
}

// A task with images fits models that make as many rows of images as large, and mark them with the same id.
void open_images(const LineReader& reader, const ImageRules& rules, EvalTask& task) {
  const json& images = reader.member(reader.line(), "images");
  if (!images.is_object()) reader.fail("\"images\" is not a JSON object");
  constexpr int64_t kMost = kMaxDimension;
  const ImageRules own = {reader.integer(images, "token", 0, kMost), reader.integer(images, "slots", 1, kMost),
                          reader.integer(images, "size", 1, kMost)};
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
    throw_bad_input("{}: has images of {} x {} pixels, not {} a side; make it again with scripts/prepare_eval.py",
                    path, task.pixels->width(), task.pixels->height(), own.size);
  }
}

// Returns how many documents follow, at least.
int64_t read_header(const LineReader& reader, const ImageRules& rules, EvalTask& task) {
  if (reader.line().value("kind", json()) != kKind) {
    throw_bad_input("{}: is not the first line of a request file; make one with scripts/prepare_eval.py",
                    reader.where());
  }
  const json& version = reader.member(reader.line(), "version");
  if (version != kVersion && version != kVersionWithImages) {
    reader.fail(fmt::format("\"version\" is not {} or {}", kVersion, kVersionWithImages));
  }
  task.name = reader.text(reader.line(), "task");
  task.metric = read_metric(reader);
  task.tokenizer = described_tokenizer(reader.line());
  task.tokens = described_text(reader.line(), "tokens_xxh3_128");
  if (version == kVersionWithImages) open_images(reader, rules, task);
  return reader.line().contains("documents") ? reader.integer(reader.line(), "documents", 0, kMaxDimension) : 0;
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
    const LineReader reader(
        parse_json_text(std::string_view(all).substr(begin, end - begin), where, JsonComments::kRefused), where);
    begin = end + 1;
    if (number == 0) {
      least = read_header(reader, images, task);
    } else {
      task.documents.push_back(read_document(reader, task, images, vocab_size, sequence_length));
    }
  }
  if (task.documents.empty()) {
    throw_bad_input("{}: has no documents; make it with scripts/prepare_eval.py", path);
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
