# The CPU server: tritonserver from the wheel nvidia-pytriton, our engine as its backend `tensorrtllm`.
#   docker build -f docker/cpu.Dockerfile -t enginehouse:cpu .
FROM python:3.11-slim-bookworm

RUN useradd --create-home --uid 10001 serving && mkdir /state && chown serving /state
WORKDIR /opt/enginehouse
COPY pyproject.toml README.md constraints.txt requirements-server.txt ./
COPY backends backends
COPY builders builders
COPY client client
RUN pip install --no-cache-dir --constraint constraints.txt '.[postgres,s3]' \
    && pip install --no-cache-dir --no-deps --requirement requirements-server.txt

USER serving
# The state outlives the container: builds, releases, the ledger where it is SQLite.
ENV ENGINEHOUSE_HOME=/state ENGINEHOUSE_BIND_ADDRESS=0.0.0.0
VOLUME /state
EXPOSE 8000 8001 8002
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=8s --start-period=120s CMD ["enginehouse", "ready"]
ENTRYPOINT ["enginehouse"]
CMD ["serve"]
