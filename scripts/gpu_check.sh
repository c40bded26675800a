#!/usr/bin/env bash
# Everything that needs a GPU, on any machine that has one: builds, runs the whole test suite (whose GPU tests are
# skipped elsewhere) and a short benchmark. Takes a few minutes.
#   scripts/gpu_check.sh                builds here and runs
#   scripts/gpu_check.sh --sanitize     also runs the op tests under compute-sanitizer (memcheck and racecheck), several
#                                       at once on all GPUs
# PARKA_BUILD names a build folder that is there already, to run without building; COMPUTE_SANITIZER the tool to use. The
# version of CUDA 13.0 (2025.3) reports false hazards of mbarriers and warpgroups; 13.5.25 does not:
# `pip install nvidia-cuda-sanitizer-api` has it, in site-packages/nvidia/cu13/compute-sanitizer.
set -euo pipefail
. "$(dirname "$0")/help.sh"
cd "$(dirname "$0")/.."

sanitize=false
case "${1:-}" in
  "") ;;
  --sanitize) sanitize=true ;;
  *) echo "usage: scripts/gpu_check.sh [--sanitize]" >&2; exit 2 ;;
esac

command -v nvidia-smi >/dev/null && nvidia-smi -L | grep -q '^GPU 0' || {
  echo "gpu_check.sh: nvidia-smi lists no GPU" >&2
  exit 2
}
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader

build=${PARKA_BUILD:-}
if [ -z "$build" ]; then
  build=build/cuda
  scripts/setup.sh
  line_info=OFF
  ! $sanitize || line_info=ON
  cmake --preset cuda -DPARKA_CUDA_LINE_INFO=$line_info >/dev/null
  cmake --build --preset cuda --parallel "$(nproc)"
fi

# Each GPU has a share of the tests, because most use the first GPU that they see. A ctest of its own for each, in a folder of
# its own for what it writes.
IFS=, read -ra gpus <<< "${CUDA_VISIBLE_DEVICES:-$(seq -s, 0 $(($(nvidia-smi -L | grep -c '^GPU ') - 1)))}"
shares=$(mktemp -d)
trap 'rm -rf "$shares"' EXIT
test_share() {  # NUMBER from 0
  local own_first=("${gpus[@]:$1}" "${gpus[@]:0:$1}") folder=$shares/$1
  mkdir "$folder"
  echo "subdirs(\"$(realpath "$build")\")" > "$folder/CTestTestfile.cmake"
  CUDA_VISIBLE_DEVICES=$(IFS=, && echo "${own_first[*]}") ctest --test-dir "$folder" --output-on-failure --no-tests=error \
    --label-exclude "^research$" --tests-information "$(($1 + 1)),,${#gpus[@]}" --parallel $((($(nproc) + ${#gpus[@]} - 1) / ${#gpus[@]})) \
    > "$folder/log" 2>&1
}
running=() passed=true
for ((share = 0; share < ${#gpus[@]}; ++share)); do
  test_share $share &
  running+=($!)
done
for ((share = 0; share < ${#gpus[@]}; ++share)); do
  wait "${running[$share]}" || passed=false
  cat "$shares/$share/log"
done
$passed || { echo "gpu_check.sh: tests failed"; exit 1; }

# One test under the tool, on one of the GPUs: TEST_NAME.
check_one() {
  local log gpus
  log=$(mktemp)
  read -ra gpus <<< "$GPUS"
  CUDA_VISIBLE_DEVICES=${gpus[SLOT % ${#gpus[@]}]} "$SANITIZER" --tool "$TOOL" --error-exitcode 1 "$TEST_KERNELS" "$1" \
    > "$log" 2>&1 || { cat "$log"; echo "compute-sanitizer $TOOL: $1: FAILED"; exit 255; }  # 255: xargs starts no more
  rm "$log"
}
if $sanitize; then
  export -f check_one
  export TOOL SANITIZER=${COMPUTE_SANITIZER:-compute-sanitizer} TEST_KERNELS=$build/tests/test_kernels
  export GPUS="${gpus[*]}"
  list=(--list-tests --verbosity quiet)
  ! "$TEST_KERNELS" --help | grep -q list-test-names-only || list=(--list-test-names-only)  # Catch2 v2
  for TOOL in memcheck racecheck; do
    tests="[devices]"
    [ $TOOL = memcheck ] || tests+="~[large]"  # racecheck takes long enough without
    names=$("$TEST_KERNELS" "$tests" "${list[@]}" || true)  # v2 exits with their number
    echo "== compute-sanitizer $TOOL, $(wc -l <<< "$names") tests"
    sed -e '/^ *$/d' -e 's/^ *//' -e 's/[][,]/\\&/g' <<< "$names" |  # commas and brackets would be syntax
      xargs -d '\n' -n 1 -P $((12 * ${#gpus[@]})) --process-slot-var=SLOT bash -euc 'check_one "$0"'
  done
fi

echo "== benchmark"
"$build/parka" bench configs/olmo-150m.json --steps 5 --set training.global_batch_size=64 --set training.micro_batch_size=16
