#!/usr/bin/env bash
# What 8-bit formats cost real moments and real activations: trains the quickstart model on the CPU in bf16 with fp32 moments
# up to the middle of its schedule, then prints the tables of docs/results/paper.md that are of it. Minutes on two
# cores.
#   scripts/research/moment_error.sh OUT [TEXT_FOLDER]
# The text is all C headers in the folder (default /usr/include). STEPS sets how many of the 800 steps are trained (default
# 400), BUILD the build folder (default build/release), PYTHON the interpreter with numpy. OUT gets the run's metrics and the
# tables, moment_error.md, activation_error.md and coat_rules.md.
set -euo pipefail
. "$(dirname "$0")/../help.sh"
cd "$(dirname "$0")/../.."
[ $# -ge 1 ] && [ $# -le 2 ] && ! has_option "$@" || { echo "usage: scripts/research/moment_error.sh OUT [TEXT_FOLDER]" >&2; exit 2; }
. scripts/research/quickstart_run.sh
train_quickstart "${STEPS:-400}" 800
"$build/bench/moment_error" "$work/run" | tee "$out/moment_error.md"
echo
"$build/bench/activation_error" "$work/run" | tee "$out/activation_error.md"
echo
"$build/bench/coat_rules" "$work/run" | tee "$out/coat_rules.md"
