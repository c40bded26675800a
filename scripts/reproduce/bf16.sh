#!/usr/bin/env bash
# The bf16 figures of docs/results/gpu_bf16.md: for OLMo-1B (16 sequences x 8 accumulation) and Llama-2-7B (4 x 8) at
# context 2048, times steps with cuBLASLt's own choice of algorithms, tunes them, and times steps and every op again.
# Cards of one kind differ by several per cent under full load, so what is compared must come from one run of this.
#   scripts/reproduce/bf16.sh OUT [MODEL...]     MODEL: olmo-1b llama2-7b
# PARKA names the program (default build/cuda/parka). scripts/figures.py turns the files into lines of figures.jsonl.
set -euo pipefail
cd "$(dirname "$0")/../.."
[ $# -ge 1 ] || { echo "usage: scripts/reproduce/bf16.sh OUT [olmo-1b] [llama2-7b]" >&2; exit 2; }
out=$1
shift
[ $# -gt 0 ] || set -- olmo-1b llama2-7b
parka=${PARKA:-build/cuda/parka}
mkdir -p "$out"

for model in "$@"; do
  case $model in
    olmo-1b) batch=(--set training.micro_batch_size=16 --set training.global_batch_size=128) ;;
    llama2-7b) batch=(--set training.micro_batch_size=4 --set training.global_batch_size=32) ;;
    *) echo "bf16.sh: no model $model" >&2; exit 2 ;;
  esac
  # An exact fp32 master in 4 bytes, moments and gradients in bf16.
  set=("${batch[@]}" --set optimizer.master=fp32_split --set optimizer.states=bf16 --set optimizer.gradient=bf16)
  "$parka" bench "configs/$model.json" "${set[@]}" --steps 3 > "$out/$model.untuned.txt"
  grep -A9 '^step ' "$out/$model.untuned.txt"
  "$parka" tune "configs/$model.json" "${set[@]}" --output "$out/$model.tuning.json" | tee "$out/$model.tuning.txt"
  "$parka" bench "configs/$model.json" "${set[@]}" --set device.gemm_tuning="$out/$model.tuning.json" \
    --steps 5 --roofline --json "$out/$model.bf16.json" | tee "$out/$model.bf16.txt"
done
