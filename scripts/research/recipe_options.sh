# Sourced by the scripts beside it. find_parka sets `parka`, the program: PARKA, or the first of these builds that there is.
find_parka() {
  [ -z "${PARKA:-}" ] || { parka=$PARKA; return; }
  for parka in build/cuda/parka build/release/parka; do
    [ ! -x "$parka" ] || return 0
  done
  echo "${0##*/}: neither build/cuda/parka nor build/release/parka is there: build one (README.md), or set PARKA to the program" >&2
  exit 2
}

# recipe_options RECIPE fills the array `options` with what the scripts set for a recipe.
# Every run has an exact fp32 master in 4 bytes per parameter and gradients in bf16; moments are bf16 (bf16, fp8_linear) or
# expanded FP8 (coat, parka). parka is the lean one: it keeps activations in groups of 32, not 16, and transposes FP8 weights
# where they are read instead of keeping both orders, which all recipes do with divided weights.
recipe_options() {
  local states
  case $1 in
    bf16 | fp8_linear) states=bf16 ;;
    coat | parka) states=fp8_expanded ;;
    *) echo "${0##*/}: no recipe $1" >&2; exit 2 ;;
  esac
  options=(--set precision.recipe="$1" --set optimizer.states=$states --set optimizer.master=fp32
    --set optimizer.gradient=bf16)
  [ "$1" != parka ] || options+=(--set precision.group_size=32 --set precision.weight_copies=rows)
}
