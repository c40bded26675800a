#pragma once
#include <cstdint>

namespace parka {

// The ids that stand at the beginning and at the end of a document; -1: there is none.
struct DocumentIds {
  int64_t start = -1, end = -1;

  bool any() const { return start >= 0 || end >= 0; }
  bool operator==(const DocumentIds&) const = default;
};

// Tells token by token where documents begin: at a start token, and behind an end token. One id may be both: then
// it begins a document behind an end token, the two side by side, and ends one elsewhere. The first token begins a
// document or continues one; if it has that id it ends a document where the second has it, too, and begins one
// elsewhere.
class DocumentFinder {
 public:
  explicit DocumentFinder(const DocumentIds& ids) : ids_(ids) {}

  // True if the next token begins a document. The first always does.
  bool begins(int64_t id) {
    const bool is_both = ids_.start == ids_.end && id == ids_.start;
    const bool begins = place_ == Place::kFirst || place_ == Place::kBehindEnd || (id == ids_.start && !is_both) ||
                        (place_ == Place::kBehindOpening && is_both);
    if (is_both && place_ == Place::kFirst) {
      place_ = Place::kBehindOpening;
    } else if (id == ids_.end && !(is_both && begins)) {
      place_ = Place::kBehindEnd;
    } else {
      place_ = Place::kInside;
    }
    return begins;
  }

 private:
  enum class Place : uint8_t { kFirst, kInside, kBehindEnd, kBehindOpening };

  DocumentIds ids_;
  Place place_ = Place::kFirst;
};

}  // namespace parka
