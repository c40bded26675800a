#!/usr/bin/env bash
# What FP8 costs at equal loss: runs of bf16 and of FP8 recipes with several seeds, each seed over the same batches in the same
# order, on tokens of a BPE tokenizer that is trained on the text, so that losses are per token.
#   scripts/research/equal_loss.sh OUT TEXT_FOLDER [RUN...]
# The text is all source code and documentation in the folder. A RUN is a recipe, or NAME=RECIPE,KEY=VALUE,... with config keys; by
# default coat, and parka as scripts/research/one_gpu.sh measures it. How far another rounding alone moves a run shows bf16 with
# other micro-batches: bf16_again=bf16,training.micro_batch_size=64. One more run of bf16 with the first seed has half of the steps:
# it shows how the loss falls with more tokens (scripts/research/equal_loss.py has the formulas). From the environment:
#   CONFIG    the model (default configs/olmo-150m.json); NAME its name in figures (default that of the file)
#   TOKENS    trained on in each run (default 300 million); SEEDS (default "1 2 3")
#   BATCH     sequences of a step (default 64); LENGTH of a sequence (default 2048); VOCABULARY at most (default 32768)
#   HELD_OUT  share of the documents that are held out (default 0): runs end with the loss on them, are compared by it in the numerics
#             of training and with linear layers in bf16 (held_out.json of each), and answer questions made of them
#             (scripts/research/make_questions.py), which gives OUT/tasks.jsonl and tasks.txt
#   SPEEDUPS  raw speed-ups over bf16, "coat=1.3 parka=1.4" (default: those of the runs)
# and PARKA, PYTHON, MODEL and GPUS as in paired_runs.sh beside this; MODEL may also change the learning rate (1e-3) or the
# micro-batch. OUT gets the runs' metrics, equal_loss.jsonl, equal_loss.txt and plots. Runs save when they get SIGTERM; the same
# command continues them.
set -euo pipefail
. "$(dirname "$0")/../help.sh"
cd "$(dirname "$0")/../.."
[ $# -ge 2 ] && ! has_option "$@" || { echo "usage: scripts/research/equal_loss.sh OUT TEXT_FOLDER [RUN...]" >&2; exit 2; }
. scripts/research/paired_runs.sh
[ $# -gt 0 ] || set -- coat parka=parka,precision.group_size=32
CONFIG=${CONFIG:-configs/olmo-150m.json}
tokens=${TOKENS:-300000000} batch=${BATCH:-64} length=${LENGTH:-2048}
read -ra seeds <<< "${SEEDS:-1 2 3}"
steps=$((tokens / (batch * length)))

held_out=${HELD_OUT:-0}  # of all documents
make_bpe_tokens "${VOCABULARY:-32768}" "$tokens" "$held_out"
case $epochs in
  0.* | 1.0) ;;
  *) echo "equal_loss.sh: the text is read $epochs times; give more text, or lower TOKENS" >&2 ;;
esac

shared_keys "$length" "$batch" "$steps"
shared+=" model.vocab_size=$vocabulary"
if [ "$held_out" != 0 ]; then
  shared+=" data.eval=[\"$work/tokens/eval-*.npy\"] training.eval_interval=$steps training.eval_sequences=$held_out_sequences"
fi
runs=()
for seed in "${seeds[@]}"; do
  of_seed="training.seed=$seed,data.seed=$seed"
  for run in bf16 "$@"; do runs+=("${run%%=*}.$seed=${run#*=},$of_seed"); done
done
half=$(length_keys $((steps / 2)))
runs+=("bf16_half.${seeds[0]}=bf16,training.seed=${seeds[0]},data.seed=${seeds[0]},${half// /,}")
train_runs "$CONFIG" "${runs[@]}"

whole=("${folders[@]:0:${#folders[@]}-1}")
compared=("${whole[@]}" --shorter "${folders[-1]}" --model "${NAME:-$(basename "$CONFIG" .json)}")
for speedup in ${SPEEDUPS:-}; do compared+=(--speedup "$speedup"); done
if [ "$held_out" != 0 ]; then
  evaluate_runs "${folders[@]}"
  compared+=(--held-out)
fi
"$python" scripts/research/equal_loss.py "${compared[@]}" --json --out "$out/equal_loss.png" > "$out/equal_loss.jsonl"
"$python" scripts/research/equal_loss.py "${compared[@]}" | tee "$out/equal_loss.txt"
if [ "$held_out" != 0 ]; then
  answers=()
  for kind in lines identifiers; do
    requests=$work/$kind.requests.jsonl
    [ ! -e "$requests" ] || continue
    "$python" scripts/research/make_questions.py "$text" --kind $kind --eval-fraction "$held_out" --out "$work/$kind.jsonl" "${text_files[@]}"
    "$python" scripts/prepare_eval.py --task text_choice --name $kind --tokenizer "$tokenizer" "$work/$kind.jsonl" --out "$requests"
  done
  for folder in "${whole[@]}"; do
    name=${folder##*/}
    if [ ! -e "$folder/predictions.jsonl" ]; then
      evaluate "$name" --tasks "$work"/{lines,identifiers}.requests.jsonl --predictions "$folder/predictions.jsonl" > "$folder/tasks.json"
    fi
    answers+=("$name=$folder/predictions.jsonl")
  done
  "$python" scripts/task_scores.py "${answers[@]}" --model "${NAME:-$(basename "$CONFIG" .json)}" --json > "$out/tasks.jsonl"
  "$python" scripts/task_scores.py "${answers[@]}" | tee "$out/tasks.txt"
fi
"$python" scripts/plot.py "$out"/*/metrics.jsonl --out "$out/runs.png"
