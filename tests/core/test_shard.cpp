#include <vector>

#include "core/placement.h"
#include "tests/support/catch.h"

namespace parka {
namespace {

// How often each element of a tensor is in one of the boxes, run by run; -1 where a place in a box is wrong.
std::vector<int> covered(const std::vector<ElementBox>& boxes, int64_t numel) {
  std::vector<int> times(static_cast<size_t>(numel), 0);
  for (const ElementBox& box : boxes) {
    int64_t place = 0;
    for (int64_t i = 0; i < box.num_runs(); ++i) {
      for (int64_t element = box.run(i).begin; element < box.run(i).end; ++element, ++place) {
        auto& count = times[static_cast<size_t>(element)];
        count = box.place_of(element) == place ? count + 1 : -1;
      }
    }
  }
  return times;
}

}  // namespace

TEST_CASE("the ranks that have the same box divide it among them", "[core][shard]") {
  constexpr int64_t kRows = 37, kCols = 100;
  const int64_t size = GENERATE(1, 2, 3, 7, 64);
  // All of it; some rows; some columns; one row; a flat part; nothing.
  const ElementBox box =
      GENERATE_COPY(ElementBox::flat({0, kRows * kCols}, kRows * kCols), ElementBox{{5, 21}, {0, kCols}, kCols},
                    ElementBox{{0, kRows}, {30, 70}, kCols}, ElementBox{{3, 4}, {30, 70}, kCols},
                    ElementBox::flat({333, 2222}, kRows * kCols), ElementBox{{0, kRows}, {30, 30}, kCols});
  std::vector<ElementBox> parts;
  for (int64_t rank = 0; rank < size; ++rank) {
    parts.push_back(Shard{rank, size}.own(box, kRows * kCols));
    CHECK(parts.back().lies_in(kRows * kCols));
  }
  CHECK(covered(parts, kRows * kCols) == covered({box}, kRows * kCols));
}

TEST_CASE("a box lies in its tensor", "[core][shard]") {
  CHECK(ElementBox::flat({0, 0}, 0).lies_in(0));
  CHECK(ElementBox{{0, 3}, {2, 4}, 4}.lies_in(12));
  CHECK_FALSE(ElementBox{{0, 4}, {2, 4}, 4}.lies_in(12));
  CHECK_FALSE(ElementBox{{0, 3}, {2, 5}, 4}.lies_in(12));
  CHECK_FALSE(ElementBox{{2, 1}, {2, 4}, 4}.lies_in(12));
  CHECK_FALSE(ElementBox{{0, 3}, {2, 4}, 4}.lies_in(13));
  CHECK_FALSE(ElementBox{{-1, 3}, {2, 4}, 4}.lies_in(12));
}

}  // namespace parka
