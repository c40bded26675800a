#!/usr/bin/env bash
# A model that learns to see, and what FP8 costs it: pictures of shapes and digits are drawn, a tiny tower and decoder learn captions
# of them, then answers to questions, with each recipe. Minutes for each run on two CPU cores.
#   scripts/research/vision.sh OUT [RECIPE...]        by default bf16, which the others are compared with, coat and parka
# From the environment:
#   SEEDS                   default "1 2 3"
#   PICTURES, HELD_OUT      how many are drawn (default 6000 and 1000)
#   STEPS1, STEPS2          of the two stages (default 1000 and 300)
#   PARKA, PYTHON, THREADS  the program (default build/cuda/parka, else build/release/parka), an interpreter with numpy, pillow,
#                           xxhash, transformers and matplotlib, threads
# OUT gets pictures, token files, the runs RECIPE.SEED.STAGE, a table, vision.md, figures, vision.json, and pictures with the answers
# of the first run, vision.png. Runs that are finished are not trained again; those that were stopped continue.
set -euo pipefail
. "$(dirname "$0")/../help.sh"
cd "$(dirname "$0")/../.."
[ $# -ge 1 ] && ! has_option "$@" || { echo "usage: scripts/research/vision.sh OUT [RECIPE...]" >&2; exit 2; }
. scripts/research/recipe_options.sh
. scripts/research/from_caller.sh
out=$(from_caller "$1")
shift
[ $# -gt 0 ] || set -- bf16 coat parka
python=${PYTHON:-python3}
steps1=${STEPS1:-1000} steps2=${STEPS2:-300}
read -ra seeds <<< "${SEEDS:-1 2 3}"
find_parka
mkdir -p "$out"

[ -e "$out/choices.json" ] ||
  "$python" scripts/research/draw_pictures.py "$out" --pictures "${PICTURES:-6000}" --held-out "${HELD_OUT:-1000}"

# make_tokens KIND TEMPLATE: of the pictures to train on, and of those held out.
make_tokens() {
  local split
  for split in train held_out; do
    [ -e "$out/tokens/$1.$split/data.json" ] || "$python" scripts/prepare_images.py "$out/$1.$split.json" --image-folder "$out/pictures" \
      --tower siglip --image-size 32 --patch-size 8 --chat "$2" --sequence-length 192 --max-images 4 --out "$out/tokens/$1.$split" \
      > "$out/$1.$split.txt"
  done
}

make_tokens captions plain
make_tokens questions vicuna_v1
[ -e "$out/choices/questions.json" ] ||
  "$python" scripts/research/answer_choices.py make "$out" "$out/tokens/questions.held_out" "$out/choices"

# train RECIPE SEED STAGE KIND STEPS KEY=VALUE...: a run in OUT/RECIPE.SEED.STAGE.
train() {
  local recipe=$1 seed=$2 name=$1.$2.$3 kind=$4 steps=$5 key
  shift 5
  local set=(--set "data.train=[\"$out/tokens/$kind.train/train-00000.npy\"]"
    --set "data.eval=[\"$out/tokens/$kind.held_out/train-00000.npy\"]")
  for key in precision.recipe="$recipe" training.steps="$steps" training.seed="$seed" data.seed="$seed" \
    optimizer.schedule.warmup_steps=$((steps / 30)) "$@"; do
    set+=(--set "$key")
  done
  "$parka" ${THREADS:+--threads "$THREADS"} train configs/tiny-llava.json "${set[@]}" --set checkpoint.folder="$out/$name" \
    >> "$out/$name.txt" 2>&1 || { echo "$name: ended with $?: $(tail -n 1 "$out/$name.txt") ($out/$name.txt)" >&2; return 1; }
}

for seed in "${seeds[@]}"; do
  for recipe; do
    train "$recipe" "$seed" captions captions "$steps1"
    # The tower has learned to see; it is trained on 10 times slower.
    train "$recipe" "$seed" answers questions "$steps2" checkpoint.init_from="$out/$recipe.$seed.captions" \
      data.images_per_sequence=3 optimizer.lr=1e-3 'optimizer.lr_patterns=["vision.*"]' 'optimizer.lr_factors=[0.1]'
    [ -e "$out/$recipe.$seed.json" ] ||
      "$python" scripts/research/answer_choices.py score "$parka" "$out/$recipe.$seed.answers" "$out/choices" \
        --json "$out/$recipe.$seed.json" > "$out/$recipe.$seed.txt"
  done
done
"$python" scripts/research/vision_table.py "$out" --seeds "${seeds[@]}" --recipes "$@" --json "$out/vision.json" | tee "$out/vision.md"
