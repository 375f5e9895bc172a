# Without an accelerator. NOT BUILT. From the repository's root:
#   docker build -f containers/cpu.Dockerfile -t bert-pretraining-pipeline:cpu .
# Versions of Python packages are those of constraints.txt; torch is PyTorch's build for CPUs.
FROM python:3.13-slim
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
ENV PYTHONUNBUFFERED=1
COPY pyproject.toml constraints.txt README.md LICENSE luigi.cfg /src/
COPY common /src/common
COPY configs /src/configs
COPY pipeline /src/pipeline
COPY stages /src/stages
COPY trainer /src/trainer
RUN pip install --no-cache-dir --constraint /src/constraints.txt uv \
 && uv pip install --system --no-cache --build-constraint /src/constraints.txt \
    --torch-backend cpu --constraint /src/constraints.txt /src \
 && rm -r /src
