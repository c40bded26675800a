#!/usr/bin/env bash
# Runs clang-tidy, by .clang-tidy, over the sources of src/ that a build folder compiles. Exits 1 on any finding.
#   scripts/lint.sh                            all of src/, with build/release: a folder at a time, as it is compiled
#   scripts/lint.sh build/dev [part of a path] each file on its own; with a part, as src/core/, those files alone
set -euo pipefail
. "$(dirname "$0")/help.sh"
cd "$(dirname "$0")/.."
! has_option "$@" || { echo "usage: scripts/lint.sh [BUILD_FOLDER [PART_OF_A_PATH]]" >&2; exit 2; }
build=${1:-build/release}
part=${2:-}

command -v clang-tidy >/dev/null || { echo "lint.sh: clang-tidy is missing: apt install clang-tidy" >&2; exit 2; }
if [[ ! -f "$build/compile_commands.json" ]]; then
  echo "lint.sh: no compile_commands.json in $build: configure it first, cmake --preset ${build#build/}" >&2
  exit 2
fi

# A copy of the compile commands without the options that only GCC knows, and without its precompiled headers.
commands=$(mktemp -d)
trap 'rm -rf "$commands"' EXIT
sed -E 's/ -m(move|store)-max=[0-9]+//g; s/ -Winvalid-pch//g; s/ -include [^ ]*cmake_pch\.hxx//g' "$build/compile_commands.json" > "$commands/compile_commands.json"

mapfile -t files < <(grep -oE '"file": "[^"]+"' "$commands/compile_commands.json" | cut -d'"' -f4 | sort -u |
  grep -E "^$PWD/(src/.*\.cpp|$build/CMakeFiles/parka.*/Unity/.*\.cxx)$" | grep -F -- "$part")
if [[ ${#files[@]} -eq 0 ]]; then
  echo "lint.sh: $build compiles no source in $PWD/src/ whose path contains '$part'" >&2
  exit 2
fi

# Left to itself the static analyzer spends three quarters of the time inside the standard library's templates.
analyzer=(-Xclang -analyzer-config -Xclang c++-stdlib-inlining=false,c++-template-inlining=false)
printf '%s\0' "${files[@]}" |
  xargs -0 -n 1 -P "$(nproc)" clang-tidy -p "$commands" --quiet "${analyzer[@]/#/--extra-arg=}" \
    2> >(grep -vE '^[0-9]+ warnings? generated\.$' >&2) || exit 1
echo "lint.sh: ${#files[@]} files, no findings"
