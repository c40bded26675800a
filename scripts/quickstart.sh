#!/usr/bin/env bash
# From a bare machine to a trained model: installs what is missing, builds, makes token files from real text that every
# machine with a compiler has (the system's C headers), trains a small OLMo with the COAT recipe for a few minutes, plots
# the loss and lets the model write some C.
#   scripts/quickstart.sh [--set KEY=VALUE ...]     extra options go to `parka train`
set -euo pipefail
. "$(dirname "$0")/help.sh"
cd "$(dirname "$0")/.."

[[ $# -eq 0 || $1 == --?* ]] || { echo "usage: scripts/quickstart.sh [--set KEY=VALUE ...]" >&2; exit 2; }
scripts/setup.sh
# CUDA is built for the GPUs of this machine alone, which takes a third of the time.
cuda=(-DPARKA_CUDA=OFF)
if capabilities=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | grep -xE '[0-9]+\.[0-9]'); then
  architectures=$(sort -u <<< "$capabilities" | tr -d . | paste -sd ';')
  cuda=(-DPARKA_CUDA=AUTO "-DPARKA_CUDA_ARCHITECTURES=$architectures")
fi
cmake --preset release "${cuda[@]}" >/dev/null
cmake --build --preset release --target parka --parallel "$(nproc)"

if [ ! -f data/quickstart/data.json ]; then
  build/release/parka prepare /usr/include --include '*.h' --tokenizer bytes --eval-fraction 0.05 \
    --max-tokens 12000000 --out data/quickstart
fi
build/release/parka train configs/quickstart.json "$@"
build/release/parka plot runs/quickstart/metrics.jsonl --out runs/quickstart/loss.png
echo
echo "A sample from the model (the first line is the prompt):"
build/release/parka generate runs/quickstart --prompt '/* Copyright (C) ' --tokens 400 --temperature 0.7 --top-k 40
echo
echo "Loss curve: runs/quickstart/loss.png   metrics: runs/quickstart/metrics.jsonl"
