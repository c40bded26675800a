#include "core/memory/host_memory.h"

#include <vector>

#include "tests/support/catch.h"

using namespace parka;

namespace {

const std::string kMeminfo =
    "MemTotal:       16000000 kB\nMemFree:         1000000 kB\nMemAvailable:    4000000 kB\nBuffers: 5 kB\n";
constexpr int64_t kAvailable = int64_t{4000000} * 1024;

}  // namespace

TEST_CASE("without a container's limit there is what the kernel calls available", "[core]") {
  CHECK(available_host_bytes(kMeminfo, {{"", "", ""}}) == kAvailable);
  CHECK(available_host_bytes(kMeminfo, {{"max\n", "123456\n", "inactive_file 99\n"}}) == kAvailable);
}

TEST_CASE("a container's limit leaves what is not in use, with what of the page cache it gives back", "[core]") {
  const std::string stat = "anon 700\nactive_file 50\ninactive_file 200\nslab 7\n";
  CHECK(available_host_bytes(kMeminfo, {{"1000\n", "900\n", stat}}) == 300);
  CHECK(available_host_bytes(kMeminfo, {{"1000\n", "900\n", ""}}) == 100);
  CHECK(available_host_bytes("", {{"1000\n", "900\n", stat}}) == 300);
}

TEST_CASE("the lesser of the kernel's and the container's bytes counts", "[core]") {
  CHECK(available_host_bytes(kMeminfo, {{"8000000000\n", "0\n", ""}}) == kAvailable);
  CHECK(available_host_bytes(kMeminfo, {{"4000000000\n", "0\n", ""}}) == 4000000000);
  CHECK(available_host_bytes(kMeminfo, {{"9223372036854771712\n", "4096\n", ""}}) ==
        kAvailable);  // no limit, in old kernels
}

TEST_CASE("a limit that is exceeded leaves nothing to use", "[core]") {
  const auto left = available_host_bytes(kMeminfo, {{"1000\n", "1100\n", ""}});
  REQUIRE(left);
  CHECK(*left <= 0);
}

TEST_CASE("what cannot be read is not guessed", "[core]") {
  CHECK(available_host_bytes("", {{"", "", ""}}) == std::nullopt);
  CHECK(available_host_bytes("MemTotal: 16000000 kB\n", {{"max\n", "5\n", ""}}) == std::nullopt);
  CHECK(available_host_bytes("MemAvailable: much\n", {{"", "7\n", ""}}) == std::nullopt);
  CHECK(available_host_bytes(kMeminfo, {{"1000\n", "", ""}}) == kAvailable);
}

TEST_CASE("the least that a process's cgroup and those above it leave counts", "[core]") {
  const CgroupMemory none{"max\n", "5\n", ""}, job{"1000\n", "300\n", "inactive_file 100\n"},
      slice{"5000\n", "4900\n", ""};
  CHECK(available_host_bytes(kMeminfo, {none, job, none}) == 800);
  CHECK(available_host_bytes(kMeminfo, {none, job, slice, none}) == 100);
  CHECK(available_host_bytes(kMeminfo, {none, {}}) == kAvailable);
  CHECK(available_host_bytes(kMeminfo, {}) == kAvailable);
}

TEST_CASE("a process's cgroup and those above it are looked at", "[core]") {
  using Folders = std::vector<std::string>;
  CHECK(cgroup_folders("1:name=systemd:/x\n0::/job_1/step_2/task\n", "/root") ==
        Folders{"/root/job_1/step_2/task", "/root/job_1/step_2", "/root/job_1", "/root"});
  CHECK(cgroup_folders("0::/\n", "/root") == Folders{"/root"});
  CHECK(cgroup_folders("1:memory:/x\n", "/root") == Folders{});
  CHECK(cgroup_folders("", "/root") == Folders{});
}

TEST_CASE("this machine has memory", "[core]") {
  const auto available = available_host_bytes();
  REQUIRE(available);
  CHECK(*available > 0);
}

TEST_CASE("memory that was in use counts towards the most that was", "[core]") {
  constexpr size_t kBytes = size_t{32} << 20;
  const std::vector<char> in_use(kBytes, 'x');
  CHECK(peak_resident_bytes() > static_cast<int64_t>(kBytes));
  CHECK(in_use[kBytes / 2] == 'x');
}
