# A worker: aiooffload, what `serve` needs, and a program of yours.
#
#   docker build -t aiooffload .
#   docker run --gpus all -p 8000:8000 -e AIOOFFLOAD_TOKEN=... -v "$PWD/scaler.py:/app/scaler.py:ro" aiooffload scaler:app
#
# With aiooffload.examples.knn:app in the place of scaler:app, and no mount, it runs the example that is in the package.
# Or in a Dockerfile of your own: FROM aiooffload, COPY scaler.py /app/, CMD ["scaler:app"].
#
# The CUDA driver comes from the host (NVIDIA's container toolkit), the runtime compiler from its wheel. Settings are
# variables (see `aiooffload serve --help`). The image asks for cuda:0: without a GPU it fails, rather than serve on the
# CPU; AIOOFFLOAD_DEVICE=host is for those who want that. It listens on all addresses, so it wants a token, or
# AIOOFFLOAD_INSECURE=true where something else keeps strangers out.

# Any Debian with Python 3.11 or newer.
ARG BASE=docker.io/library/debian:bookworm-slim
# The runtime compiler is half of what is installed; EXTRAS=serve is for programs whose kernels are compiled already.
ARG EXTRAS=serve,compiler

FROM ${BASE} AS build
ARG EXTRAS
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/aiooffload
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
COPY pyproject.toml setup.py README.md LICENSE ./
COPY aiooffload aiooffload
RUN /opt/aiooffload/bin/pip install -q ".[${EXTRAS}]" \
    && find /opt/aiooffload -name __pycache__ -prune -exec rm -rf {} + \
    && rm -rf /opt/aiooffload/lib/python3*/site-packages/pip* \
        /opt/aiooffload/lib/python3*/site-packages/setuptools* /opt/aiooffload/lib/python3*/site-packages/pkg_resources

FROM ${BASE}
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --system --create-home --uid 10001 worker
COPY --from=build /opt/aiooffload /opt/aiooffload
ENV PATH=/opt/aiooffload/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    # For NVIDIA's container toolkit: which GPUs, and what of the driver (compute for CUDA, utility for NVML).
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    AIOOFFLOAD_DEVICE=cuda:0 \
    AIOOFFLOAD_HOST=0.0.0.0 \
    AIOOFFLOAD_PORT=8000
USER worker
WORKDIR /app
EXPOSE 8000
STOPSIGNAL SIGTERM
# Liveness: false only when no device process can be brought back. Readiness is for the orchestrator to ask.
HEALTHCHECK --interval=10s --timeout=3s --start-period=60s --retries=3 \
    CMD ["python3", "-c", "import os, urllib.request as r; r.build_opener(r.ProxyHandler({})).open('http://127.0.0.1:' + os.environ['AIOOFFLOAD_PORT'] + '/v2/health/live')"]
ENTRYPOINT ["aiooffload", "serve"]
