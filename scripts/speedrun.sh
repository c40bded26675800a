#!/usr/bin/env bash
# From data to a score: FineWeb-Edu, a tokenizer, a config, training in FP8, held-out loss, HellaSwag and ARC.
#   scripts/speedrun.sh --model 150m --tokens 3e9 --gpu h100                       downloads 27 GB of FineWeb-Edu first
#   scripts/speedrun.sh --model 1b --tokens 20e9 --gpu h200 --optimizer muon
#   scripts/speedrun.sh --model moe --tokens 3e9 --gpu h200 --gpus 2
#   scripts/speedrun.sh --model 150m --tokens 5e7 --gpu h100 --text FOLDER         own text, nothing is downloaded
# --text FOLDER takes files of plain text, and scores are of questions made of what is held out of it. --vocab N (default 32768),
# --recipe NAME (default parka), --out FOLDER (default speedrun), --config FILE (may be repeated: over the config that is written).
# What is there is not made again, so the same command continues. docs/speedrun.md says what comes out.
set -euo pipefail
. "$(dirname "$0")/help.sh"
cd "$(dirname "$0")/.."

model=150m tokens=3e9 gpu=h100 gpus=1 optimizer=adamw recipe=parka vocab=32768 text="" out=speedrun configs=()
while [ $# -gt 0 ]; do
  [ $# -gt 1 ] || { echo "speedrun.sh: $1: has no value; see scripts/speedrun.sh --help" >&2; exit 2; }
  case "$1" in
    --model) model=$2 ;; --tokens) tokens=$2 ;; --gpu) gpu=$2 ;; --gpus) gpus=$2 ;; --optimizer) optimizer=$2 ;;
    --recipe) recipe=$2 ;; --vocab) vocab=$2 ;; --text) text=$2 ;; --out) out=$2 ;; --config) configs+=("$2") ;;
    *) echo "speedrun.sh: $1: no such option; see scripts/speedrun.sh --help" >&2; exit 2 ;;
  esac
  shift 2
done
[ -z "$text" ] || [ -d "$text" ] || { echo "speedrun.sh: --text $text: no such folder" >&2; exit 2; }

parka=${PARKA:-}
for build in build/cuda build/release; do [ -n "$parka" ] || [ ! -x $build/parka ] || parka=$build/parka; done
[ -n "$parka" ] || { echo "speedrun.sh: no parka in build/; build it (docs/install.md), or name it in PARKA" >&2; exit 2; }
python=${PARKA_PYTHON:-.venv/bin/python} hf=.venv/bin/hf
mkdir -p "$out"
say() { echo "== $*"; }

if [ -n "$text" ]; then
  source=("$text") fraction=0.05
else
  source=("$out/raw/sample/10BT" --include '*.parquet' --jsonl-field text) fraction=0.001
  say "FineWeb-Edu, sample of 10 billion tokens"
  $hf download HuggingFaceFW/fineweb-edu --repo-type dataset --include 'sample/10BT/*' --local-dir "$out/raw"
fi
say "tokenizer of $vocab ids"
[ -f "$out/tokenizer.json" ] || "$parka" tokenizer "${source[@]}" --vocab-size "$vocab" --out "$out/tokenizer.json"
say "token files"
[ -f "$out/data/data.json" ] ||
  "$parka" prepare "${source[@]}" --tokenizer "$out/tokenizer.json" --workers "$(nproc)" --eval-fraction "$fraction" --out "$out/data"

say "tasks"
task() { [ -f "$out/$1.requests.jsonl" ] || "$parka" prepare-eval --task "$2" --name "$1" --tokenizer "$out/tokenizer.json" "$3" --out "$out/$1.requests.jsonl"; }
fetch() { # a data set's validation split, as JSON Lines: NAME REPOSITORY FILE
  [ -f "$out/$1.jsonl" ] && return
  $hf download "$2" "$3" --repo-type dataset --local-dir "$out/raw-$1"
  $python -c 'import json, sys, pyarrow.parquet as p; [print(json.dumps(row)) for row in p.read_table(sys.argv[1]).to_pylist()]' "$out/raw-$1/$3" > "$out/$1.jsonl.part"
  mv "$out/$1.jsonl.part" "$out/$1.jsonl"
}
if [ -n "$text" ]; then
  [ -f "$out/lines.jsonl" ] || $python scripts/research/make_questions.py "$text" --kind lines --eval-fraction "$fraction" --out "$out/lines.jsonl"
  task lines text_choice "$out/lines.jsonl"
else
  fetch hellaswag Rowan/hellaswag data/validation-00000-of-00001.parquet
  fetch arc_easy allenai/ai2_arc ARC-Easy/validation-00000-of-00001.parquet
  fetch arc_challenge allenai/ai2_arc ARC-Challenge/validation-00000-of-00001.parquet
  for name in hellaswag arc_easy arc_challenge; do task "$name" "$name" "$out/$name.jsonl"; done
fi

name=$(basename "$model" .json)-$optimizer-$recipe
say "config $out/$name.json"
[ -f "$out/$name.json" ] || "$parka" config new --model "$model" --tokens "$tokens" --gpu "$gpu" --gpus "$gpus" --optimizer "$optimizer" \
  --recipe "$recipe" --data "$out/data" --out "$out/$name.json"
say "training"
run=$out/runs/$name
ranks=()
[ "$gpus" = 1 ] || ranks=(--gpus "$gpus")
"$parka" train "$out/$name.json" "${configs[@]}" --checkpoint.folder="$run" "${ranks[@]}"
say "scores"
"$parka" eval "$run"
"$parka" eval "$run" --tasks "$out"/*.requests.jsonl
"$parka" plot "$run" --out "$run/curves.png"
say "curves: $run/curves.png; next: $parka export $run --out $run-hf"
