// Checkpoints that several ranks save together, and any number of ranks loads.
#include <random>

#include "core/heartbeat.h"
#include "engine/checkpoint/checkpoint.h"
#include "engine/checkpoint/checkpoint_index.h"
#include "engine/checkpoint/checkpoint_layout.h"
#include "engine/checkpoint/checkpoint_verify.h"
#include "tests/engine/checkpoint_fixture_ranks.h"

using namespace parka;
using namespace parka::test;
namespace fs = std::filesystem;

namespace {

void flip_bit(const fs::path& path, size_t byte, int bit) {
  std::string content = read_file(path);
  content[byte] = static_cast<char>(content[byte] ^ (1 << bit));
  write_file(path, content);
}

// Larger than what is read at once, with borders of blocks inside of it.
CheckpointContents large_contents(int64_t step) {
  CheckpointContents contents = small_contents(step);
  contents.tensors.push_back(random_tensor("large", DType::kF32, {3, 2'000'003}, 9));
  contents.tensors.push_back(random_tensor("large too", DType::kU8, {5'000'001}, 10));
  return contents;
}

// Loads the newest checkpoint on `num_ranks` ranks, each of which takes a share of every tensor, and puts the
// shares together. What went wrong goes to `defects`.
CheckpointContents load_on_ranks(const std::string& run, int num_ranks, std::string& defects) {
  CheckpointContents whole;
  std::mutex mutex;
  const auto errors = on_ranks(num_ranks, [&](Communicator& ranks) {
    const int rank = ranks.rank();
    const auto loaded = load_newest(run, {}, ranks);
    if (!loaded) throw Error(ExitCode::kBadInput, "nothing to load");
    std::vector<TensorRange> ranges;
    {
      std::lock_guard lock(mutex);
      whole.step = loaded->step();
      whole.state = loaded->state();
      if (whole.tensors.empty()) {
        for (const SafetensorsEntry& tensor : loaded->tensors()) {
          whole.tensors.push_back({tensor.name, tensor.dtype, tensor.shape, {}});
          whole.tensors.back().bytes.resize(static_cast<size_t>(tensor.num_bytes));
        }
      }
    }
    for (const SafetensorsEntry& tensor : loaded->tensors()) {
      const int64_t numel = num_elements_of(tensor.shape);
      ranges.push_back({tensor.name, {numel * rank / num_ranks, numel * (rank + 1) / num_ranks}});
    }
    loaded->read_ranges(ranges, [&](const SafetensorsEntry& tensor, int64_t first_element, ByteSpan bytes) {
      std::lock_guard lock(mutex);
      const auto target = std::find_if(whole.tensors.begin(), whole.tensors.end(),
                                       [&](const HostTensor& t) { return t.name == tensor.name; });
      std::copy(bytes.begin(), bytes.end(), target->bytes.begin() + first_element * size_of(tensor.dtype));
    });
  });
  defects += messages_of(errors);
  return whole;
}

// A file that holds `stored` elements of one tensor as the header and metadata say, for index_tensors.
CheckpointFile file_with(const std::string& path, std::vector<int64_t> stored, const std::string& pieces,
                         const std::string& name = "a", DType dtype = DType::kF32) {
  CheckpointFile file{path, {}};
  file.header.tensors.push_back({name, dtype, stored, 0, num_bytes_of(dtype, stored)});
  if (!pieces.empty()) file.header.metadata["parka_pieces"] = pieces;
  return file;
}

std::string piece_of_a(const std::string& shape, int64_t begin) {
  return fmt::format(R"({{"a": {{"shape": {}, "begin": {}}}}})", shape, begin);
}

std::string box_of_a(const std::string& shape, const std::string& rows, const std::string& columns) {
  return fmt::format(R"({{"a": {{"shape": {}, "rows": {}, "columns": {}}}}})", shape, rows, columns);
}

// The bytes of a box of a tensor, row by row.
std::vector<std::byte> bytes_of(const HostTensor& tensor, const ElementBox& box) {
  std::vector<std::byte> bytes;
  const int64_t size = size_of(tensor.dtype);
  for (int64_t i = 0; i < box.num_runs(); ++i) {
    const ElementRange run = box.run(i);
    bytes.insert(bytes.end(), tensor.bytes.begin() + run.begin * size, tensor.bytes.begin() + run.end * size);
  }
  return bytes;
}

}  // namespace

TEST_CASE("what ranks save whose tensors are divided by columns other ranks load whole",
          "[engine][checkpoint][ranks]") {
  const TemporaryFolder folder;
  const std::string run = folder / "run";
  const HostTensor whole = random_tensor("w", DType::kBF16, {3, 5, 7}, 1);  // a matrix [15, 7]
  const std::vector<ElementBox> boxes = {
      {{0, 15}, {0, 3}, 7}, {{0, 15}, {6, 7}, 7}, {{0, 4}, {3, 6}, 7}, {{4, 15}, {3, 6}, 7}};
  const int num_ranks = static_cast<int>(boxes.size());
  const auto errors = on_ranks(num_ranks, [&](int rank) {
    const ElementBox& box = boxes[static_cast<size_t>(rank)];
    HostTensor part = {whole.name, whole.dtype, whole.shape, bytes_of(whole, box), box};
    save_checkpoint(run, {7, {}, {std::move(part)}}, options_of_rank(rank, num_ranks, "id"));
  });
  REQUIRE(messages_of(errors) == "");
  const LoadedCheckpoint loaded = load_checkpoint(run + "/step_00000007");
  REQUIRE(loaded.tensors().size() == 1);
  CHECK(loaded.tensors()[0].shape == whole.shape);
  CHECK(read_contents(loaded).tensors[0].bytes == whole.bytes);

  // Other boxes of it, as ranks of another division read them.
  int64_t wrong = 0;
  const std::vector<ElementBox> others = {
      {{2, 9}, {1, 5}, 7}, {{0, 15}, {5, 7}, 7}, ElementBox::flat({10, 90}, 105)};
  for (const ElementBox& box : others) {
    std::vector<TensorRange> ranges;
    for (int64_t i = 0; i < box.num_runs(); ++i) ranges.push_back({"w", box.run(i)});
    std::vector<std::byte> got(static_cast<size_t>(box.numel() * size_of(whole.dtype)));
    loaded.read_ranges(ranges, [&](const SafetensorsEntry&, int64_t first_element, ByteSpan bytes) {
      std::copy(bytes.begin(), bytes.end(), got.begin() + box.place_of(first_element) * size_of(whole.dtype));
    });
    wrong += got != bytes_of(whole, box);
  }
  CHECK(wrong == 0);
}

TEST_CASE("what any number of ranks saves any other number loads, bit for bit",
          "[engine][checkpoint][ranks][slow]") {
  const TemporaryFolder folder;
  const std::string run = folder / "run";
  const int num_savers = GENERATE(1, 2, 3, 4);
  const CheckpointContents contents = large_contents(10);
  if (num_savers == 1) {
    save_checkpoint(run, contents, {.max_shard_bytes = 1'000'000});
  } else {
    REQUIRE(messages_of(save_by_ranks(run, contents, num_savers)) == "");
  }
  CHECK(names_in(run) == std::set<std::string>{"step_00000010"});
  std::string defects;
  for (const int num_loaders : {1, 2, 3, 4}) {
    if (!same(load_on_ranks(run, num_loaders, defects), contents)) {
      defects += fmt::format("{} ranks load other bytes", num_loaders);
    }
  }
  CHECK(defects == "");
  CHECK(same(read_contents(load_checkpoint(run + "/step_00000010")), contents));  // whole tensors on one rank
}

TEST_CASE("the folder of a checkpoint of ranks holds their files and a manifest", "[engine][checkpoint][ranks]") {
  const TemporaryFolder folder;
  const std::string checkpoint = folder / "run/step_00000007";
  CheckpointContents part0{7, {{"a", 1}}, {random_tensor("whole", DType::kU8, {3}, 1)}};
  CheckpointContents part2{
      7, {}, {{"cut", DType::kBF16, {2, 3}, std::vector<std::byte>(8), ElementBox::flat({2, 6}, 6)}}};
  part0.tensors.push_back({"cut", DType::kBF16, {2, 3}, std::vector<std::byte>(4), ElementBox::flat({0, 2}, 6)});
  // Nothing of `cut`, and `full` as a piece that is the whole.
  const CheckpointContents part1{7, {}, {{"cut", DType::kBF16, {2, 3}, {}, ElementBox::flat({2, 2}, 6)}}};
  part2.tensors.push_back({"full", DType::kU8, {1, 2}, std::vector<std::byte>(2), ElementBox::flat({0, 2}, 2)});
  const std::vector<CheckpointContents> parts{part0, part1, part2};
  const auto errors = on_ranks(3, [&](int rank) {
    SaveOptions options = options_of_rank(rank, 3, "id");
    options.max_shard_bytes = 1000;
    save_checkpoint(folder / "run", parts[static_cast<size_t>(rank)], options);
  });
  REQUIRE(messages_of(errors) == "");
  CHECK(names_in(checkpoint) ==
        std::set<std::string>{"manifest.json", "rank_0000_shard_0.safetensors", "rank_0002_shard_0.safetensors"});
  const auto manifest = nlohmann::json::parse(read_file(checkpoint + "/manifest.json"));
  CHECK(manifest["version"] == 2);
  CHECK(manifest["ranks"] == 3);
  CHECK(manifest["attempt"] == "id");
  CHECK(manifest["tensors"] == 3);
  CHECK(manifest["state"] == part0.state);
  CHECK(manifest["files"].size() == 2);
  const SafetensorsHeader header =
      read_safetensors_header(InputFile(checkpoint + "/rank_0002_shard_0.safetensors"));
  CHECK(header.metadata == SafetensorsMetadata{{"parka_pieces", R"({"cut":{"shape":[2,3],"begin":2}})"}});
  REQUIRE(header.tensors.size() == 2);
  CHECK(header.tensors[0].name == "cut");
  CHECK(header.tensors[0].shape == std::vector<int64_t>{4});
  CHECK(header.tensors[1].shape == std::vector<int64_t>{1, 2});
  const LoadedCheckpoint loaded = load_checkpoint(checkpoint);
  CHECK(loaded.tensors().size() == 3);
  REQUIRE(loaded.find("cut") != nullptr);
  CHECK(loaded.find("cut")->shape == std::vector<int64_t>{2, 3});
  CHECK(loaded.find("cut")->num_bytes == 12);
  CHECK(loaded.find("none") == nullptr);
}

TEST_CASE("any ranges are read, from little more of the files", "[engine][checkpoint][ranks]") {
  const TemporaryFolder folder;
  const std::string run = folder / "run";
  const int num_savers = GENERATE(1, 3);
  const CheckpointContents contents = large_contents(10);
  if (num_savers == 1) {
    save_checkpoint(run, contents, {});
  } else {
    REQUIRE(messages_of(save_by_ranks(run, contents, num_savers)) == "");
  }
  const uint64_t before = last_heartbeat().count;
  const LoadedCheckpoint loaded = load_checkpoint(run + "/step_00000010");
  const uint64_t after_verifying = last_heartbeat().count;
  CHECK(after_verifying > before + static_cast<uint64_t>(num_savers));
  std::mt19937_64 random(3);
  const auto below = [&](int64_t limit) { return static_cast<int64_t>(random() % static_cast<uint64_t>(limit)); };
  int wrong = 0;
  for (int round = 0; round < 200; ++round) {
    const HostTensor& tensor = contents.tensors[random() % contents.tensors.size()];
    const int64_t numel = num_elements_of(tensor.shape), size = size_of(tensor.dtype);
    const int64_t begin = below(numel + 1);
    const int64_t end =
        begin + below(round % 10 == 0 ? numel - begin + 1 : std::min<int64_t>(numel - begin, 500) + 1);
    std::vector<std::byte> got(static_cast<size_t>((end - begin) * size));
    int64_t num_got = 0;
    loaded.read_ranges({{tensor.name, {begin, end}}},
                       [&](const SafetensorsEntry& entry, int64_t first_element, ByteSpan bytes) {
                         wrong += entry.name != tensor.name || entry.shape != tensor.shape || bytes.empty();
                         wrong += static_cast<int64_t>(bytes.size()) > LoadedCheckpoint::kMaxPieceBytes;
                         std::copy(bytes.begin(), bytes.end(), got.begin() + (first_element - begin) * size);
                         num_got += static_cast<int64_t>(bytes.size());
                       });
    wrong += num_got != (end - begin) * size;
    wrong += !std::equal(got.begin(), got.end(), tensor.bytes.begin() + begin * size);
  }
  CHECK(wrong == 0);
  CHECK(last_heartbeat().count > after_verifying + 100);
  CHECK(mentions(error_of([&] { loaded.read_ranges({{"none", {0, 1}}}, {}); }).what(), "lacks the tensor none"));
  CHECK(error_of([&] { loaded.read_ranges({{"count", {0, 2}}}, {}); }).code() == ExitCode::kInternal);
}

TEST_CASE("a range is refused when its bytes changed after they were verified, others are not",
          "[engine][checkpoint][ranks]") {
  const TemporaryFolder folder;
  save_checkpoint(folder / "run", large_contents(1), {});
  const LoadedCheckpoint loaded = load_checkpoint(folder / "run/step_00000001");
  const std::string shard = loaded.path() + "/shard_0.safetensors";
  const SafetensorsEntry& large = *loaded.find("large");
  const int64_t middle = num_elements_of(large.shape) / 2, step = kVerifiedBlockBytes / size_of(large.dtype);
  flip_bit(shard, static_cast<size_t>(large.offset + middle * size_of(large.dtype)), 5);
  const auto read = [&](int64_t begin, int64_t end) {
    int num_calls = 0;
    loaded.read_ranges({{"large", {begin, end}}}, [&](const auto&, int64_t, ByteSpan) { ++num_calls; });
    return num_calls;
  };
  CHECK(read(0, middle - step) > 0);
  CHECK(read(middle + step, 2 * middle) > 0);
  for (const auto& [begin, end] :
       {std::pair{middle, middle + 1}, {middle - 2 * step, middle + 1}, {0, 2 * middle}}) {
    const Error error = error_of([&] { read(begin, end); });
    CHECK(error.code() == ExitCode::kBadInput);
    CHECK(mentions(error.what(), shard + ": changed after it was verified"));
  }
}

TEST_CASE("any changed byte of a checkpoint of ranks is refused on all ranks, naming the file",
          "[engine][checkpoint][ranks][slow]") {
  const TemporaryFolder folder;
  REQUIRE(messages_of(save_by_ranks(folder / "run", small_contents(5), 2)) == "");
  const std::string checkpoint = folder / "run/step_00000005";
  int not_refused = 0, num_bytes = 0;
  for (const std::string& name : names_in(checkpoint)) {
    const std::string file = checkpoint + "/" + name;
    for (size_t byte = 0; byte < fs::file_size(file); ++byte, ++num_bytes) {
      flip_bit(file, byte, static_cast<int>(byte % 8));
      const auto errors = on_ranks(2, [&](Communicator& ranks) { load_checkpoint(checkpoint, ranks); });
      const auto refused = [&](const auto& e) {
        return e && e->code() == ExitCode::kBadInput && mentions(e->what(), file);
      };
      not_refused += !refused(errors[0]) || std::string(errors[0]->what()) != errors[1]->what();
      flip_bit(file, byte, static_cast<int>(byte % 8));
    }
  }
  CHECK(not_refused == 0);
  CHECK(num_bytes > 1200);
  CHECK(same(read_contents(load_checkpoint(checkpoint)), small_contents(5)));
}

TEST_CASE("all ranks load the same checkpoint when a newer one is damaged", "[engine][checkpoint][ranks]") {
  const TemporaryFolder folder;
  const std::string run = folder / "run";
  for (const int64_t step : {10, 20}) REQUIRE(messages_of(save_by_ranks(run, small_contents(step), 3)) == "");
  flip_bit(run + "/step_00000020/rank_0001_shard_0.safetensors", 300, 1);
  std::string defects;
  CHECK(same(load_on_ranks(run, 3, defects), small_contents(10)));
  CHECK(defects == "");
  fs::remove(run + "/step_00000010/manifest.json");
  load_on_ranks(run, 3, defects);
  CHECK(mentions(defects, "on rank 0: " + run + ": none of its 2 checkpoints can be loaded"));
  CHECK(mentions(defects, "on rank 2: " + run + ": none of its 2 checkpoints can be loaded"));
}

TEST_CASE("ranks that see different checkpoints in one folder load neither", "[engine][checkpoint][ranks]") {
  const TemporaryFolder folder;
  save_checkpoint(folder / "a", small_contents(1), {});
  save_checkpoint(folder / "b", small_contents(1, 1), {});
  const auto errors = on_ranks(2, [&](Communicator& ranks) {
    load_checkpoint(folder / (ranks.rank() == 0 ? "a/step_00000001" : "b/step_00000001"), ranks);
  });
  for (const auto& error : errors) {
    REQUIRE(error);
    CHECK(mentions(error->what(), "the ranks do not see the same checkpoint"));
  }
}

TEST_CASE("pieces must make up their tensors", "[engine][checkpoint][ranks]") {
  const CheckpointFile first = file_with("f", {4}, piece_of_a("[2, 5]", 0));
  const CheckpointIndex index =
      index_tensors({file_with("g", {6}, piece_of_a("[2, 5]", 4)), first, file_with("h", {2}, "", "b")});
  REQUIRE(index.tensors.size() == 2);
  CHECK(index.tensors[0].shape == std::vector<int64_t>{2, 5});
  CHECK(index.pieces[0][0].file == 1);

  const auto [stored, pieces, reason] = GENERATE(table<std::vector<int64_t>, std::string, std::string>({
      {{5}, piece_of_a("[2, 5]", 5), "g: elements 4 to 4 of tensor \"a\", before those here, are in no file"},
      {{5}, piece_of_a("[2, 5]", 4), "g: elements 9 to 9 of tensor \"a\", after those here, are in no file"},
      {{7}, piece_of_a("[2, 5]", 3), "g: elements 3 to 3 of tensor \"a\" are in f too"},
      {{2, 5}, "", "g: elements 0 to 3 of tensor \"a\" are in f too"},
      {{6}, piece_of_a("[10]", 4), "g: tensor \"a\" has another dtype or shape"},
      {{6}, piece_of_a("[2, 5]", 5), "does not lie in its shape"},
      {{6}, piece_of_a("[4294967296, 4294967296, 2]", 5), "does not lie in its shape"},
      {{6}, piece_of_a("[2, 5]", -4), "must hold integers"},
      {{6}, piece_of_a("[2, 5.0]", 4), "must hold integers"},
      {{6}, piece_of_a("3", 4), "must be an object of shape and begin"},
      {{6, 1}, piece_of_a("[2, 5]", 4), "must have one dimension"},
      {{6}, box_of_a("[2, 5]", "[0, 2]", "[2, 5]"), "g: elements 2 to 3 of tensor \"a\" are in f too"},
      {{2}, box_of_a("[2, 5]", "[0, 2]", "[4, 5]"), "g: elements 5 to 8 of tensor \"a\", before those here"},
      {{6}, box_of_a("[2, 5]", "[0, 2]", "[3, 5]"), "does not lie in its shape or is not of 6 elements"},
      {{4}, box_of_a("[2, 5]", "[0, 2]", "[4, 6]"), "does not lie in its shape"},
      {{4}, box_of_a("[2, 5]", "[1, 3]", "[3, 5]"), "does not lie in its shape"},
      {{4}, box_of_a("[2, 5]", "[2, 0]", "[5, 3]"), "does not lie in its shape"},
      {{4}, box_of_a("[2, 5]", "[0, 2, 2]", "[3, 5]"), "must be [begin, end]"},
      {{4}, box_of_a("[2, 5]", "[0, 9223372036854775807]", "[0, 5]"), "does not lie in its shape"},
      {{4}, R"({"a": {"shape": [2, 5], "rows": [0, 2]}})", "must be an object of shape and begin, or"},
      {{6}, "[]", "must be an object"},
      {{6}, "{", "syntax error"},
      {{2, 5}, R"({"b": {"shape": [6], "begin": 0}})", "names tensors that it does not hold"},
  }));
  CAPTURE(pieces);
  const Error error = error_of([&, &stored = stored, &pieces = pieces] {
    index_tensors({first, file_with("g", stored, pieces)});
  });
  CHECK(error.code() == ExitCode::kBadInput);
  CAPTURE(error.what());
  CHECK(mentions(error.what(), reason));
}

TEST_CASE("ranks whose pieces do not make up the tensors save nothing", "[engine][checkpoint][ranks]") {
  const TemporaryFolder folder;
  REQUIRE(messages_of(save_by_ranks(folder / "run", small_contents(10), 3)) == "");
  std::vector<CheckpointContents> parts = split_contents(small_contents(20), 3);
  const bool gap = GENERATE(true, false);
  if (gap) {
    parts[1].tensors.erase(parts[1].tensors.begin() + 1);
  } else {
    parts[1].tensors[1] = small_contents(20).tensors[1];
  }
  const auto errors = on_ranks(3, [&](int rank) {
    save_checkpoint(folder / "run", parts[static_cast<size_t>(rank)], options_of_rank(rank, 3, "x"));
  });
  for (const auto& error : errors) {
    REQUIRE(error);
    CHECK(error->code() == ExitCode::kInternal);
    CHECK(mentions(error->what(), "do not make up the tensors"));
  }
  CHECK(names_in(folder / "run") == std::set<std::string>{"step_00000010"});
}

TEST_CASE("one rank alone does not save pieces", "[engine][checkpoint][ranks]") {
  const TemporaryFolder folder;
  CheckpointContents contents = small_contents(1);
  contents.tensors[0].piece = ElementBox::flat({0, 35}, 35);
  save_checkpoint(folder / "run", contents, {});  // a piece that is the whole
  contents.tensors[0].piece = ElementBox::flat({0, 34}, 35);
  contents.tensors[0].bytes.pop_back();
  CHECK(error_of([&] { save_checkpoint(folder / "run", contents, {}); }).code() == ExitCode::kInternal);
}

TEST_CASE("manifests of ranks have one name for each file", "[engine][checkpoint][ranks]") {
  const auto parse = [](int64_t num_ranks, const std::vector<std::string>& names) {
    Manifest manifest{.step = 3, .state = nullptr, .files = {}, .num_ranks = num_ranks, .attempt = "x"};
    for (const std::string& name : names) manifest.files.push_back({name, 10, "ab"});
    return parse_manifest(encode_manifest(manifest), "m");
  };
  const std::vector<std::string> good{"rank_0000_shard_0.safetensors", "rank_0000_shard_1.safetensors",
                                      "rank_0002_shard_0.safetensors"};
  const Manifest manifest = parse(3, good);
  CHECK(manifest.num_ranks == 3);
  CHECK(manifest.attempt == "x");
  CHECK(manifest.files.size() == 3);
  for (const std::vector<std::string>& bad : {std::vector<std::string>{good[1]},
                                              {good[0], good[0]},
                                              {good[2], good[0]},
                                              {"../" + good[0]},
                                              {"shard_0.safetensors"}}) {
    CHECK(mentions(error_of([&] { parse(3, bad); }).what(), "was expected"));
  }
  CHECK(mentions(error_of([&] { parse(2, good); }).what(), "was expected"));
}

TEST_CASE("ranks save the same steps, one of them twice", "[engine][checkpoint][ranks]") {
  const TemporaryFolder folder;
  const std::string run = folder / "run";
  for (const auto& [step, version] : {std::pair<int64_t, uint64_t>{1, 0}, {2, 0}, {2, 1}, {3, 0}}) {
    CHECK(messages_of(save_by_ranks(run, small_contents(step, version), 3)) == "");
  }
  CHECK(names_in(run) == std::set<std::string>{"step_00000002", "step_00000003"});
  CHECK(same(read_contents(load_checkpoint(run + "/step_00000002")), small_contents(2, 1)));
  CHECK(same(*read_newest(run).contents, small_contents(3)));
}
