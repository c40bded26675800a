#!/usr/bin/env bash
# How far FP8 takes the residual stream from that of bf16, block by block, as in figure 4a of COAT's paper
# (https://arxiv.org/abs/2410.19313): trains the quickstart model with 16 blocks on the CPU in bf16, then runs a batch of its
# training data with several ways of scaling. Minutes on two cores.
#   scripts/research/forward_error.sh OUT [TEXT_FOLDER]
# The text is all C headers in the folder (default /usr/include). STEPS sets how many of 400 steps are trained (default 200),
# BUILD the build folder (default build/release), PYTHON the interpreter with numpy. OUT gets the run's metrics and the table,
# forward_error.md.
set -euo pipefail
. "$(dirname "$0")/../help.sh"
cd "$(dirname "$0")/../.."
[ $# -ge 1 ] && [ $# -le 2 ] && ! has_option "$@" || { echo "usage: scripts/research/forward_error.sh OUT [TEXT_FOLDER]" >&2; exit 2; }
. scripts/research/quickstart_run.sh
train_quickstart "${STEPS:-200}" 400 model.num_layers=16
"$build/bench/forward_error" "$work/run" | tee "$out/forward_error.md"
