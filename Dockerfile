# An image that trains. Never built by the project's tests; docs/launching.md says what was checked.
#
#   docker build -t mtrl .                                                               CPU
#   docker build -t mtrl --build-arg BASE=nvidia/cuda:12.9.1-devel-ubuntu24.04 .         GPU
#   docker run --rm --init -v "$PWD/outputs:/home/mtrl/mtrl/outputs" mtrl experiment=text_to_sql
#
# BASE: Debian 12, Ubuntu 24.04 or later; Python comes from it, or is installed where it has none.
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE}

# Which PyTorch (default: that of vLLM); a wheel for the CPU alone is smaller: --build-arg TORCH=… and PIP_EXTRA_INDEX_URL=… of its index.
ARG TORCH
ARG EXTRAS="data lora"
ARG PIP_EXTRA_INDEX_URL
ENV DEBIAN_FRONTEND=noninteractive PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1

# gcc: torch.compile and Triton build kernels.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates gcc libc6-dev \
    && { command -v python3 > /dev/null || apt-get install -y --no-install-recommends python3 python3-dev python3-venv; } \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /home/mtrl/mtrl
COPY scripts/install_sandbox.sh scripts/system_package.sh scripts/
RUN scripts/install_sandbox.sh && rm -rf /var/lib/apt/lists/*

RUN useradd --create-home --home-dir /home/mtrl --uid 1000 --non-unique mtrl && chown -R mtrl /home/mtrl
USER mtrl
COPY --chown=mtrl . .
# hadolint ignore=SC2086
RUN scripts/install.sh ${EXTRAS} && mkdir -p outputs

ENV PATH=/home/mtrl/mtrl/.venv/bin:$PATH
# On all GPUs that the container sees.
ENTRYPOINT ["/home/mtrl/mtrl/scripts/run_local.sh"]
