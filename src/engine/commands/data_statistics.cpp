#include "engine/commands/data_statistics.h"

#include <algorithm>
#include <span>
#include <vector>

#include "core/log/work_progress.h"
#include "engine/config/data_sources.h"
#include "engine/files/file_io.h"

namespace parka {
namespace {

std::optional<ImageFiles> images_beside(const TokenFile& file) {
  if (!file_exists(ImageReferences::path_of(file.path()))) return std::nullopt;
  std::optional<ImageFiles> images(ImageReferences::rules_of(file.path()));
  images->add(file.path(), file.num_tokens());
  return images;
}

// Returns their number.
int64_t read_images(const ImageFiles& images, const TokenFile& file) {
  const ImageRules rules = ImageReferences::rules_of(file.path());
  const std::vector<ImagePlace> places = images.in_sequence(0, 0, file.num_tokens());
  std::vector<uint8_t> pixels;
  for (const ImagePlace& place : places) {
    pixels.resize(static_cast<size_t>(3 * rules.size * rules.size));  // which a file of pixels has confirmed
    images.read(place, pixels.data());
  }
  return static_cast<int64_t>(places.size());
}

// Counts the documents of a mask, but for the padding after packed conversations: one id again and again, without a
// target. Where no token is a target, the mask only says where documents begin.
class DocumentCounter {
 public:
  void add(std::span<const int32_t> ids, std::span<const uint8_t> marks) {
    for (size_t i = 0; i < ids.size(); ++i) {
      if ((marks[i] & kMarkDocumentStart) != 0) begin(ids[i]);
      const bool is_target = (marks[i] & kMarkTarget) != 0;
      targets_ += is_target;
      may_be_padding_ = may_be_padding_ && ids[i] == first_id_ && !is_target;
    }
  }
  int64_t documents() const { return targets_ == 0 ? starts_ : starts_ - paddings_ - (may_be_padding_ ? 1 : 0); }
  int64_t targets() const { return targets_; }

 private:
  void begin(int32_t id) {
    ++starts_;
    paddings_ += may_be_padding_;
    may_be_padding_ = true;
    first_id_ = id;
  }

  int64_t starts_ = 0, paddings_ = 0, targets_ = 0;
  bool may_be_padding_ = false;  // the document that has begun
  int32_t first_id_ = 0;         // of that document
};

}  // namespace

DataStatistics data_statistics(TokenFile file, DataDescriptions& descriptions, const DocumentIds& document_ids,
                               int64_t vocab_size, int64_t image_token) {
  constexpr int64_t kPiece = int64_t{1} << 20;
  if (file_exists(file.path() + ".mask")) file.open_mask();
  DataStatistics result;
  result.path = file.path();
  result.format = file.format();
  result.type = file.type();
  result.num_tokens = file.num_tokens();
  const std::optional<ImageFiles> images = images_beside(file);
  const bool is_end_alone = document_ids.start < 0;
  int64_t of_ids = 0;
  DocumentFinder finder(document_ids);
  DocumentCounter of_mask;
  std::vector<int32_t> ids;
  std::vector<uint8_t> marks;
  WorkProgress progress("reading " + file.path(), file.num_tokens());
  for (int64_t begin = 0; begin < file.num_tokens(); begin += kPiece, progress.add(kPiece)) {
    const int64_t count = std::min(kPiece, file.num_tokens() - begin);
    ids.resize(static_cast<size_t>(count));
    file.read(begin, count, vocab_size, ids.data());
    const auto [least, greatest] = std::ranges::minmax_element(ids);
    result.min_id = begin == 0 ? *least : std::min(result.min_id, *least);
    result.max_id = std::max(result.max_id, *greatest);
    if (images) {
      images->check_slots(0, file.path(), begin, images->in_sequence(0, begin, count), ids.data(), count);
    } else if (const auto slot = std::ranges::find(ids, image_token); slot != ids.end()) {
      throw_bad_input("{}: token {} has the id of image slots, {}, and the file has no images", file.path(),
                      begin + (slot - ids.begin()), image_token);
    }
    if (document_ids.any()) {
      of_ids += is_end_alone ? std::ranges::count(ids, document_ids.end)
                             : std::ranges::count_if(ids, [&](int32_t id) { return finder.begins(id); });
    }
    if (!file.has_mask()) continue;
    marks.resize(ids.size());
    file.read_marks(begin, count, marks.data());
    of_mask.add(ids, marks);
  }
  if (document_ids.any()) {
    result.num_documents = of_ids;
  } else if (file.has_document_index()) {
    result.num_documents = static_cast<int64_t>(file.read_document_starts().size());
  } else if (file.has_mask()) {
    result.num_documents = of_mask.documents();
  }
  if (file.has_mask()) result.num_targets = of_mask.targets();
  if (images) result.num_images = read_images(*images, file);
  for (const ReadOnlyFile* each : file.files()) {
    const std::string checksum = checksum_of(*each);
    descriptions.check_content(*each, [&] { return checksum; });
    if (result.checksum.empty()) result.checksum = checksum;
  }
  return result;
}

}  // namespace parka
