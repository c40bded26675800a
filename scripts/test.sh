#!/usr/bin/env bash
# Builds Parka and runs its whole test suite on this machine: scripts/test.sh [preset], preset release (default), asan
# or tsan. With a GPU the GPU tests run too; without one they say that they are skipped.
set -euo pipefail
cd "$(dirname "$0")/.."
preset=${1:-release}

scripts/setup.sh
cmake --preset "$preset" >/dev/null
cmake --build --preset "$preset" --parallel "$(nproc)"
# Reports of a sanitizer fail the test that caused them.
export UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
export ASAN_OPTIONS=detect_leaks=1 TSAN_OPTIONS=halt_on_error=1
ctest --test-dir "build/$preset" --output-on-failure --no-tests=error --parallel "$(nproc)"
