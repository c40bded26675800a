#!/usr/bin/env bash
# How many tokens Muon saves: AdamW and Muon at three learning rates each, same batches, each run's schedule to its end, on tokens of
# a BPE tokenizer that is trained on the text. Then the best rate of each with the other seeds, Muon's on fewer tokens too, and with
# its momentum in FP8.
#   scripts/research/tokens_saved.sh OUT TEXT_FOLDER
# From the environment:
#   CONFIG    the model (default configs/olmo-150m.json); NAME its name in figures (default that of the file)
#   ADAMW_LRS, MUON_LRS  (default "1e-3 2e-3 4e-3" and "4e-3 8e-3 16e-3"); the best should lie inside
#   SHARES    of the tokens, on which Muon trains with the first seed (default "0.6 0.8")
#   TOKENS    trained on in each run (default 300 million); SEEDS (default "1 2")
#   BATCH     sequences of a step (default 64); LENGTH of a sequence (default 2048); VOCABULARY at most (default 32768)
#   HELD_OUT  share of the documents that are held out (default 0.02)
# and PARKA, PYTHON, MODEL and GPUS as in paired_runs.sh beside this. AdamW's eps is 1e-8. OUT gets the runs' metrics and
# tokens_saved.jsonl. Runs save when they get SIGTERM; the same command continues them.
set -euo pipefail
. "$(dirname "$0")/../help.sh"
cd "$(dirname "$0")/../.."
[ $# -eq 2 ] && ! has_option "$@" || { echo "usage: scripts/research/tokens_saved.sh OUT TEXT_FOLDER" >&2; exit 2; }
. scripts/research/paired_runs.sh
CONFIG=${CONFIG:-configs/olmo-150m.json}
tokens=${TOKENS:-300000000} batch=${BATCH:-64} length=${LENGTH:-2048}
read -ra seeds <<< "${SEEDS:-1 2}"
steps=$((tokens / (batch * length)))
make_bpe_tokens "${VOCABULARY:-32768}" "$tokens" "${HELD_OUT:-0.02}"
shared_keys "$length" "$batch" "$steps"
shared+=" model.vocab_size=$vocabulary optimizer.eps=1e-8 data.eval=[\"$work/tokens/eval-*.npy\"] training.eval_interval=$steps
  training.eval_sequences=$held_out_sequences"

# run_of KIND LR SEED [KEYS]: a RUN named KIND_LR.SEED.
run_of() { echo "$1_$2.$3=bf16,optimizer.kind=${1%%_*},optimizer.lr=$2,training.seed=$3,data.seed=$3${4:-}"; }
saved() { "$python" scripts/research/tokens_saved.py "$out" --model "${NAME:-$(basename "$CONFIG" .json)}" --tokens "$tokens" "$@"; }

runs=()
for lr in ${ADAMW_LRS:-1e-3 2e-3 4e-3}; do runs+=("$(run_of adamw "$lr" "${seeds[0]}")"); done
for lr in ${MUON_LRS:-4e-3 8e-3 16e-3}; do runs+=("$(run_of muon "$lr" "${seeds[0]}")"); done
train_runs "$CONFIG" "${runs[@]}"

adamw=$(saved --best adamw) muon=$(saved --best muon) runs=()
for seed in "${seeds[@]}"; do
  [ "$seed" = "${seeds[0]}" ] || runs+=("$(run_of adamw "$adamw" "$seed")" "$(run_of muon "$muon" "$seed")")
  runs+=("$(run_of muon_fp8 "$muon" "$seed" ,optimizer.states=fp8)")
done
for share in ${SHARES:-0.6 0.8}; do
  fewer=$("$python" -c 'import sys; print(round(int(sys.argv[1]) * float(sys.argv[2])))' "$steps" "$share")
  keys=$(length_keys "$fewer")
  runs+=("$(run_of "muon_share$share" "$muon" "${seeds[0]}" ",${keys// /,},training.eval_interval=$fewer")")
done
train_runs "$CONFIG" "${runs[@]}"
saved --json > "$out/tokens_saved.jsonl"
saved
