#!/usr/bin/env bash
# The table of COAT's paper (https://arxiv.org/abs/2410.19313) on one transformer block: time of forward and backward, and the
# memory that is kept between them, at two widths and two contexts.
#   scripts/research/per_layer.sh [--plan-only] OUT [WIDTH.CONTEXT...]
# By default 2048.2048 2048.4096 4096.2048 4096.4096. Times are those of a block in `parka bench` of 8 blocks at the paper's
# batch of 4; memory is that of `parka plan` at a batch of 8, which is what the paper's own figures are of. --plan-only, and a
# machine without a GPU, leave out the times. OUT gets plans and measurements as JSON, and the table, per_layer.md. RECIPES names
# the recipes (default "bf16 fp8_linear coat parka", as recipe_options.sh sets them), PARKA the program (default
# build/cuda/parka, else build/release/parka).
set -euo pipefail
. "$(dirname "$0")/../help.sh"
cd "$(dirname "$0")/../.."
. scripts/research/recipe_options.sh
usage() { echo "usage: scripts/research/per_layer.sh [--plan-only] OUT [WIDTH.CONTEXT...]" >&2; exit 2; }
gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ' || true)
[ "${1:-}" != --plan-only ] || { gpus=0; shift; }
[ $# -ge 1 ] || usage
[[ $1 != -* ]] || usage
. scripts/research/from_caller.sh
out=$(from_caller "$1")
shift
[ $# -gt 0 ] || set -- {2048,4096}.{2048,4096}
find_parka
read -ra recipes <<< "${RECIPES:-bf16 fp8_linear coat parka}"
mkdir -p "$out"

for case in "$@"; do
  width=${case%.*}
  case $case in
    2048.2048 | 2048.4096) model=(--set model.num_heads=16 --set model.d_ffn=5504) ;;
    4096.2048 | 4096.4096) model=(--set model.num_heads=32 --set model.d_ffn=11008) ;;
    *) echo "per_layer.sh: no case $case" >&2; exit 2 ;;
  esac
  model+=(--set model.d_model="$width" --set model.num_layers=8 --set data.sequence_length="${case#*.}")
  for recipe in "${recipes[@]}"; do
    recipe_options "$recipe"
    name=$case.$recipe
    rm -f "$out/$name".{plan.json,json,txt}
    "$parka" plan configs/olmo-7b.json "${model[@]}" "${options[@]}" --set training.micro_batch_size=8 --json \
      > "$out/$name.plan.json"
    [ "$gpus" -ge 1 ] || continue
    "$parka" bench configs/olmo-7b.json "${model[@]}" "${options[@]}" --set training.micro_batch_size=4 \
      --set training.global_batch_size=32 --steps 5 --json "$out/$name.json" > "$out/$name.txt"
  done
done
python3 scripts/research/paper_tables.py per_layer "$out" "$@" | tee "$out/per_layer.md"
