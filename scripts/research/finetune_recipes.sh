#!/usr/bin/env bash
# What FP8 costs in fine-tuning: a model is pretrained in bf16 on a text, and then fine-tuned by each recipe on instructions, which are
# made of the text's own documented Python functions (scripts/research/make_instructions.py). All runs start from the same weights, those of one
# seed see the same batches in the same order. Conversations that are held out from fine-tuning are of functions that the base may
# have read.
#   scripts/research/finetune_recipes.sh OUT TEXT_FOLDER [RUN...]
# A RUN is a recipe, or NAME=RECIPE,KEY=VALUE,... with config keys; by default fp8_linear, coat, and parka as
# scripts/research/one_gpu.sh measures it, beside bf16. From the environment:
#   BASE      a run folder, a checkpoint in one or an imported model, to start from with its model and its tokenizer: nothing is
#             pretrained, TOKENS and VOCABULARY mean nothing, and CONFIG is for what is not of the model (the optimizer, for example)
#   CONFIG    the model (default configs/olmo-150m.json); NAME its name in figures (default that of the file, or of BASE's folder)
#   TOKENS    of pretraining (default 100 million); VOCABULARY at most (default 32768)
#   EPOCHS    of fine-tuning (default 3); SEEDS (default "1 2 3"); RATE, its learning rate (default 2e-4; MODEL's is of pretraining)
#   BATCH     sequences of a step (default 64, for both); LENGTH of a sequence (default 1024)
# and PARKA, PYTHON, MODEL and GPUS as in paired_runs.sh beside this. OUT gets the runs' metrics, losses on held-out conversations
# (scripts/research/held_out.py: held_out.jsonl, held_out.txt, held_out.png), and a plot of the runs. Runs save when they get SIGTERM; the same
# command continues them.
set -euo pipefail
. "$(dirname "$0")/../help.sh"
cd "$(dirname "$0")/../.."
[ $# -ge 2 ] && ! has_option "$@" || { echo "usage: scripts/research/finetune_recipes.sh OUT TEXT_FOLDER [RUN...]" >&2; exit 2; }
. scripts/research/paired_runs.sh
[ $# -gt 0 ] || set -- fp8_linear coat parka=parka,precision.group_size=32
CONFIG=${CONFIG:-configs/olmo-150m.json}
tokens=${TOKENS:-100000000} batch=${BATCH:-64} length=${LENGTH:-1024}
read -ra seeds <<< "${SEEDS:-1 2 3}"
refuse() { echo "finetune_recipes.sh: $*" >&2; exit 2; }
count() { "$python" -c 'import json, sys; print(json.load(open(sys.argv[1]))'"$2"')' "$1"; }

# model_keys RESOLVED_CONFIG: all keys of its model, so that nothing is left of CONFIG's.
model_keys() {
  "$python" -c '
import json, sys
def keys(name, value):
    if not isinstance(value, dict):
        return [name + "=" + json.dumps(value, separators=(",", ":"))]
    return [key for inner in value for key in keys(name + "." + inner, value[inner])]
print(*keys("model", json.load(open(sys.argv[1]))["model"]))' "$1"
}

if [ -n "${BASE:-}" ]; then
  base=$(from_caller "$BASE") run=$base
  [[ $base != *[[:space:]]* ]] || refuse "$base: give BASE a path without spaces"
  [ -e "$base/config.json" ] || [ ! -e "$base/manifest.json" ] || run=$(dirname "$base")  # that a checkpoint lies in
  [ -f "$run/config.json" ] || refuse "$run: has no config.json; give BASE a run folder of parka train, or a checkpoint in one"
  tokenizer=$run/tokenizer/tokenizer.json
  [ -f "$tokenizer" ] || tokenizer=$run/huggingface/tokenizer.json  # of an imported model
  [ -f "$tokenizer" ] || refuse "$run: has no tokenizer/tokenizer.json; put the tokenizer there that BASE was trained with"
  "$PARKA" config show "$run/config.json" > "$work/base.json"  # an imported model's has comments, and not every key
  model=" $(model_keys "$work/base.json")"
  name=${NAME:-$(basename "$run")}
else
  base=$work/base
  name=${NAME:-$(basename "$CONFIG" .json)}
  make_tokenizer "${VOCABULARY:-32768}"
  make_tokens --max-tokens "$tokens" --tokenizer "$tokenizer" --utf8-only
fi
if [ ! -e "$work/chats/data.json" ]; then
  "$python" scripts/research/make_instructions.py "$text" --out "$work/functions.jsonl"
  "$python" scripts/prepare_data.py "$work/functions.jsonl" --chat chatml --tokenizer "$tokenizer" --sequence-length "$length" \
    --eval-fraction 0.05 --out "$work/chats"
fi

if [ -z "${BASE:-}" ]; then
  shared_keys "$length" "$batch" $((tokens / (batch * length)))
  model=" model.vocab_size=$(count "$work/tokens/data.json" '["padded_vocab_size"]')"
  shared+=$model
  train_runs "$CONFIG" base=bf16
else
  model+=" data.token_dtype=$(count "$work/chats/data.json" '["dtype"]')"  # of a vocabulary that CONFIG's may not hold
fi

sequences=$(($(count "$work/chats/data.json" '["train"]["tokens"]') / length))
steps=$((${EPOCHS:-3} * sequences / batch))
[ "$steps" -ge 20 ] || refuse "$sequences sequences of instructions make $steps steps; give more text, or a smaller BATCH"
shared_keys "$length" "$batch" "$steps"
shared+="$model data.train=[\"$work/chats/train-*.npy\"] data.eval=[\"$work/chats/eval-*.npy\"] data.loss_mask=true
  data.documents=separate checkpoint.init_from=$base training.eval_interval=$(((steps + 9) / 10))"
runs=()
for seed in "${seeds[@]}"; do
  for run in bf16 "$@"; do
    values=${run#*=},  # the rate after MODEL's, which is of pretraining, and before the run's own
    runs+=("${run%%=*}.$seed=${values%%,*},optimizer.lr=${RATE:-2e-4},${values#*,}training.seed=$seed,data.seed=$seed")
  done
done
train_runs "$CONFIG" "${runs[@]}"

"$python" scripts/research/held_out.py "${folders[@]}" --model "$name.instructions" --out "$out/held_out.png" --json > "$out/held_out.jsonl"
"$python" scripts/research/held_out.py "${folders[@]}" | tee "$out/held_out.txt"
"$python" scripts/plot.py "$out"/*/metrics.jsonl --out "$out/runs.png"
