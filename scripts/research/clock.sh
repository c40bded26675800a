#!/usr/bin/env bash
# Which model is best after the same time on the same GPU: a dense one or a mixture of as many active parameters, with AdamW and
# Muon each. A short run of each finds its speed, and with it the steps that fit into the time. Learning rates are swept in a share
# of the time; the best of each kind trains for all of it, with each seed. Schedules go to their end, on tokens of a BPE tokenizer
# that is trained on the text.
#   scripts/research/clock.sh OUT TEXT_FOLDER
# From the environment:
#   CONFIG    the dense model (default configs/olmo-150m.json); NAME its name in figures (default 110m)
#   MIXTURE   keys that make a mixture of it
#   LIMIT     seconds of a run (default 600); SHARE of them for the sweep (default 0.3)
#   ADAMW_LRS, MUON_LRS  (default "1e-3 2e-3 4e-3" and "4e-3 8e-3 16e-3"); the best should lie inside
#   TOKENS    prepared (default 400 million); a run that needs more reads them again
#   SEEDS     (default "1 2"); KINDS (default "dense_adamw dense_muon mixture_adamw mixture_muon")
#   BATCH, LENGTH, VOCABULARY, HELD_OUT  as in tokens_saved.sh beside this
# and PARKA, PYTHON, MODEL and GPUS as in paired_runs.sh. All runs have the recipe parka. OUT gets the runs' metrics and clock.jsonl.
# Runs save when they get SIGTERM; the same command continues them.
set -euo pipefail
. "$(dirname "$0")/../help.sh"
cd "$(dirname "$0")/../.."
[ $# -eq 2 ] && ! has_option "$@" || { echo "usage: scripts/research/clock.sh OUT TEXT_FOLDER" >&2; exit 2; }
. scripts/research/paired_runs.sh
CONFIG=${CONFIG:-configs/olmo-150m.json}
MIXTURE=${MIXTURE:-model.d_ffn=512 model.moe.num_experts=32 model.moe.experts_per_token=4 training.balance_loss=0.01}
MODEL="model.norm=rmsnorm $MODEL"
batch=${BATCH:-64} length=${LENGTH:-2048} share=${SHARE:-0.3} limit=${LIMIT:-600} trial=60
read -ra seeds <<< "${SEEDS:-1 2}"
read -ra kinds <<< "${KINDS:-dense_adamw dense_muon mixture_adamw mixture_muon}"
make_bpe_tokens "${VOCABULARY:-32768}" "${TOKENS:-400000000}" "${HELD_OUT:-0.02}"
shared_keys "$length" "$batch" "$trial"
shared+=" model.vocab_size=$vocabulary optimizer.eps=1e-8 precision.group_size=32 data.eval=[\"$work/tokens/eval-*.npy\"]
  training.eval_sequences=$held_out_sequences"
clock() { "$python" scripts/research/clock.py "$out" --model "${NAME:-110m}" --limit "$limit" --share "$share" "$@"; }

# run_of KIND LR SEED STEPS NAME: a RUN.
run_of() {
  local keys
  keys=$(length_keys "$4")
  [[ $1 != mixture_* ]] || keys+=" $MIXTURE"
  echo "$5=parka,optimizer.kind=${1#*_},optimizer.lr=$2,training.seed=$3,data.seed=$3,training.eval_interval=$4,${keys// /,}"
}
rates_of() { if [[ $1 = *_adamw ]]; then echo "${ADAMW_LRS:-1e-3 2e-3 4e-3}"; else echo "${MUON_LRS:-4e-3 8e-3 16e-3}"; fi; }

runs=()
for kind in "${kinds[@]}"; do runs+=("$(run_of "$kind" 1e-3 1 "$trial" "trial.$kind")"); done
train_runs "$CONFIG" "${runs[@]}"

runs=()
for kind in "${kinds[@]}"; do
  steps=$(clock --steps "$kind" --of "$share")
  for lr in $(rates_of "$kind"); do runs+=("$(run_of "$kind" "$lr" "${seeds[0]}" "$steps" "sweep.${kind}_$lr.${seeds[0]}")"); done
done
train_runs "$CONFIG" "${runs[@]}"

runs=()
for kind in "${kinds[@]}"; do
  steps=$(clock --steps "$kind") lr=$(clock --best "$kind")
  for seed in "${seeds[@]}"; do runs+=("$(run_of "$kind" "$lr" "$seed" "$steps" "${kind}_$lr.$seed")"); done
done
train_runs "$CONFIG" "${runs[@]}"
clock --json > "$out/clock.jsonl"
clock
