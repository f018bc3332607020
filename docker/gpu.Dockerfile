# The GPU host: NVIDIA's container with its own tritonserver and TensorRT-LLM backend, and our repository, front door and
# commands. The engine models' configs say `backend: "tensorrtllm"`, which is NVIDIA's there.
#   docker build -f docker/gpu.Dockerfile -t enginehouse:gpu .
FROM nvcr.io/nvidia/tritonserver:26.04-trtllm-python-py3

WORKDIR /opt/enginehouse
COPY pyproject.toml README.md constraints.txt ./
COPY backends/enginehouse_backends backends/enginehouse_backends
COPY builders builders
COPY client client
# No constraints and no numpy of ours: NVIDIA's image pins its own, for its own Python stub.
RUN pip install --no-cache-dir --no-deps . \
    && pip install --no-cache-dir jinja2 pyyaml 'pydantic>=2.10' 'typer>=0.29' rich 'sqlalchemy>=2.0' tzdata \
       'tritonclient[grpc,http]' 'fsspec>=2025.3' s3fs 'psycopg[binary]>=3.1' safetensors tokenizers gguf

ENV ENGINEHOUSE_HOME=/state ENGINEHOUSE_BIND_ADDRESS=0.0.0.0
VOLUME /state
EXPOSE 8000 8001 8002
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=8s --start-period=600s CMD ["enginehouse", "ready"]
ENTRYPOINT ["enginehouse"]
CMD ["serve"]
