#!/usr/bin/env bash
# Formats every C++ and CUDA file that git tracks or would track, by .clang-format.
#   scripts/format.sh           rewrites the files
#   scripts/format.sh --check   changes nothing; lists what differs and exits 1 if anything does
set -euo pipefail
cd "$(dirname "$0")/.."

case "${1:-}" in
  "") mode=(-i) ;;
  --check) mode=(--dry-run --Werror) ;;
  *) echo "usage: scripts/format.sh [--check]" >&2; exit 2 ;;
esac
if ! command -v clang-format >/dev/null; then
  echo "format.sh: clang-format is missing: apt install clang-format" >&2
  exit 2
fi

# `git ls-files` also names files that were deleted but not yet committed.
git ls-files -z --cached --others --exclude-standard -- '*.h' '*.cpp' '*.cu' '*.cuh' |
  while IFS= read -r -d '' file; do if [[ -f "$file" ]]; then printf '%s\0' "$file"; fi; done |
  xargs -0 -r -n 16 -P "$(nproc)" clang-format "${mode[@]}" || exit 1
