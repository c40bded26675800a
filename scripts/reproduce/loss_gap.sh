#!/usr/bin/env bash
# How much FP8 costs in loss: the 12 blocks of configs/olmo-150m.json on bytes of text, with bf16 and with FP8 recipes, over
# the same batches in the same order.
#   scripts/reproduce/loss_gap.sh OUT TEXT_FOLDER [RECIPE...]
# The text is all source code and documentation in the folder, an installation's Python packages for example. By default
# coat and parka beside bf16. TOKENS sets how many are trained on (default 300 million), PARKA the program (default
# build/cuda/parka), PYTHON the interpreter with numpy. OUT gets the runs' metrics, their gaps (loss_gap.jsonl) and a plot.
set -euo pipefail
cd "$(dirname "$0")/../.."
[ $# -ge 2 ] || { echo "usage: scripts/reproduce/loss_gap.sh OUT TEXT_FOLDER [RECIPE...]" >&2; exit 2; }
out=$1 text=$2
shift 2
[ $# -gt 0 ] || set -- coat parka
parka=${PARKA:-build/cuda/parka}
python=${PYTHON:-python3}
tokens=${TOKENS:-300000000}
batch=64 length=2048
steps=$((tokens / (batch * length)))
mkdir -p "$out"
data=$(mktemp -d)
trap 'rm -rf "$data"' EXIT
"$python" scripts/prepare_data.py "$text" --out "$data/tokens" --max-tokens $tokens --include '*.py' --include '*.pyi' \
  --include '*.h' --include '*.hpp' --include '*.c' --include '*.cpp' --include '*.cu*' --include '*.txt' \
  --include '*.md' --include '*.rst'

compared=()
for recipe in bf16 "$@"; do
  folder=$data/$recipe
  "$parka" train configs/olmo-150m.json --set model.vocab_size=272 --set precision.recipe=$recipe \
    --set "data.train=[\"$data/tokens/train-00000.npy\"]" --set "data.eval=[]" --set training.steps=$steps \
    --set training.global_batch_size=$batch --set training.micro_batch_size=32 --set training.log_interval=100 \
    --set optimizer.schedule.total_steps=$steps --set optimizer.schedule.warmup_steps=$((steps / 10)) \
    --set optimizer.lr=1e-3 --set checkpoint.folder="$folder" --set checkpoint.interval=0 > "$out/$recipe.txt"
  mkdir -p "$out/$recipe"
  cp "$folder/metrics.jsonl" "$out/$recipe/"
  compared+=("$recipe=$out/$recipe/metrics.jsonl")
done
"$python" scripts/loss_gap.py "${compared[@]}" | tee "$out/loss_gap.jsonl"
"$python" scripts/plot.py "$out"/*/metrics.jsonl --out "$out/loss_gap.png"
