#!/usr/bin/env bash
# How much FP8 costs in loss in the shape of other families: scripts/research/loss_gap.sh with the norms of Qwen3 (of each
# query and key head) and of OLMo 2 (of all queries and all keys, and with post-norms), and with those of Llama to compare.
#   scripts/research/family_gap.sh OUT TEXT_FOLDER [FAMILY...]      llama, qwen3 and olmo2, by default the last two
# OUT/FAMILY gets what loss_gap.sh writes. RUNS sets the runs beside bf16 (default parka with groups of 32), TOKENS how many are
# trained on (default 150 million); the rest as there.
set -euo pipefail
. "$(dirname "$0")/../help.sh"
cd "$(dirname "$0")/../.."
[ $# -ge 2 ] && ! has_option "$@" || { echo "usage: scripts/research/family_gap.sh OUT TEXT_FOLDER [FAMILY...]" >&2; exit 2; }
. scripts/research/from_caller.sh
out=$(from_caller "$1") text=$(from_caller "$2")
shift 2
[ $# -gt 0 ] || set -- qwen3 olmo2
export TOKENS=${TOKENS:-150000000}
read -ra runs <<< "${RUNS:-parka=parka,precision.group_size=32}"
declare -A model=(
  [llama]="model.norm=rmsnorm model.norm_eps=1e-6 model.rope_theta=500000"
  [qwen3]="model.norm=rmsnorm model.norm_eps=1e-6 model.qk_norm=per_head model.num_kv_heads=4 model.rope_theta=1000000"
  [olmo2]="model.norm=rmsnorm model.norm_eps=1e-6 model.qk_norm=full model.norm_placement=after model.rope_theta=500000"
)
for family; do
  [ -n "${model[$family]:-}" ] || { echo "family_gap.sh: $family is not llama, qwen3 or olmo2" >&2; exit 2; }
  work=$out/$family/work  # of loss_gap.sh
  mkdir -p "$work"
  # All train on the same tokens.
  [ ! -e "$out/tokens" ] || [ -e "$work/tokens" ] || ln -s "$(realpath "$out/tokens")" "$work/tokens"
  MODEL=${model[$family]} scripts/research/loss_gap.sh "$out/$family" "$text" "${runs[@]}"
  [ -e "$out/tokens" ] || ln -s "$(realpath "$work/tokens")" "$out/tokens"
done
