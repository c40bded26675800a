#!/usr/bin/env bash
# How well the ways of fine-tuning learn: a small byte-level model is trained on C headers, then moved to another kind of text,
# Python's standard library, by each method. Minutes for each run on two CPU cores.
#   scripts/research/finetune_methods.sh OUT [METHOD...]
# A METHOD is NAME=KEY=VALUE,KEY=VALUE,... with config keys; by default those of `methods` below. Each seed has a base of its own;
# all methods of a seed see the same batches in the same order. From the environment:
#   SEEDS                   default "1 2 3"
#   BASE_STEPS, STEPS       of 8 sequences of 256 bytes, for the bases and for each method (default 600 and 300)
#   BASE_TEXT, TEXT         folders of *.h and of *.py (default /usr/include, and where PYTHON has its standard library, whose
#                           subfolders are left out)
#   KEYS                    config keys of all runs, "model.d_model=32 model.num_layers=2"
#   PARKA, PYTHON, THREADS  the program (default build/cuda/parka, else build/release/parka), an interpreter with numpy, threads
# OUT gets the runs, a table of held-out losses, finetune_methods.md, and figures, finetune_methods.json. Runs that are finished are not
# trained again; those that were stopped continue.
set -euo pipefail
. "$(dirname "$0")/../help.sh"
cd "$(dirname "$0")/../.."
[ $# -ge 1 ] && ! has_option "$@" || { echo "usage: scripts/research/finetune_methods.sh OUT [METHOD...]" >&2; exit 2; }
. scripts/research/recipe_options.sh
. scripts/research/from_caller.sh
out=$(from_caller "$1")
shift
python=${PYTHON:-python3}
base_steps=${BASE_STEPS:-600} steps=${STEPS:-300}
read -ra seeds <<< "${SEEDS:-1 2 3}"

# The learning rates are the best of those that docs/results/finetuning.md names, for a seed that is not among the three.
qst=finetune.method=qst,finetune.base=nf4,finetune.reduction=4,optimizer.lr=2e-2
methods=(
  full=finetune.method=full,optimizer.lr=4e-3
  lora=finetune.method=lora,finetune.rank=8,optimizer.lr=1e-2
  qlora_nf4=finetune.method=lora,finetune.rank=8,finetune.base=nf4,optimizer.lr=1e-2
  qlora_fp8=finetune.method=lora,finetune.rank=8,finetune.base=fp8,precision.recipe=parka,optimizer.lr=1e-2
)
for downsample in adapter,finetune.rank=8 linear lora,finetune.rank=8 avg_pool max_pool; do
  methods+=("qst_${downsample%%,*}=$qst,finetune.downsample=$downsample")
done
methods+=("qst_paper=$qst,finetune.rank=8,finetune.mix=paper")
[ $# -gt 0 ] || set -- "${methods[@]}"
find_parka
mkdir -p "$out"

# make_text NAME GLOB INPUT...: pieces of files, so that what is held out is like the rest.
make_text() {
  local name=$1 include=$2
  shift 2
  [ -e "$out/$name/data.json" ] || "$python" scripts/prepare_data.py "$@" --include "$include" --tokenizer bytes --split-bytes 4000 \
    --eval-fraction 0.05 --max-tokens 6000000 --out "$out/$name" > "$out/$name.txt"
}

make_text base_text '*.h' "${BASE_TEXT:-/usr/include}"
library=${TEXT:-$("$python" -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')}
make_text text '*.py' "$library"/*.py

# train NAME SEED TEXT STEPS KEY=VALUE...: a run in OUT/NAME.SEED.
train() {
  local name=$1.$2 seed=$2 text=$3 run_steps=$4 key
  shift 4
  local set=(--set "data.train=[\"$out/$text/train-*.npy\"]" --set "data.eval=[\"$out/$text/eval-*.npy\"]")
  for key in precision.recipe=bf16 data.sequence_length=256 training.global_batch_size=8 training.micro_batch_size=8 \
    training.steps="$run_steps" training.eval_interval="$run_steps" training.eval_sequences=256 training.log_interval=100 \
    training.seed="$seed" data.seed="$seed" optimizer.schedule.warmup_steps=$((run_steps / 20)) checkpoint.interval=0 ${KEYS:-} "$@"; do
    set+=(--set "$key")
  done
  "$parka" ${THREADS:+--threads "$THREADS"} train configs/quickstart.json "${set[@]}" --set checkpoint.folder="$out/$name" \
    >> "$out/$name.txt" 2>&1 || { echo "$name: ended with $?: $(tail -n 1 "$out/$name.txt") ($out/$name.txt)" >&2; return 1; }
}

for seed in "${seeds[@]}"; do
  train base "$seed" base_text "$base_steps"
  for method; do
    IFS=, read -ra keys <<< "${method#*=}"
    train "${method%%=*}" "$seed" text "$steps" checkpoint.init_from="$out/base.$seed" optimizer.weight_decay=0 "${keys[@]}"
  done
done
"$python" scripts/research/finetune_table.py "$out" --seeds "${seeds[@]}" --methods "${@%%=*}" \
  --json "$out/finetune_methods.json" | tee "$out/finetune_methods.md"
