#!/usr/bin/env bash
# How much a master of 24 bits costs in loss: scripts/research/loss_gap.sh with optimizer.master=fp24_split beside fp32, both
# with the parka recipe, once for each seed of weights and data order.
#   scripts/research/master_gap.sh OUT TEXT_FOLDER [SEED...]        by default 1 and 2
# OUT/seedN gets what loss_gap.sh writes, OUT/loss_gap.jsonl the gap of each seed. TOKENS, PARKA, PYTHON, MODEL and GPUS are as
# there.
set -euo pipefail
. "$(dirname "$0")/../help.sh"
cd "$(dirname "$0")/../.."
[ $# -ge 2 ] && ! has_option "$@" || { echo "usage: scripts/research/master_gap.sh OUT TEXT_FOLDER [SEED...]" >&2; exit 2; }
. scripts/research/from_caller.sh
out=$(from_caller "$1") text=$(from_caller "$2")
shift 2
[ $# -gt 0 ] || set -- 1 2
for seed; do
  work=$out/seed$seed/work  # of loss_gap.sh
  mkdir -p "$work"
  # All train on the same tokens.
  [ ! -e "$out/tokens" ] || [ -e "$work/tokens" ] || ln -s "$(realpath "$out/tokens")" "$work/tokens"
  keys=parka,precision.group_size=32,training.seed=$seed,data.seed=$seed,optimizer.master
  BASE=fp32.$seed=$keys=fp32 scripts/research/loss_gap.sh "$out/seed$seed" "$text" "fp24_split.$seed=$keys=fp24_split"
  [ -e "$out/tokens" ] || ln -s "$(realpath "$work/tokens")" "$out/tokens"
done
for seed; do cat "$out/seed$seed/loss_gap.jsonl"; done > "$out/loss_gap.jsonl"
