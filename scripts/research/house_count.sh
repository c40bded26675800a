#!/usr/bin/env bash
# Counts what the project carries: lines of src, config keys, words of pages and bytes of the tree, at commits beside each other.
#   scripts/research/house_count.sh [COMMIT...]        by default c8da6a23, before much was left out, and HEAD
set -euo pipefail
. "$(dirname "$0")/../help.sh"
cd "$(dirname "$0")/../.."
! has_option "$@" || { echo "usage: scripts/research/house_count.sh [COMMIT...]" >&2; exit 2; }
[ $# -gt 0 ] || set -- c8da6a23 HEAD

texts() { git archive "$1" -- "${@:2}" | tar -xO; }  # of the files that a commit has there

printf '%-10s %9s %6s %6s %11s %7s %11s\n' commit 'src lines' files keys 'docs words' README bytes
for commit; do
  printf '%-10s %9s %6s %6s %11s %7s %11s\n' "$(git rev-parse --short "$commit")" \
    "$(texts "$commit" src | wc -l)" "$(git ls-tree -r --name-only "$commit" src | wc -l)" \
    "$(texts "$commit" docs/config.md | grep -o '^| `[a-z_]*\.[^`]*' | sort -u | wc -l)" \
    "$(texts "$commit" ':(glob)docs/**/*.md' | wc -w)" "$(texts "$commit" README.md | wc -w)" \
    "$(git ls-tree -r -l "$commit" | awk '{ bytes += $4 } END { print bytes }')"
done
