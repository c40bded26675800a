#!/usr/bin/env bash
# The table of COAT's paper (https://arxiv.org/abs/2410.19313) on end-to-end memory and speed: models of 7, 13 and 30 billion
# parameters on 1 to 8 GPUs, everything divided over them (ZeRO stage 3). For each row the memory at the paper's batch, and
# the largest micro-batch (1, 2, 4, ...) that fits into a limit, with its speed at 8 micro-batches a step.
#   scripts/research/end_to_end.sh [--plan-only|--speed-only] [--memory-limit GB] OUT [MODEL.GPUS...]
# By default all rows: 7b.1 7b.2 7b.4 7b.8 13b.2 13b.4 13b.8 30b.8. Memory is that of `parka plan`; rows for which this machine
# has the GPUs are also run, with each of the two batches, unless --plan-only is given; --speed-only leaves out the paper's. The
# limit is 80 by default. OUT gets plans and measurements as JSON, and the table, end_to_end.md. RECIPES names the recipes
# (default "bf16 fp8_linear coat parka", as recipe_options.sh sets them), PARKA the program (default build/cuda/parka, else build/release/parka).
set -euo pipefail
. "$(dirname "$0")/../help.sh"
cd "$(dirname "$0")/../.."
. scripts/research/recipe_options.sh
usage() {
  echo "usage: scripts/research/end_to_end.sh [--plan-only|--speed-only] [--memory-limit GB] OUT [MODEL.GPUS...]" >&2
  exit 2
}
limit=80
runs_memory=true
gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ' || true)
while [ $# -gt 0 ]; do
  case $1 in
    --plan-only) gpus=0; shift ;;
    --speed-only) runs_memory=false; shift ;;
    --memory-limit) [ $# -ge 2 ] || usage; limit=$2; shift 2 ;;
    -*) usage ;;
    *) break ;;
  esac
done
[ $# -ge 1 ] || usage
. scripts/research/from_caller.sh
out=$(from_caller "$1")
shift
[ $# -gt 0 ] || set -- 7b.{1,2,4,8} 13b.{2,4,8} 30b.8
find_parka
read -ra recipes <<< "${RECIPES:-bf16 fp8_linear coat parka}"
accumulation=8
mkdir -p "$out"

# The options of a row: the models of the paper are OLMo's in their vocabulary and norms.
row_options() {
  case $1 in
    7b.1) model=(configs/olmo-7b.json) batch=1 ;;
    7b.[248]) model=(configs/olmo-7b.json) batch=2 ;;
    13b.[248]) model=(configs/llama2-13b.json) batch=1 ;;
    30b.8) model=(configs/llama-30b.json) batch=1 ;;
    *) echo "end_to_end.sh: no row $1" >&2; exit 2 ;;
  esac
  model+=(--set model.vocab_size=50304 --set model.norm=layernorm --set distributed.zero_stage=3)
  [ "$1" != 13b.2 ] || model+=(--set data.sequence_length=1024)
}

# plan NAME RANKS MICRO_BATCH: writes OUT/NAME.plan.json.
plan() {
  "$parka" plan "${model[@]}" "${options[@]}" --set training.micro_batch_size="$3" \
    --set training.global_batch_size=$(($2 * $3 * accumulation)) --gpus "$2" --memory-limit "$limit" --json > "$out/$1.plan.json"
}

# bench NAME RANKS MICRO_BATCH: writes OUT/NAME.json and NAME.txt.
bench() {
  local start=()
  [ "$2" -eq 1 ] || start=(--ranks "$2")
  "$parka" bench "${start[@]}" "${model[@]}" "${options[@]}" --set training.micro_batch_size="$3" \
    --set training.global_batch_size=$(($2 * $3 * accumulation)) --steps 3 --json "$out/$1.json" > "$out/$1.txt"
}

fits() { grep -q '"fits": true' "$out/$1.plan.json"; }

for row in "$@"; do
  ranks=${row#*.}
  row_options "$row"
  for recipe in "${recipes[@]}"; do
    recipe_options "$recipe"
    name=$row.$recipe
    rm -f "$out/$name".{memory,speed}.{plan.json,json,txt}
    plan "$name.memory" "$ranks" "$batch"
    largest=0
    for ((micro = 1; micro <= 1024; micro *= 2)); do
      plan "$name.try" "$ranks" $micro
      fits "$name.try" || break
      mv "$out/$name.try.plan.json" "$out/$name.speed.plan.json"
      largest=$micro
    done
    rm -f "$out/$name.try.plan.json"
    [ "$gpus" -ge "$ranks" ] || continue
    if [ $largest -gt 0 ]; then bench "$name.speed" "$ranks" $largest; fi
    if [ $largest -eq "$batch" ]; then
      cp "$out/$name.speed.json" "$out/$name.memory.json"
    elif $runs_memory && fits "$name.memory"; then
      bench "$name.memory" "$ranks" "$batch"
    fi
  done
done
python3 scripts/research/paper_tables.py end_to_end "$out" "$@" | tee "$out/end_to_end.md"
