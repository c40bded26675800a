#include "engine/checkpoint/checkpoint.h"

#include <limits>
#include <random>
#include <thread>

#include <sys/stat.h>
#include <unistd.h>

#include "engine/checkpoint/checkpoint_layout.h"
#include "tests/engine/checkpoint_fixture.h"

using namespace parka;
using namespace parka::test;
namespace fs = std::filesystem;

namespace {

const SaveOptions kKeepAll{.keep = 0};
const SaveOptions kTwoShards{.keep = 0, .max_shard_bytes = 100};

void flip_bit(const fs::path& path, size_t byte, int bit) {
  std::fstream file(path, std::ios::binary | std::ios::in | std::ios::out);
  file.seekg(static_cast<std::streamoff>(byte));
  const char old = static_cast<char>(file.get());
  file.seekp(static_cast<std::streamoff>(byte));
  file.put(static_cast<char>(old ^ (1 << bit)));
}

// True when `path` is refused as bad input in a message that names `file`.
bool refused_naming(const std::string& path, const std::string& file) {
  try {
    load_checkpoint(path);
    return false;
  } catch (const Error& e) {
    return e.code() == ExitCode::kBadInput && mentions(e.what(), file) && !mentions(e.what(), "\n");
  }
}

std::vector<int64_t> steps_in(const std::string& folder) {
  std::vector<int64_t> steps;
  for (const CheckpointInfo& info : list_checkpoints(folder)) steps.push_back(info.step);
  return steps;
}

}  // namespace

TEST_CASE("checkpoints come back bit for bit, in as many files as asked", "[engine][checkpoint]") {
  const TemporaryFolder folder;
  const auto [max_shard_bytes, num_shards] =
      GENERATE(table<int64_t, size_t>({{1, 9}, {100, 3}, {1000, 2}, {int64_t{4} << 30, 1}}));
  CheckpointContents contents = small_contents(123);
  contents.tensors.push_back(random_tensor("large", DType::kF32, {3, 100'001}, 9));
  save_checkpoint(folder / "a/run", contents, {.max_shard_bytes = max_shard_bytes});
  CHECK(names_in(folder / "a/run") == std::set<std::string>{"step_00000123"});
  const LoadedCheckpoint loaded = load_checkpoint(folder / "a/run/step_00000123");
  CHECK(names_in(loaded.path()).size() == num_shards + 1);
  CHECK(loaded.step() == 123);
  CHECK(same(read_contents(loaded), contents));
}

TEST_CASE("a checkpoint may hold no tensors and any step", "[engine][checkpoint]") {
  const TemporaryFolder folder;
  const int64_t step = GENERATE(int64_t{0}, 99'999'999, 100'000'000, std::numeric_limits<int64_t>::max());
  const CheckpointContents contents{step, nlohmann::json(nullptr), {}};
  save_checkpoint(folder / "run", contents, kKeepAll);
  const Newest newest = read_newest(folder / "run");
  REQUIRE(newest.contents);
  CHECK(same(*newest.contents, contents));
}

TEST_CASE("the manifest is JSON that says what the folder holds", "[engine][checkpoint]") {
  const TemporaryFolder folder;
  save_checkpoint(folder / "run", small_contents(7), kKeepAll);
  const auto manifest = nlohmann::json::parse(read_file(folder / "run/step_00000007/manifest.json"));
  CHECK(manifest["format"] == "parka-checkpoint");
  CHECK(manifest["version"] == 1);
  CHECK(manifest["step"] == 7);
  CHECK(manifest["state"] == small_contents(7).state);
  CHECK(manifest["tensors"] == 8);
  CHECK(manifest["complete"] == true);
  REQUIRE(manifest["files"].size() == 1);
  const auto& file = manifest["files"][0];
  const std::string path = (folder / "run/step_00000007/") + file["name"].get<std::string>();
  CHECK(file["bytes"] == fs::file_size(path));
  Checksum checksum;
  checksum.update(as_bytes(read_file(path)));
  CHECK(file["xxh3_128"] == checksum.hex());
}

TEST_CASE("checksums are XXH3-128 whatever the pieces", "[engine][checkpoint]") {
  CHECK(Checksum().hex() == "99aa06d3014798d86001c324468d497f");  // of no bytes, from the reference implementation
  const HostTensor data = random_tensor("a", DType::kU8, {5000}, 3);
  Checksum whole, pieces;
  whole.update(data.bytes);
  for (size_t at = 0, size = 0; at < data.bytes.size(); at += size, size = size * 2 + 1) {
    pieces.update(ByteSpan(data.bytes).subspan(at, std::min(size, data.bytes.size() - at)));
  }
  CHECK(whole.hex() == pieces.hex());
  CHECK(whole.hex() != Checksum().hex());
}

TEST_CASE("any changed byte of a checkpoint is refused, naming the file", "[engine][checkpoint]") {
  const TemporaryFolder folder;
  save_checkpoint(folder / "run", small_contents(5), kTwoShards);
  const std::string checkpoint = folder / "run/step_00000005";
  REQUIRE(names_in(checkpoint) ==
          std::set<std::string>{"manifest.json", "shard_0.safetensors", "shard_1.safetensors"});
  int not_refused = 0, num_bytes = 0;
  for (const std::string& name : names_in(checkpoint)) {
    const fs::path file = fs::path(checkpoint) / name;
    for (size_t byte = 0; byte < fs::file_size(file); ++byte, ++num_bytes) {
      const int bit = static_cast<int>(byte % 8);
      flip_bit(file, byte, bit);
      not_refused += !refused_naming(checkpoint, file.string());
      flip_bit(file, byte, bit);
    }
  }
  CHECK(not_refused == 0);
  CHECK(num_bytes > 1200);
  CHECK(same(read_contents(load_checkpoint(checkpoint)), small_contents(5)));
}

TEST_CASE("files of another length are refused, naming the file", "[engine][checkpoint]") {
  const TemporaryFolder folder;
  save_checkpoint(folder / "run", small_contents(5), kTwoShards);
  const std::string checkpoint = folder / "run/step_00000005";
  int not_refused = 0;
  for (const std::string& name : names_in(checkpoint)) {
    const fs::path file = fs::path(checkpoint) / name;
    const std::string content = read_file(file);
    for (size_t size = 0; size < content.size(); ++size) {
      write_file(file, content.substr(0, size));
      not_refused += !refused_naming(checkpoint, file.string());
    }
    for (const char* extra : {"\n", " ", "}"}) {
      write_file(file, content + extra);
      not_refused += !refused_naming(checkpoint, file.string());
    }
    write_file(file, content);
  }
  CHECK(not_refused == 0);
}

TEST_CASE("missing, foreign and strange files are refused, naming the file", "[engine][checkpoint]") {
  const TemporaryFolder folder;
  save_checkpoint(folder / "run", small_contents(5), kTwoShards);
  save_checkpoint(folder / "other", small_contents(5, 1), kTwoShards);
  const std::string checkpoint = folder / "run/step_00000005";
  int not_refused = 0;
  for (const std::string& name : names_in(checkpoint)) {
    const fs::path file = fs::path(checkpoint) / name, other = fs::path(folder / "other/step_00000005") / name;
    // A manifest of another model does not match these shards, so the message names the first of them.
    const std::string named = name == kManifestName ? "shard_0.safetensors" : file.string();
    fs::rename(file, folder / "aside");
    not_refused += !refused_naming(checkpoint, file.string());
    REQUIRE(fs::file_size(other) == fs::file_size(folder / "aside"));
    fs::copy_file(other, file);
    not_refused += !refused_naming(checkpoint, named);
    fs::remove(file);
    fs::create_directory(file);
    not_refused += !refused_naming(checkpoint, file.string());
    fs::remove(file);
    REQUIRE(::mkfifo(file.c_str(), 0600) == 0);
    not_refused += !refused_naming(checkpoint, file.string());
    fs::remove(file);
    fs::rename(folder / "aside", file);
  }
  CHECK(not_refused == 0);
  CHECK(same(read_contents(load_checkpoint(checkpoint)), small_contents(5)));
}

TEST_CASE("a step folder must hold its own step, a copy may have any name", "[engine][checkpoint]") {
  const TemporaryFolder folder;
  save_checkpoint(folder / "run", small_contents(10), kKeepAll);
  copy_folder(folder / "run/step_00000010", folder / "run/step_00000020");
  copy_folder(folder / "run/step_00000010", folder / "best so far");
  CHECK(refused_naming(folder / "run/step_00000020", "is a manifest of step 10 in a folder of step 20"));
  CHECK(same(read_contents(load_checkpoint(folder / "best so far")), small_contents(10)));
  CHECK(same(read_contents(load_checkpoint(folder / "run/step_00000010/")), small_contents(10)));
}

TEST_CASE("a file that changes after it was verified is noticed while it is read", "[engine][checkpoint]") {
  const TemporaryFolder folder;
  save_checkpoint(folder / "run", small_contents(5), kKeepAll);
  const LoadedCheckpoint loaded = load_checkpoint(folder / "run/step_00000005");
  const std::string shard = loaded.path() + "/shard_0.safetensors";
  flip_bit(shard, fs::file_size(shard) - 1, 3);
  CHECK(mentions(error_of([&] { read_contents(loaded); }).what(), shard));
}

TEST_CASE("manifests that were resealed after a change are refused for the change", "[engine][checkpoint]") {
  const Manifest manifest{3, {{"a", 1}}, {{"shard_0.safetensors", 10, "ab"}}, 1};
  const std::string good = encode_manifest(manifest);
  const auto reseal = [&](const std::string& from, const std::string& to) {
    std::string body = good.substr(0, good.rfind(",\n  \"manifest_xxh3_128\""));
    body.replace(body.find(from), from.size(), to);
    Checksum checksum;
    checksum.update(as_bytes(body));
    return body + ",\n  \"manifest_xxh3_128\": \"" + checksum.hex() + "\"\n}\n";
  };
  CHECK(parse_manifest(reseal("\"a\": 1", "\"a\": 2"), "m").state["a"] == 2);
  const auto [from, to, reason] = GENERATE(table<std::string, std::string, std::string>({
      {"parka-checkpoint", "other", "not the manifest of a Parka checkpoint"},
      {"\"version\": 1", "\"version\": 3", "format version 3, this Parka reads versions 1 and 2"},
      {"true", "false", "\"complete\""},
      {"\"step\": 3", "\"step\": -3", "\"step\""},
      {"\"step\": 3", "\"step\": 9223372036854775808", "\"step\""},
      {"\"step\": 3", "\"step\": 3, \"step\": 4", "given twice"},
      {"\"state\"", "\"states\"", "has no \"state\""},
      {"\"tensors\": 1", "\"tensors\": 1.5", "\"tensors\""},
      {"shard_0", "../shard_0", "file \"../shard_0.safetensors\" where \"shard_0.safetensors\" was expected"},
      {"\"bytes\": 10", "\"bytes\": \"10\"", "\"bytes\""},
      {"\"xxh3_128\": \"ab\"", "\"xxh3\": \"ab\"", "has no \"xxh3_128\""},
      {"\"files\": [", "\"files\": [3, ", "\"files\""},
  }));
  CAPTURE(from, to);
  const std::string changed = reseal(from, to);
  const Error error = error_of([&] { parse_manifest(changed, "m"); });
  CHECK(error.code() == ExitCode::kBadInput);
  CHECK(std::string(error.what()).find("m: ") == 0);
  CHECK(mentions(error.what(), reason));
}

TEST_CASE("a state that cannot be read back is not saved", "[engine][checkpoint]") {
  const TemporaryFolder folder;
  CheckpointContents contents = small_contents(1);
  const bool too_deep = GENERATE(false, true);
  contents.state = "\xff";
  for (int depth = 0; too_deep && depth < 70; ++depth)
    contents.state = {depth == 0 ? nlohmann::json(1) : contents.state};
  CHECK(error_of([&] { save_checkpoint(folder / "run", contents, kKeepAll); }).code() == ExitCode::kInternal);
  CHECK(names_in(folder / "run").empty());
}

TEST_CASE("contents that contradict themselves are not saved", "[engine][checkpoint]") {
  const TemporaryFolder folder;
  save_checkpoint(folder / "run", small_contents(10), kKeepAll);
  CheckpointContents twice = small_contents(20), cut = small_contents(20), negative = small_contents(-1);
  twice.tensors.push_back(twice.tensors[0]);
  cut.tensors[1].bytes.pop_back();
  for (const CheckpointContents& contents : {twice, cut, negative}) {
    // One tensor per shard, so that no single file shows that a name is there twice.
    const Error error = error_of([&] { save_checkpoint(folder / "run", contents, {.max_shard_bytes = 1}); });
    CHECK(error.code() == ExitCode::kInternal);
  }
  CHECK(names_in(folder / "run") == std::set<std::string>{"step_00000010"});
}

TEST_CASE("the newest intact checkpoint is loaded, refused ones are reported", "[engine][checkpoint]") {
  const TemporaryFolder folder;
  const std::string run = folder / "run";
  CHECK_FALSE(read_newest(run).contents);  // no folder
  fs::create_directory(run);
  CHECK_FALSE(read_newest(run).contents);  // nothing in it
  for (const int64_t step : {10, 20, 30}) save_checkpoint(run, small_contents(step), kKeepAll);
  CHECK(steps_in(run) == std::vector<int64_t>{30, 20, 10});
  CHECK(same(*read_newest(run).contents, small_contents(30)));

  flip_bit(run + "/step_00000030/shard_0.safetensors", 200, 1);
  fs::remove(run + "/step_00000020/manifest.json");
  const Newest newest = read_newest(run);
  CHECK(same(*newest.contents, small_contents(10)));
  REQUIRE(newest.refusals.size() == 2);
  CHECK(mentions(newest.refusals[0], "step_00000030/shard_0.safetensors"));
  CHECK(mentions(newest.refusals[1], "step_00000020/manifest.json"));

  write_file(run + "/step_00000010/manifest.json", "{}");
  const Error error = error_of([&] { read_newest(run); });
  CHECK(error.code() == ExitCode::kBadInput);
  CHECK(mentions(error.what(), run + ": none of its 3 checkpoints can be loaded"));
}

TEST_CASE("names that are not those of finished checkpoints are not listed", "[engine][checkpoint]") {
  const TemporaryFolder folder;
  for (const char* name :
       {"step_00000010.tmp", "step_00000020.delete", "step_30", "step_-0000030", "step_00000030.bak",
        "step_0000000030", "step_", "steps", "step_99999999999999999999", "metrics"}) {
    fs::create_directory(folder / name);
  }
  CHECK(list_checkpoints(folder.path()).empty());
  CHECK_FALSE(load_newest(folder.path(), [](const std::string&) { FAIL("nothing to refuse"); }));
}

TEST_CASE("a run folder that is a file is bad input everywhere", "[engine][checkpoint]") {
  const TemporaryFolder folder;
  write_file(folder / "file", "precious");
  for (const std::string& path : {folder / "file", folder / "file/run"}) {
    for (const Error& error :
         {error_of([&] { check_run_folder_writable(path); }), error_of([&] { read_newest(path); })}) {
      CHECK(error.code() == ExitCode::kBadInput);
      CHECK(mentions(error.what(), folder / "file"));
    }
  }
  CHECK(read_file(folder / "file") == "precious");
}

TEST_CASE("a run folder is created and proven writable before training", "[engine][checkpoint]") {
  const TemporaryFolder folder;
  const std::string run = folder / "a/b/c/";
  check_run_folder_writable(run);
  check_run_folder_writable(run);
  CHECK(names_in(run).empty());
  // Root may write anywhere but here.
  fs::permissions(run, fs::perms::owner_read | fs::perms::owner_exec);
  const Error error = error_of([&] { check_run_folder_writable(::geteuid() == 0 ? "/proc/parka" : run); });
  CHECK(error.code() == ExitCode::kBadInput);
  fs::permissions(run, fs::perms::owner_all);
}

TEST_CASE("retention keeps the newest complete checkpoints", "[engine][checkpoint]") {
  const TemporaryFolder folder;
  const std::string run = folder / "run";
  const auto [keep, expected] = GENERATE(table<int64_t, std::vector<int64_t>>(
      {{0, {50, 40, 30, 20, 10}}, {1, {50}}, {2, {50, 40}}, {3, {50, 40, 30}}, {9, {50, 40, 30, 20, 10}}}));
  for (const int64_t step : {10, 20, 30, 40, 50}) {
    save_checkpoint(run, small_contents(step), {.keep = keep});
  }
  CHECK(steps_in(run) == expected);
  CHECK(names_in(run).size() == expected.size());
  CHECK(same(*read_newest(run).contents, small_contents(50)));
}

TEST_CASE("retention does not count a damaged checkpoint", "[engine][checkpoint]") {
  const TemporaryFolder folder;
  const std::string run = folder / "run";
  for (const int64_t step : {10, 20, 30, 40}) save_checkpoint(run, small_contents(step), kKeepAll);
  fs::resize_file(run + "/step_00000030/shard_0.safetensors", 100);
  fs::create_directory(run + "/step_00000035.tmp");
  std::vector<std::string> reports;
  const SaveOptions options{.keep = 3, .report = [&](const std::string& m) { reports.push_back(m); }};
  save_checkpoint(run, small_contents(50), options);
  CHECK(steps_in(run) == std::vector<int64_t>{50, 40, 30, 20});  // three good ones
  REQUIRE(reports.size() == 1);
  CHECK(mentions(reports[0], "step_00000030/shard_0.safetensors"));
  save_checkpoint(run, small_contents(60), options);
  CHECK(steps_in(run) == std::vector<int64_t>{60, 50, 40});  // the damaged one leaves when it is too old anyway
}

TEST_CASE("a run resumed from an older step removes nothing newer than its save", "[engine][checkpoint]") {
  const TemporaryFolder folder;
  const std::string run = folder / "run";
  for (const int64_t step : {10, 20, 30}) save_checkpoint(run, small_contents(step), kKeepAll);
  save_checkpoint(run, small_contents(15), {.keep = 1});
  CHECK(steps_in(run) == std::vector<int64_t>{30, 20, 15});
}

TEST_CASE("saving a step again replaces it", "[engine][checkpoint]") {
  const TemporaryFolder folder;
  const std::string run = folder / "run";
  for (const int64_t step : {10, 20}) save_checkpoint(run, small_contents(step), kKeepAll);
  save_checkpoint(run, small_contents(20, 1), kKeepAll);
  CHECK(names_in(run) == std::set<std::string>{"step_00000010", "step_00000020"});
  CHECK(same(*read_newest(run).contents, small_contents(20, 1)));
}

TEST_CASE("a displaced checkpoint without a successor gets its name back at the next save",
          "[engine][checkpoint]") {
  const TemporaryFolder folder;
  const std::string run = folder / "run";
  for (const int64_t step : {10, 20}) save_checkpoint(run, small_contents(step), kKeepAll);
  fs::rename(run + "/step_00000020", run + "/step_00000020.old");
  save_checkpoint(run, small_contents(30), {.keep = 2});
  CHECK(names_in(run) == std::set<std::string>{"step_00000020", "step_00000030"});
  CHECK(same(read_contents(load_checkpoint(run + "/step_00000020")), small_contents(20)));
}

TEST_CASE("a displaced checkpoint is loaded where its successor is missing or damaged", "[engine][checkpoint]") {
  const TemporaryFolder folder;
  const std::string run = folder / "run";
  save_checkpoint(run, small_contents(20), kKeepAll);
  fs::rename(run + "/step_00000020", run + "/step_00000020.old");
  CHECK(same(*read_newest(run).contents, small_contents(20)));

  copy_folder(run + "/step_00000020.old", run + "/step_00000020");
  flip_bit(run + "/step_00000020/manifest.json", 30, 0);
  const Newest newest = read_newest(run);
  CHECK(newest.refusals.size() == 1);
  CHECK(same(*newest.contents, small_contents(20)));
}
