# GPUs: torch brings CUDA's libraries, the driver is the host's (NVIDIA's container toolkit). NOT BUILT. From the
# repository's root:
#   docker build -f containers/cuda.Dockerfile -t bert-pretraining-pipeline:cuda .
#   docker run --gpus all --shm-size 8g …
# Versions of Python packages are those of constraints.txt, but for CUDA's libraries, of which each torch names its own.
FROM python:3.13-slim
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
# CUDA's release, by PyTorch's name; it must not be newer than the host's driver.
ARG CUDA=cu128
ENV PYTHONUNBUFFERED=1
COPY pyproject.toml constraints.txt README.md LICENSE luigi.cfg /src/
COPY common /src/common
COPY configs /src/configs
COPY pipeline /src/pipeline
COPY stages /src/stages
COPY trainer /src/trainer
RUN pip install --no-cache-dir --constraint /src/constraints.txt uv \
 && grep -v -e ^nvidia- -e ^triton= /src/constraints.txt > /src/constraints-cuda.txt \
 && uv pip install --system --no-cache --build-constraint /src/constraints.txt \
    --torch-backend $CUDA --constraint /src/constraints-cuda.txt /src \
 && rm -r /src
