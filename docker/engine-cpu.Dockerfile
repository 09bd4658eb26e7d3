# vLLM for CPU with Loopline's plugin: exactly the locked packages, without their optional dependencies that only
# break on a CPU machine. GPU machines use the official vLLM image instead.
#   docker build -f docker/engine-cpu.Dockerfile -t loopline-engine:cpu .
FROM python:3.11-slim-bookworm AS build
ARG TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
RUN python -m venv /opt/loopline
WORKDIR /src
COPY requirements/cpu.lock requirements/
RUN /opt/loopline/bin/pip install --no-deps --require-hashes --only-binary :all: \
    --extra-index-url "$TORCH_CPU_INDEX" -r requirements/cpu.lock
COPY pyproject.toml README.md LICENSE ./
COPY gateway gateway
COPY trainer trainer
COPY billing billing
COPY migrations migrations
RUN /opt/loopline/bin/pip install --no-deps .

FROM python:3.11-slim-bookworm
RUN apt-get update \
    && apt-get install -y --no-install-recommends libgomp1 libnuma1 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --create-home --shell /usr/sbin/nologin loopline
COPY --from=build /opt/loopline /opt/loopline
ENV PATH=/opt/loopline/bin:$PATH PYTHONUNBUFFERED=1
USER loopline
EXPOSE 8000
ENTRYPOINT ["python", "-m", "vllm.entrypoints.openai.api_server"]
