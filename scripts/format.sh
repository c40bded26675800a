#!/usr/bin/env bash
# Formats every C++ and CUDA file that git tracks or would track, by .clang-format.
#   scripts/format.sh           rewrites the files
#   scripts/format.sh --check   changes nothing; lists what differs and exits 1 if anything does
set -euo pipefail
. "$(dirname "$0")/help.sh"
cd "$(dirname "$0")/.."

case "${1:-}" in
  "") mode=(-i) ;;
  --check) mode=(--dry-run --Werror) ;;
  *) echo "usage: scripts/format.sh [--check]" >&2; exit 2 ;;
esac
# Formatting depends on the version, so it is the one of requirements-dev.txt, not the system's.
formatter=.venv/bin/clang-format
if [ ! -x "$formatter" ]; then
  scripts/setup.sh
  .venv/bin/python -m pip install --quiet --disable-pip-version-check -r scripts/requirements-dev.txt
fi

# `git ls-files` also names files that were deleted but not yet committed.
git ls-files -z --cached --others --exclude-standard -- '*.h' '*.cpp' '*.cu' '*.cuh' |
  while IFS= read -r -d '' file; do if [[ -f "$file" ]]; then printf '%s\0' "$file"; fi; done |
  xargs -0 -r -n 16 -P "$(nproc)" "$formatter" "${mode[@]}" || exit 1
