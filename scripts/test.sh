#!/usr/bin/env bash
# Builds Parka and runs its tests on this machine. With a GPU the GPU tests run too; without one they say that they are
# skipped.
#   scripts/test.sh [--quick] [PRESET] [FOLDER...]
#   scripts/test.sh                       everything but tests/research, built with the preset release
#   scripts/test.sh asan                  everything with another preset: release, dev, cuda, asan or tsan
#   scripts/test.sh --quick               what takes less than a minute on two cores, once built
#   scripts/test.sh kernels model         the tests of these folders of tests/
#   scripts/test.sh research              those of scripts/research, which measure and compare; minutes
set -euo pipefail
. "$(dirname "$0")/help.sh"
cd "$(dirname "$0")/.."

fail() { echo "test.sh: $*" >&2; exit 2; }
preset=release choice=()
if [ "${1:-}" = --quick ]; then
  choice+=(--label-regex '^quick$')
  shift
fi
case "${1:-}" in
  release | dev | cuda | asan | tsan) preset=$1; shift ;;
esac
targets=()
for folder; do
  [ -d "tests/$folder" ] || fail "$folder is neither a preset (release, dev, cuda, asan, tsan) nor a folder of tests/"
  case "$folder" in
    core | kernels | data | model | optim | engine | fuzz) targets+=("test_$folder") ;;  # one program has all their tests
    *) targets+=(all) ;;
  esac
done
if [ $# -gt 0 ]; then
  choice+=(--tests-regex "^($(IFS='|' && echo "$*")): ")
  targets=(--target parka "${targets[@]}")  # many tests run it
fi
[[ " $* " = *" research "* ]] || choice+=(--label-exclude '^research$')

scripts/setup.sh
cmake --preset "$preset" >/dev/null
cmake --build --preset "$preset" --parallel "$(nproc)" "${targets[@]}"
# Reports of a sanitizer fail the test that caused them.
export UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
export ASAN_OPTIONS=detect_leaks=1 TSAN_OPTIONS=halt_on_error=1
# Two more at a time than cores: those of several ranks often wait for processes to start and to end.
ctest --test-dir "build/$preset" --output-on-failure --no-tests=error --parallel $(($(nproc) + 2)) "${choice[@]}"
