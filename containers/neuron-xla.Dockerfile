# Trainium through PyTorch/XLA (trn1, trn2), SDK 2.29.1. NOT BUILT, NOR RUN ON TRAINIUM. From the repository's root:
#   docker build -f containers/neuron-xla.Dockerfile --build-arg NEURON_PACKAGES=… -t bert-pretraining-pipeline:neuron-xla .
# Versions of Python packages are those of the extra neuron-xla in pyproject.toml, without constraints.txt: its numpy is
# 2.x, SDK 2.26 had 1.26, and which one neuronx-cc 2.24 takes was not seen. The driver is the host's.
FROM ubuntu:22.04
ARG DEBIAN_FRONTEND=noninteractive
# AWS's system packages in the versions of SDK 2.29.1, as AWS lists them; the newest may not fit these Python packages.
ARG NEURON_PACKAGES
RUN test -n "$NEURON_PACKAGES" || { echo "--build-arg NEURON_PACKAGES='aws-neuronx-collectives=… \
aws-neuronx-runtime-lib=… aws-neuronx-tools=…' is missing: the versions of SDK 2.29.1" >&2; exit 1; }
RUN apt-get update \
 && apt-get install -y --no-install-recommends ca-certificates curl gnupg g++ \
    python3.11 python3.11-dev python3.11-venv \
 && install -m 0755 -d /etc/apt/keyrings \
 && curl -fsSLo /tmp/neuron.pub https://apt.repos.neuron.amazonaws.com/GPG-PUB-KEY-AMAZON-AWS-NEURON.PUB \
 && gpg --batch --dearmor -o /etc/apt/keyrings/neuron.gpg /tmp/neuron.pub && rm /tmp/neuron.pub \
 && . /etc/os-release \
 && echo "deb [signed-by=/etc/apt/keyrings/neuron.gpg] https://apt.repos.neuron.amazonaws.com $VERSION_CODENAME main" \
  > /etc/apt/sources.list.d/neuron.list \
 && apt-get update \
 && apt-get install -y --no-install-recommends $NEURON_PACKAGES \
 && rm -rf /var/lib/apt/lists/*
# EFA's libfabric, for several machines; its kernel module is the host's.
ARG EFA_INSTALLER=latest
WORKDIR /tmp/efa
RUN apt-get update \
 && curl -fsSLO https://efa-installer.amazonaws.com/aws-efa-installer-$EFA_INSTALLER.tar.gz \
 && tar -xf aws-efa-installer-$EFA_INSTALLER.tar.gz --strip-components=1 \
 && ./efa_installer.sh -y --skip-kmod --skip-limit-conf --no-verify \
 && rm -rf /tmp/efa/* /var/lib/apt/lists/*
WORKDIR /
RUN python3.11 -m venv /opt/venv
ENV PATH=/opt/venv/bin:/opt/aws/neuron/bin:/opt/amazon/efa/bin:$PATH \
    LD_LIBRARY_PATH=/opt/aws/neuron/lib:/opt/amazon/efa/lib \
    PYTHONUNBUFFERED=1
COPY pyproject.toml README.md LICENSE luigi.cfg /src/
COPY common /src/common
COPY configs /src/configs
COPY pipeline /src/pipeline
COPY stages /src/stages
COPY trainer /src/trainer
RUN pip install --no-cache-dir --extra-index-url=https://pip.repos.neuron.amazonaws.com '/src[neuron-xla]' && rm -r /src
