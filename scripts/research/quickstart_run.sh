# Sourced, from the project's folder and with their arguments OUT [TEXT_FOLDER], by the scripts beside it that measure what the
# quickstart's model makes of real text. Sets out, build, python (BUILD, PYTHON) and work, a folder that goes when the script ends.
. scripts/research/from_caller.sh
out=$(from_caller "$1") text=$(from_caller "${2:-/usr/include}")
build=${BUILD:-build/release}
python=${PYTHON:-python3}
mkdir -p "$out"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# train_quickstart STEPS TOTAL [KEY=VALUE...]: $work/run is the model after STEPS of TOTAL steps on the bytes of all C headers in
# the text's folder, trained on the CPU in bf16 with fp32 moments. $out gets its metrics.
train_quickstart() {
  local steps=$1 total=$2 set=() value
  shift 2
  for value in precision.recipe=bf16 optimizer.states=fp32 device.kind=cpu data.eval=[] training.eval_interval=0 \
    checkpoint.interval=0 "data.train=[\"$work/data/train-00000.npy\"]" checkpoint.folder="$work/run" training.steps="$steps" \
    optimizer.schedule.total_steps="$total" "$@"; do
    set+=(--set "$value")
  done
  "$python" scripts/prepare_data.py "$text" --include '*.h' --tokenizer bytes --eval-fraction 0.05 --max-tokens 12000000 \
    --out "$work/data"
  "$build/parka" train configs/quickstart.json "${set[@]}"
  cp "$work/run/metrics.jsonl" "$out/"
}
