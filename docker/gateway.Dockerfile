# The gateway: web and SQL, no torch. Build from the repository's root:
#   docker build -f docker/gateway.Dockerfile -t loopline-gateway .
FROM python:3.11-slim-bookworm AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
RUN python -m venv /opt/loopline
WORKDIR /src
# The lock's versions as constraints: the same packages that the tests ran with, only those the gateway needs.
COPY requirements/cpu.lock requirements/
RUN sed -E '/^ *--hash/d; /^#/d; s/ *\\$//' requirements/cpu.lock | grep -v '^torch==' > /tmp/constraints.txt
COPY pyproject.toml README.md LICENSE ./
COPY gateway gateway
COPY trainer trainer
COPY billing billing
COPY migrations migrations
RUN /opt/loopline/bin/pip install -c /tmp/constraints.txt .

FROM python:3.11-slim-bookworm
RUN useradd --uid 10001 --no-create-home --home-dir /data --shell /usr/sbin/nologin loopline \
    && install -d -o loopline -g loopline -m 0750 /data
COPY --from=build /opt/loopline /opt/loopline
ENV PATH=/opt/loopline/bin:$PATH PYTHONUNBUFFERED=1 LOOPLINE_DATA_DIR=/data LOOPLINE_HOST=0.0.0.0
USER loopline
WORKDIR /data
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/livez', timeout=4)"]
CMD ["python", "-m", "gateway"]
