#!/usr/bin/env bash
# How much FP8 costs in loss: the 12 blocks of configs/olmo-150m.json on bytes of text, with bf16 (or the run that BASE names)
# and with FP8 recipes, over the same batches in the same order.
#   scripts/research/loss_gap.sh OUT TEXT_FOLDER [RUN...]
# The text is all source code and documentation in the folder, an installation's Python packages for example. A RUN is a
# recipe, or NAME=RECIPE,KEY=VALUE,... with config keys; by default coat, and parka as scripts/research/one_gpu.sh measures
# it. TOKENS sets how many are trained on (default 300 million), and VOCABULARY has them be ids of a BPE tokenizer, at most so many,
# which is trained on the text. HELD_OUT is the share of the documents that are held out (default 0), and runs end with the loss on them.
# PARKA, PYTHON, MODEL and GPUS are those of paired_runs.sh beside this. A mixture of 32 experts with as many active parameters:
# MODEL="model.d_ffn=512 model.moe.num_experts=32 model.moe.experts_per_token=4 training.balance_loss=0.01".
# OUT gets the runs' metrics, their gaps (loss_gap.jsonl) and plots. Runs save when they get SIGTERM; the same command continues them.
set -euo pipefail
. "$(dirname "$0")/../help.sh"
cd "$(dirname "$0")/../.."
[ $# -ge 2 ] && ! has_option "$@" || { echo "usage: scripts/research/loss_gap.sh OUT TEXT_FOLDER [RUN...]" >&2; exit 2; }
. scripts/research/paired_runs.sh
[ $# -gt 0 ] || set -- coat parka=parka,precision.group_size=32
tokens=${TOKENS:-300000000}
batch=64 length=2048
steps=$((tokens / (batch * length)))
if [ -n "${VOCABULARY:-}" ]; then
  make_bpe_tokens "$VOCABULARY" "$tokens" "${HELD_OUT:-0}"
else
  make_byte_tokens "$tokens" "${HELD_OUT:-0}"
fi
shared_keys $length $batch $steps
shared+=" model.vocab_size=$vocabulary training.micro_batch_size=32"
if [ -e "$work/tokens/eval-00000.npy" ]; then
  shared+=" data.eval=[\"$work/tokens/eval-*.npy\"] training.eval_interval=$steps training.eval_sequences=$held_out_sequences"
fi
train_runs configs/olmo-150m.json "${BASE:-bf16}" "$@"

"$python" scripts/compare.py "${folders[@]}" --json --out "$out/differences.png" | tee "$out/loss_gap.jsonl"
"$python" scripts/plot.py "$out"/*/metrics.jsonl --out "$out/loss_gap.png"
