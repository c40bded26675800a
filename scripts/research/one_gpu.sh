#!/usr/bin/env bash
# Speed and memory of whole steps on one GPU, of every recipe in one table: OLMo-1B (16 sequences x 8 accumulation) and
# Llama-2-7B (4 x 8) at context 2048. Cards of one kind differ by several per cent under full load, so what is compared
# must come from one run of this.
#   scripts/research/one_gpu.sh [--no-tune | --tuning FOLDER] [--roofline] OUT [MODEL.RECIPE...]
# By default olmo-1b and llama2-7b, each with bf16, fp8_linear, coat and parka, as recipe_options.sh sets them. Matrix products are
# tuned first, which takes up to two and a half minutes for each; with --no-tune they are not, and with --tuning a run takes
# FOLDER/MODEL.RECIPE.tuning.json if that is there. --roofline measures what every op could reach, too. OUT gets for each run
# the report, the JSON that scripts/research/figures.py reads, and the tuning. PARKA names the program (default build/cuda/parka).
set -euo pipefail
. "$(dirname "$0")/../help.sh"
cd "$(dirname "$0")/../.."
. scripts/research/recipe_options.sh
usage() {
  echo "usage: scripts/research/one_gpu.sh [--no-tune | --tuning FOLDER] [--roofline] OUT [MODEL.RECIPE...]" >&2
  exit 2
}
tune=true tuning= bench=(--steps 5)
while [[ ${1:-} == --* ]]; do
  case $1 in
    --no-tune) tune=false ;;
    --tuning) tune=false tuning=${2:-}; [ -d "$tuning" ] || usage; shift ;;
    --roofline) bench+=(--roofline) ;;
    *) usage ;;
  esac
  shift
done
[ $# -ge 1 ] || usage
. scripts/research/from_caller.sh
out=$(from_caller "$1")
shift
[ $# -gt 0 ] || set -- {olmo-1b,llama2-7b}.{bf16,fp8_linear,coat,parka}
parka=${PARKA:-build/cuda/parka}
mkdir -p "$out"

for run in "$@"; do
  model=${run%.*} recipe=${run##*.}
  case $model in
    olmo-1b) batch=(--set training.micro_batch_size=16 --set training.global_batch_size=128) ;;
    llama2-7b) batch=(--set training.micro_batch_size=4 --set training.global_batch_size=32) ;;
    *) echo "one_gpu.sh: no model $model" >&2; exit 2 ;;
  esac
  # So that the codes of its FP8 head fit into the workspace of blocks.
  [ "$run" != llama2-7b.parka ] || batch+=(--set training.logits_chunk_tokens=2048)
  recipe_options "$recipe"
  set=("${batch[@]}" "${options[@]}" --set device.gemm_tuning=off)
  if $tune; then
    "$parka" tune "configs/$model.json" "${set[@]}" --output "$out/$run.tuning.json" > "$out/$run.tuning.txt"
    set+=(--set "device.gemm_tuning=$out/$run.tuning.json")  # the last of several counts
  elif [ -n "$tuning" ] && [ -e "$tuning/$run.tuning.json" ]; then
    set+=(--set "device.gemm_tuning=$tuning/$run.tuning.json")
  fi
  "$parka" bench "configs/$model.json" "${set[@]}" "${bench[@]}" --json "$out/$run.json" > "$out/$run.txt"
  grep -A9 '^step ' "$out/$run.txt"
done
python3 scripts/research/figures.py show "${@/#/$out/}"
