#!/usr/bin/env bash
# How much FP8 costs in loss: the 12 blocks of configs/olmo-150m.json on bytes of text, with bf16 (or the run that BASE names)
# and with FP8 recipes, over the same batches in the same order.
#   scripts/reproduce/loss_gap.sh OUT TEXT_FOLDER [RUN...]
# The text is all source code and documentation in the folder, an installation's Python packages for example. A RUN is a
# recipe, or NAME=RECIPE,KEY=VALUE,... with config keys; by default coat, and parka as scripts/reproduce/one_gpu.sh measures
# it. TOKENS sets how many are trained on (default 300 million), PARKA the program (default build/cuda/parka), PYTHON the
# interpreter with numpy and matplotlib, MODEL what to change in the model for all runs ("model.norm=rmsnorm model.qk_norm=full"),
# GPUS the GPUs to use ("0 1 2 3"; default 0), one run on each at a time. OUT gets the runs' metrics, their gaps
# (loss_gap.jsonl) and plots. Runs save when they get SIGTERM; the same command continues them.
set -euo pipefail
cd "$(dirname "$0")/../.."
[ $# -ge 2 ] || { echo "usage: scripts/reproduce/loss_gap.sh OUT TEXT_FOLDER [RUN...]" >&2; exit 2; }
out=$1 text=$2
shift 2
[ $# -gt 0 ] || set -- coat parka=parka,precision.group_size=32
set -- "${BASE:-bf16}" "$@"
PARKA=${PARKA:-build/cuda/parka}
python=${PYTHON:-python3}
GPUS=${GPUS:-0}
MODEL=${MODEL:-}
tokens=${TOKENS:-300000000}
batch=64 length=2048
steps=$((tokens / (batch * length)))
work=$out/work
mkdir -p "$work"
[ -e "$work/tokens/train-00000.npy" ] ||
  "$python" scripts/prepare_data.py "$text" --out "$work/tokens" --max-tokens $tokens --include '*.py' --include '*.pyi' \
    --include '*.h' --include '*.hpp' --include '*.c' --include '*.cpp' --include '*.cu*' --include '*.txt' \
    --include '*.md' --include '*.rst'

train() {  # NAME=RECIPE,KEY=VALUE,... or a recipe; SLOT is which of the GPUs
  local name=${1%%=*} values=${1#*=} gpus
  read -ra gpus <<< "$GPUS"
  local set=(--set "precision.recipe=${values%%,*}") change
  for change in $MODEL; do set+=(--set "$change"); done
  while [[ $values == *,* ]]; do
    values=${values#*,}
    set+=(--set "${values%%,*}")
  done
  CUDA_VISIBLE_DEVICES=${gpus[$SLOT]} "$PARKA" train configs/olmo-150m.json --set model.vocab_size=272 "${set[@]}" \
    --set "data.train=[\"$work/tokens/train-00000.npy\"]" --set "data.eval=[]" --set training.eval_interval=0 --set training.steps=$steps \
    --set training.global_batch_size=$batch --set training.micro_batch_size=32 --set training.log_interval=100 \
    --set optimizer.schedule.total_steps=$steps --set optimizer.schedule.warmup_steps=$((steps / 10)) \
    --set optimizer.lr=1e-3 --set checkpoint.folder="$work/$name" --set checkpoint.interval=0 >> "$out/$name.txt" 2>&1
}
export -f train
export PARKA GPUS MODEL work out steps batch
printf '%s\0' "$@" | xargs -0 -n 1 -P "$(wc -w <<< "$GPUS")" --process-slot-var=SLOT bash -euc 'train "$0"'

compared=()
for run in "$@"; do
  name=${run%%=*}
  mkdir -p "$out/$name"
  cp "$work/$name/metrics.jsonl" "$out/$name/"
  compared+=("$name=$out/$name")
done
"$python" scripts/compare.py "${compared[@]}" --json --out "$out/differences.png" | tee "$out/loss_gap.jsonl"
"$python" scripts/plot.py "$out"/*/metrics.jsonl --out "$out/loss_gap.png"
