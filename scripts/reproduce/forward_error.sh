#!/usr/bin/env bash
# How far FP8 takes the residual stream from that of bf16, block by block, as in figure 4a of COAT's paper
# (https://arxiv.org/abs/2410.19313): trains the quickstart model with 16 blocks on the CPU in bf16, then runs a batch of its
# training data with several ways of scaling. Minutes on two cores.
#   scripts/reproduce/forward_error.sh OUT [TEXT_FOLDER]
# The text is all C headers in the folder (default /usr/include). STEPS sets how many of 400 steps are trained (default 200),
# BUILD the build folder (default build/release), PYTHON the interpreter with numpy. OUT gets the run's metrics and the table,
# forward_error.md.
set -euo pipefail
. "$(dirname "$0")/../help.sh"
cd "$(dirname "$0")/../.."
[ $# -ge 1 ] && [ $# -le 2 ] && ! has_option "$@" || { echo "usage: scripts/reproduce/forward_error.sh OUT [TEXT_FOLDER]" >&2; exit 2; }
. scripts/reproduce/from_caller.sh
out=$(from_caller "$1") text=$(from_caller "${2:-/usr/include}")
build=${BUILD:-build/release}
python=${PYTHON:-python3}
mkdir -p "$out"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$python" scripts/prepare_data.py "$text" --include '*.h' --tokenizer bytes --eval-fraction 0.05 --max-tokens 12000000 \
  --out "$work/data"
"$build/parka" train configs/quickstart.json --set model.num_layers=16 --set precision.recipe=bf16 --set optimizer.states=fp32 \
  --set device.kind=cpu --set "data.train=[\"$work/data/train-00000.npy\"]" --set "data.eval=[]" --set training.eval_interval=0 \
  --set training.steps="${STEPS:-200}" --set optimizer.schedule.total_steps=400 --set checkpoint.folder="$work/run" \
  --set checkpoint.interval=0
cp "$work/run/metrics.jsonl" "$out/"
"$build/bench/forward_error" "$work/run" | tee "$out/forward_error.md"
