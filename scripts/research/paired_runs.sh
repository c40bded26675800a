# Sourced by the scripts beside it that train runs of one model over the same batches in the same order.
# A RUN is a recipe, or NAME=RECIPE,KEY=VALUE,... with config keys. The environment sets PARKA, the program (default
# build/cuda/parka), PYTHON, the interpreter with numpy and matplotlib, MODEL, keys to change in all runs
# ("model.norm=rmsnorm model.qk_norm=full"), and GPUS ("0 1 2 3"; default 0), one run on each at a time; "0,1 2,3" are two
# runs at a time with two ranks each. OUT gets the output of each run, RUN.txt, and OUT/work what they need.
# Paths are relative to where the script was called, not to the project, to which it has gone. PARKA and CONFIG may be the
# project's, too.
. scripts/research/from_caller.sh
out=$(from_caller "$1") text=$(from_caller "$2")
shift 2
[[ $out != *[[:space:]]* ]] || { echo "$(basename "$0"): $out: give OUT a path without spaces" >&2; exit 2; }
for name in PARKA CONFIG; do
  [[ -z ${!name:-} || ! -f $(from_caller "${!name}") ]] || printf -v "$name" %s "$(from_caller "${!name}")"
done
PARKA=${PARKA:-build/cuda/parka}
python=${PYTHON:-python3}
GPUS=${GPUS:-0}
MODEL=${MODEL:-}
train_options=  # of parka train, one word or none
held_out_sequences=1024  # at most, of an evaluation
work=$out/work
mkdir -p "$work"
text_files=(--include '*.py' --include '*.pyi' --include '*.h' --include '*.hpp' --include '*.c' --include '*.cpp'
  --include '*.cu*' --include '*.txt' --include '*.md' --include '*.rst')

# make_tokenizer IDS: `tokenizer`, a BPE tokenizer trained on the text.
make_tokenizer() {
  tokenizer=$work/tokenizer/tokenizer.json
  [ ! -e "$tokenizer" ] || return 0
  "$python" scripts/train_tokenizer.py "$text" --vocab-size "$1" --out "$tokenizer" "${text_files[@]}"
}

# make_tokens [OPTION...]: of the text, with options of prepare_data.py.
make_tokens() {
  [ -e "$work/tokens/train-00000.npy" ] || "$python" scripts/prepare_data.py "$text" --out "$work/tokens" "$@" "${text_files[@]}"
}

# check_share SHARE: refuses what is not above 0 and below 1.
check_share() {
  [[ $1 =~ ^0?\.0*[1-9][0-9]*$ ]] || { echo "$(basename "$0"): HELD_OUT=$1 is no share of the documents; give one as 0.02" >&2; exit 2; }
}

# make_bpe_tokens IDS TOKENS HELD_OUT: of the text, with a BPE tokenizer of up to IDS ids that is trained on it: TOKENS, or all
# where that share of the documents, other than 0, is held out. `vocabulary` gets the model's, and `epochs` how often TOKENS are
# read them all.
make_bpe_tokens() {
  [ "$3" = 0 ] || check_share "$3"
  make_tokenizer "$1"
  local wanted=(--max-tokens "$2")
  [ "$3" = 0 ] || wanted=(--eval-fraction "$3")
  make_tokens "${wanted[@]}" --tokenizer "$tokenizer" --utf8-only
  read -r vocabulary epochs < <("$python" -c '
import json, sys
data = json.load(open(sys.argv[1]))
print(data["padded_vocab_size"], round(int(sys.argv[2]) / data["train"]["tokens"], 1))' "$work/tokens/data.json" "$2")
}

# make_byte_tokens TOKENS HELD_OUT: of the text, each byte one, and `vocabulary`. TOKENS are about those to train on: prepare_data.py
# counts those of the documents that are held out, that share of all, too.
make_byte_tokens() {
  vocabulary=272
  if [ "$2" = 0 ]; then
    make_tokens --max-tokens "$1"
    return
  fi
  check_share "$2"
  local all
  all=$("$python" -c 'import sys; print(round(int(sys.argv[1]) / (1 - float(sys.argv[2]))))' "$1" "$2")
  make_tokens --max-tokens "$all" --eval-fraction "$2"
}

# shared_keys LENGTH BATCH STEPS: what all runs have; the config has the rest.
shared_keys() {
  shared="data.eval=[] data.sequence_length=$1 training.eval_interval=0 training.global_batch_size=$2 training.log_interval=100
    optimizer.lr=1e-3 checkpoint.interval=0 $(length_keys "$3")"
}

# length_keys STEPS: of a run with a schedule as long.
length_keys() {
  echo "training.steps=$1 optimizer.schedule.total_steps=$1 optimizer.schedule.warmup_steps=$(($1 / 10))"
}

train() {  # a RUN; SLOT is which of the GPUs. A key that comes later wins.
  local name=${1%%=*} values=${1#*=} gpus ranks=() change
  read -ra gpus <<< "$GPUS"
  local set=(--set "data.train=[\"$work/tokens/train-*.npy\"]")
  for change in $shared $MODEL precision.recipe="${values%%,*}"; do set+=(--set "$change"); done
  while [[ $values == *,* ]]; do
    values=${values#*,}
    set+=(--set "${values%%,*}")
  done
  local commas=${gpus[$SLOT]//[!,]/}
  [ -z "$commas" ] || ranks=(--ranks $((${#commas} + 1)))
  CUDA_VISIBLE_DEVICES=${gpus[$SLOT]} "$PARKA" train "$config" $train_options "${ranks[@]}" "${set[@]}" \
    --set checkpoint.folder="$work/$name" >> "$out/$name.txt" 2>&1 ||
    { echo "$name: ended with $?: $(tail -n 1 "$out/$name.txt") ($out/$name.txt)" >&2; return 1; }
}

# Ends with code $1 when the runs have: each has its copy of descriptor 9, and with it the lock.
end_after_runs() {
  exec 9>&-
  flock "$work/lock" true
  exit "$1"
}

# train_runs CONFIG RUN...: trains them to the end, those that were stopped from where they were. `folders` gets the folders in
# OUT that have their configs and metrics. On SIGTERM or SIGINT to the process group runs save; the script waits for them.
train_runs() {
  config=$1
  shift
  export -f train
  export PARKA GPUS MODEL work out config shared train_options
  exec 9> "$work/lock"
  flock --shared 9
  trap 'end_after_runs 143' TERM
  trap 'end_after_runs 130' INT
  printf '%s\0' "$@" | xargs -0 -n 1 -P "$(wc -w <<< "$GPUS")" --process-slot-var=SLOT bash -euc 'train "$0"'
  trap - TERM INT
  exec 9>&-
  local run
  folders=()
  for run; do
    mkdir -p "$out/${run%%=*}"
    cp "$work/${run%%=*}"/{config.json,metrics.jsonl} "$out/${run%%=*}/"
    folders+=("$out/${run%%=*}")
  done
}

# evaluate NAME [OPTION...]: prints what parka eval finds of that run, on the first of the GPUs.
evaluate() {
  local gpu
  read -r gpu _ <<< "${GPUS//,/ }"
  CUDA_VISIBLE_DEVICES=$gpu "$PARKA" eval "$work/$1" --json "${@:2}"
}

# evaluate_runs FOLDER...: of `folders`. Each gets held_out.json, unless it has that of its newest checkpoint: what parka eval
# finds on the tokens that are held out, in the numerics of training ("same") and with linear layers in bf16 ("bf16"), as an
# export in bf16 is used. Runs of fp32, which have no such layers, have the first alone.
evaluate_runs() {
  local folder newest results options=(--data "$work/tokens/eval-*.npy" --max-sequences "$held_out_sequences")
  for folder; do
    newest=$(printf '%s\n' "$work/${folder##*/}"/step_* | tail -n 1)
    ! grep -qsF "/${newest##*/}\"" "$folder/held_out.json" || continue
    results="\"same\": $(evaluate "${folder##*/}" "${options[@]}" --set precision.eval=same)"
    grep -qs '"compute": "fp32"' "$folder/config.json" ||
      results+=", \"bf16\": $(evaluate "${folder##*/}" "${options[@]}" --set precision.eval=bf16)"
    echo "{$results}" > "$folder/held_out.json.partial"
    mv "$folder/held_out.json.partial" "$folder/held_out.json"
  done
}
