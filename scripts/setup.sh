#!/usr/bin/env bash
# Installs what Parka needs on Debian 12 or Ubuntu 24.04: compiler and libraries from the system's packages, and a
# Python environment in .venv for the scripts (data preparation, plots, following runs). Safe to run again; does nothing
# that is done.
set -euo pipefail
# The other scripts use help.sh for this, but an image may get this file alone.
case "${1:-}" in
  "") ;;
  -h | --help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0"; exit 0 ;;
  *) echo "usage: scripts/setup.sh" >&2; exit 2 ;;
esac
cd "$(dirname "$0")/.."

packages=(
  g++ cmake ninja-build ccache git
  libeigen3-dev libspdlog-dev libfmt-dev nlohmann-json3-dev libcli11-dev libxxhash-dev libsodium-dev catch2
  python3 python3-venv
)

missing=()
for package in "${packages[@]}"; do
  dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'install ok installed' || missing+=("$package")
done
if [ ${#missing[@]} -gt 0 ]; then
  sudo=""
  if [ "$(id -u)" -ne 0 ]; then
    command -v sudo >/dev/null || { echo "setup.sh: run as root, or install: ${missing[*]}" >&2; exit 2; }
    sudo=sudo
  fi
  echo "setup.sh: installing ${missing[*]}"
  $sudo apt-get update -qq
  DEBIAN_FRONTEND=noninteractive $sudo apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
fi

# NCCL comes from NVIDIA's package repository, as the CUDA toolkit does.
if command -v nvcc >/dev/null || [ -x /usr/local/cuda/bin/nvcc ]; then
  has_nccl=false
  for folder in /usr /usr/local /usr/local/cuda; do [ ! -e "$folder/include/nccl.h" ] || has_nccl=true; done
  $has_nccl || echo "setup.sh: NCCL was not found: runs on several GPUs need libnccl-dev of NVIDIA's repository" >&2
fi

# The distribution's python3, whatever else is first on PATH: it is the one that python3-venv was installed for.
if [ ! -x .venv/bin/python ] || ! .venv/bin/python -c 'import jinja2, matplotlib, numpy, PIL, prometheus_client, pyarrow, tensorboardX, tokenizers, transformers, xxhash' 2>/dev/null; then
  echo "setup.sh: making .venv for the Python scripts"
  /usr/bin/python3 -m venv .venv
  .venv/bin/python -m pip install --quiet --disable-pip-version-check -r scripts/requirements.txt
fi
