# An image with Parka's Debian package, which the first stage builds. For NVIDIA GPUs:
#   docker build -t parka .
#   docker run --gpus all --shm-size 1g --user "$(id -u):$(id -g)" -v "$PWD:/runs" parka train config.json
# For CPUs:
#   docker build -t parka --build-arg BUILD_IMAGE=debian:12 --build-arg RUN_IMAGE=debian:12 .
# Packages have no versions here, so that the images can be of any Debian 12 or Ubuntu 24.04.
ARG BUILD_IMAGE=nvidia/cuda:13.0.2-devel-ubuntu24.04
ARG RUN_IMAGE=nvidia/cuda:13.0.2-runtime-ubuntu24.04

FROM ${BUILD_IMAGE} AS build
WORKDIR /src
COPY scripts/setup.sh scripts/requirements.txt scripts/
# hadolint ignore=DL3008
RUN apt-get update \
  && apt-get install -y --no-install-recommends dpkg-dev file \
  && rm -rf /var/lib/apt/lists/* \
  && scripts/setup.sh
COPY . .
RUN cmake --preset release -DPARKA_TESTS=OFF \
  && cmake --build --preset release --target parka \
  && cpack --config build/release/CPackConfig.cmake -B /packages

FROM ${RUN_IMAGE}
COPY --from=build /packages/parka_*.deb /packages/
# hadolint ignore=DL3008
RUN apt-get update \
  && apt-get install -y --no-install-recommends /packages/parka_*.deb python3-venv \
  && rm -rf /var/lib/apt/lists/* /packages \
  && python3 -m venv /opt/parka \
  && /opt/parka/bin/pip install --no-cache-dir -r /usr/share/parka/scripts/requirements.txt \
  && parka plan /usr/share/parka/configs/olmo-1b.json
WORKDIR /runs
ENTRYPOINT ["parka"]
