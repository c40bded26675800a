#!/usr/bin/env bash
# What a change of numerics costs in loss, without the chance that separates runs early: while the loss falls fast, runs whose
# rounding differs part by more than most changes cost, and keep that distance to the end. So runs continue from one saved state.
#   scripts/research/fork_gap.sh OUT TEXT_FOLDER RUN RUN...
# For each seed the first RUN trains to step AT; then it and all others continue from a copy of that, to the end of the schedule,
# over the same batches. RUNs, the text and the model are those of loss_gap.sh beside this; where a RUN has other formats of
# optimizer states or master weights than the first, they are converted. From the environment:
#   AT      step from which runs continue (default 800)
#   VOCABULARY  of a BPE tokenizer, as in equal_loss.sh (default: bytes)
#   HELD_OUT  share of the documents that are held out (default 0): runs are compared by the loss on them, too, in the numerics of
#             training and with linear layers in bf16
#   TOKENS  of a whole run (default 300 million); SEEDS (default "1 2")
#   BATCH   sequences of a step (default 64); LENGTH of a sequence (default 2048)
# and PARKA, PYTHON, MODEL and GPUS as in paired_runs.sh. OUT gets the runs' metrics, fork_gap.jsonl, a line for each run and seed
# with its mean difference to the first over the last quarter, and with HELD_OUT those on held-out text, and fork_gap.txt, their
# means. The same command continues runs that were stopped.
set -euo pipefail
. "$(dirname "$0")/../help.sh"
cd "$(dirname "$0")/../.."
[ $# -ge 4 ] && ! has_option "$@" || { echo "usage: scripts/research/fork_gap.sh OUT TEXT_FOLDER RUN RUN..." >&2; exit 2; }
. scripts/research/paired_runs.sh
tokens=${TOKENS:-300000000} at=${AT:-800}
batch=${BATCH:-64} length=${LENGTH:-2048}
steps=$((tokens / (batch * length)))
[[ $at =~ ^[1-9][0-9]*$ && $at -lt $steps ]] ||
  { echo "fork_gap.sh: AT=$at is no step before the last of $steps; change AT or TOKENS" >&2; exit 2; }
read -ra seeds <<< "${SEEDS:-1 2}"
held_out=${HELD_OUT:-0}  # of all documents
if [ -n "${VOCABULARY:-}" ]; then
  make_bpe_tokens "$VOCABULARY" "$tokens" "$held_out"
else
  make_byte_tokens "$tokens" "$held_out"
fi
[ "$held_out" = 0 ] || [ -e "$work/tokens/eval-00000.npy" ] ||
  { echo "fork_gap.sh: nothing was held out when $work/tokens was made; give another OUT, or leave out HELD_OUT" >&2; exit 2; }
shared_keys "$length" "$batch" "$steps"
shared+=" model.vocab_size=$vocabulary training.micro_batch_size=32"

of_seed() { echo "training.seed=$1,data.seed=$1"; }
forked="$work/forked_at.txt"
[ ! -e "$forked" ] || [ "$(cat "$forked")" = "$at of $steps" ] ||
  { echo "fork_gap.sh: runs in $out go on from step $(cat "$forked"), not $at of $steps; give another OUT" >&2; exit 2; }
echo "$at of $steps" > "$forked"
stems=()
for seed in "${seeds[@]}"; do
  stems+=("stem.$seed=${1#*=},$(of_seed "$seed"),training.steps=$at")
done
train_runs configs/olmo-150m.json "${stems[@]}"
runs=()
for seed in "${seeds[@]}"; do
  for run; do
    name=${run%%=*}.$seed
    runs+=("$name=${run#*=},$(of_seed "$seed")")
    [ ! -e "$work/$name" ] || continue
    rm -rf "$work/$name.copy"
    cp -r "$work/stem.$seed" "$work/$name.copy"
    mv "$work/$name.copy" "$work/$name"
  done
done
train_options=--convert-states
train_runs configs/olmo-150m.json "${runs[@]}"

compared=()
if [ "$held_out" != 0 ]; then
  evaluate_runs "${folders[@]}"
  compared+=(--held-out)
fi
: > "$work/fork_gap.jsonl"
for seed in "${seeds[@]}"; do
  of_this=()
  for run; do of_this+=("$out/${run%%=*}.$seed"); done
  "$python" scripts/compare.py "${of_this[@]}" --last 0.25 --json >> "$work/fork_gap.jsonl"
done
"$python" scripts/research/fork_table.py "$work/fork_gap.jsonl" "$out" "${compared[@]}" | tee "$out/fork_gap.txt"
