#!/usr/bin/env bash
# Searches for input that a parser neither accepts nor refuses, with libFuzzer, AddressSanitizer and
# UndefinedBehaviorSanitizer: scripts/fuzz.sh [SECONDS] [TARGET...], for SECONDS each (default 30), all targets of fuzz/
# where none is named. Prints a line for each; exits 1 on a finding. Inputs that caused one are left, with what was
# said of them, in build/fuzz/findings/<target>, and what was reached in build/fuzz/corpus/<target>, from where the next
# run continues. To run one input again: build/fuzz/fuzz/fuzz_<target> FILE
set -euo pipefail
. "$(dirname "$0")/help.sh"
cd "$(dirname "$0")/.."

seconds=30
if [[ "${1:-}" =~ ^[0-9]+$ ]]; then
  seconds=$1
  shift
fi
targets=("$@")
if [[ ${#targets[@]} -eq 0 ]]; then
  for folder in fuzz/seeds/*/; do targets+=("$(basename "$folder")"); done
fi
for target in "${targets[@]}"; do
  if [[ ! -f "fuzz/$target.cpp" || ! -d "fuzz/seeds/$target" ]]; then
    echo "fuzz.sh: no target $target; there are: $(cd fuzz/seeds && echo *)" >&2
    exit 2
  fi
done

advice="apt install clang libclang-rt-14-dev (Debian 12) or clang libclang-rt-18-dev (Ubuntu 24.04)"
command -v clang++ >/dev/null || { echo "fuzz.sh: clang++ is missing: $advice" >&2; exit 2; }
scratch=$(TMPDIR=$([[ -w /dev/shm ]] && echo /dev/shm || echo "${TMPDIR:-/tmp}") mktemp -d)  # for the targets' files
trap 'rm -rf "$scratch"' EXIT
if ! echo 'extern "C" int LLVMFuzzerTestOneInput(const char*, long) { return 0; }' |
    clang++ -x c++ -fsanitize=fuzzer,address,undefined - -o "$scratch/probe" 2>"$scratch/probe.log"; then
  cat "$scratch/probe.log" >&2
  echo "fuzz.sh: clang++ cannot link libFuzzer: $advice" >&2
  exit 2
fi

build=build/fuzz
cmake -S . -B $build -G Ninja -DCMAKE_CXX_COMPILER=clang++ -DCMAKE_BUILD_TYPE=RelWithDebInfo -DPARKA_CUDA=OFF \
  -DPARKA_TESTS=OFF -DPARKA_FUZZ=ON >/dev/null
cmake --build $build --parallel "$(nproc)" --target "${targets[@]/#/fuzz_}"

export UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 ASAN_OPTIONS=detect_leaks=1:detect_stack_use_after_return=0
found=0
for target in "${targets[@]}"; do
  findings=$build/findings/$target corpus=$build/corpus/$target
  mkdir -p "$findings" "$corpus"
  log=$findings/log
  status=0
  # A file of a few KiB has room for all that a parser looks at; an allocation beyond 256 MiB is no file's size.
  TMPDIR=$scratch $build/fuzz/fuzz_"$target" -max_total_time="$seconds" -max_len=16384 -timeout=10 \
    -dict=fuzz/values.dict -rss_limit_mb=2048 -malloc_limit_mb=256 -print_final_stats=1 -artifact_prefix="$findings/" \
    "$corpus" "fuzz/seeds/$target" >"$log" 2>&1 || status=$?
  executions=$(grep -oP 'stat::number_of_executed_units: \K[0-9]+' "$log" || echo 0)
  coverage=$(grep -oP 'cov: \K[0-9]+' "$log" | tail -1 || true)
  inputs=$(find "$findings" -type f ! -name log | wc -l)
  printf '%-20s %9d executions, %5s edges covered, %d findings\n' "$target" "$executions" "${coverage:-0}" "$inputs"
  if [[ $status -ne 0 ]]; then
    found=1
    echo "  exit code $status; see $log" >&2
  fi
done
exit $found
