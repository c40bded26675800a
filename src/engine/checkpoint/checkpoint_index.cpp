#include "engine/checkpoint/checkpoint_index.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "core/error.h"
#include "engine/files/json_text.h"

namespace parka {
namespace {

const std::string kPiecesKey = "parka_pieces";

// The pieces of one file, by its metadata.
class PieceTable {
 public:
  explicit PieceTable(const CheckpointFile& file) : where_(file.path) {
    const auto text = file.header.metadata.find(kPiecesKey);
    if (text == file.header.metadata.end()) return;
    table_ = parse_json_text(text->second, fmt::format("{}: {}", where_, kPiecesKey), JsonComments::kRefused);
    if (!table_.is_object()) throw_bad_input("{}: {} must be an object", where_, kPiecesKey);
  }

  // Gives `stored` the shape of its whole tensor; returns the part of it that the file has.
  ElementBox complete(SafetensorsEntry& stored) {
    const int64_t num_stored = num_elements_of(stored.shape);
    const auto piece = table_.find(stored.name);
    if (piece == table_.end()) return ElementBox::flat({0, num_stored}, num_stored);
    ++num_found_;
    const std::string where = fmt::format("{}: tensor \"{}\"", where_, printable(stored.name));
    if (!piece->is_object() || !piece->contains("shape") || !(*piece)["shape"].is_array() ||
        piece->contains("begin") == (piece->contains("rows") && piece->contains("columns"))) {
      throw_bad_input("{}: its piece must be an object of shape and begin, or of shape, rows and columns", where);
    }
    if (stored.shape.size() != 1) throw_bad_input("{}: a piece must have one dimension", where);
    std::vector<int64_t> shape;
    for (const json& dim : (*piece)["shape"]) shape.push_back(integer(dim, where));
    const int64_t num_bytes = num_bytes_of(stored.dtype, shape);
    const int64_t numel = num_bytes / size_of(stored.dtype);
    if (num_bytes < 0) throw_bad_input("{}: its piece of {} elements does not lie in its shape", where, num_stored);
    ElementBox box;
    if (piece->contains("begin")) {
      const int64_t begin = integer((*piece)["begin"], where);
      if (begin > numel || num_stored > numel - begin) {
        throw_bad_input("{}: its piece of {} elements from {} on does not lie in its shape", where, num_stored,
                        begin);
      }
      box = ElementBox::flat({begin, begin + num_stored}, numel);
    } else {
      box = {range((*piece)["rows"], where), range((*piece)["columns"], where), shape.empty() ? 1 : shape.back()};
      if (!box.lies_in(numel) || box.numel() != num_stored) {
        throw_bad_input(
            "{}: its piece, rows {} to {} and columns {} to {}, does not lie in its shape or is not of {} "
            "elements",
            where, box.rows.begin, box.rows.end, box.columns.begin, box.columns.end, num_stored);
      }
    }
    stored.shape = std::move(shape);
    stored.num_bytes = num_bytes;
    return box;
  }

  void check_all_found() const {
    if (num_found_ != table_.size())
      throw_bad_input("{}: {} names tensors that it does not hold", where_, kPiecesKey);
  }

 private:
  static ElementRange range(const json& value, const std::string& where) {
    if (!value.is_array() || value.size() != 2) {
      throw_bad_input("{}: rows and columns of its piece must be [begin, end]", where);
    }
    return {integer(value[0], where), integer(value[1], where)};
  }

  static int64_t integer(const json& value, const std::string& where) {
    if (const std::optional<int64_t> count = parse_count(value)) return *count;
    throw_bad_input("{}: shape and place of its piece must hold integers from 0 to 2^63 - 1", where);
  }

  const std::string& where_;
  json table_ = json::object();
  size_t num_found_ = 0;
};

// Sorts the pieces of a tensor and checks that they make it up.
void check_pieces(const std::vector<CheckpointFile>& files, const SafetensorsEntry& tensor,
                  std::vector<CheckpointIndex::Piece>& pieces) {
  std::ranges::sort(pieces, [](const auto& a, const auto& b) {
    return std::tie(a.range.begin, a.range.end, a.file) < std::tie(b.range.begin, b.range.end, b.file);
  });
  const std::string name = printable(tensor.name);
  int64_t end = 0;
  size_t last_file = 0;
  for (const CheckpointIndex::Piece& piece : pieces) {
    if (piece.range.begin > end) {
      throw_bad_input("{}: elements {} to {} of tensor \"{}\", before those here, are in no file",
                      files[piece.file].path, end, piece.range.begin - 1, name);
    }
    if (piece.range.begin < end) {
      throw_bad_input("{}: elements {} to {} of tensor \"{}\" are in {} too", files[piece.file].path,
                      piece.range.begin, std::min(end, piece.range.end) - 1, name, files[last_file].path);
    }
    end = piece.range.end;
    last_file = piece.file;
  }
  if (const int64_t numel = num_elements_of(tensor.shape); end != numel) {
    throw_bad_input("{}: elements {} to {} of tensor \"{}\", after those here, are in no file",
                    files[last_file].path, end, numel - 1, name);
  }
}

}  // namespace

SafetensorsMetadata describe_pieces(const std::vector<const HostTensor*>& tensors) {
  auto table = ordered_json::object();
  for (const HostTensor* tensor : tensors) {
    if (!is_partial(*tensor)) continue;
    const ElementBox& box = *tensor->piece;
    auto& piece = table[tensor->name] = {{"shape", tensor->shape}};
    if (box.is_one_run()) {
      piece["begin"] = box.run(0).begin;
    } else {
      piece["rows"] = {box.rows.begin, box.rows.end};
      piece["columns"] = {box.columns.begin, box.columns.end};
    }
  }
  if (table.empty()) return {};
  try {
    return {{kPiecesKey, table.dump()}};
  } catch (const json::exception&) {
    throw_internal("a tensor's name is not UTF-8");
  }
}

CheckpointIndex index_tensors(const std::vector<CheckpointFile>& files) {
  CheckpointIndex index;
  for (size_t f = 0; f < files.size(); ++f) {
    PieceTable table(files[f]);
    for (SafetensorsEntry entry : files[f].header.tensors) {
      const ElementBox box = table.complete(entry);
      const int64_t offset = entry.offset, element_bytes = size_of(entry.dtype);
      const auto [known, is_new] = index.by_name.try_emplace(entry.name, index.tensors.size());
      if (is_new) {
        index.tensors.push_back(std::move(entry));
        index.pieces.emplace_back();
      } else if (const SafetensorsEntry& first = index.tensors[known->second];
                 first.dtype != entry.dtype || first.shape != entry.shape) {
        throw_bad_input("{}: tensor \"{}\" has another dtype or shape than in the files before it", files[f].path,
                        printable(entry.name));
      }
      for (int64_t i = 0; i < box.num_runs(); ++i) {
        const ElementRange run = box.run(i);
        index.pieces[known->second].push_back({f, offset + box.place_of(run.begin) * element_bytes, run});
      }
    }
    table.check_all_found();
  }
  for (size_t i = 0; i < index.tensors.size(); ++i) check_pieces(files, index.tensors[i], index.pieces[i]);
  return index;
}

}  // namespace parka
