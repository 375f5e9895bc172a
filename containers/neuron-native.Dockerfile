# Trainium through native PyTorch (trn2, trn3), SDK 2.33. NOT BUILT, NOR RUN ON TRAINIUM. From the repository's root:
#   docker build -f containers/neuron-native.Dockerfile -t bert-pretraining-pipeline:neuron-native .
# Versions of Python packages are those of the extra neuron-native in pyproject.toml. The driver is the host's.
FROM ubuntu:26.04
ARG DEBIAN_FRONTEND=noninteractive
# Versions of AWS's system packages, as name=version; by default the newest.
ARG NEURON_PACKAGES="aws-neuronx-collectives aws-neuronx-runtime-lib aws-neuronx-tools"
RUN apt-get update \
 && apt-get install -y --no-install-recommends ca-certificates curl gnupg g++ \
    python3 python3-dev python3-venv \
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
RUN python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:/opt/aws/neuron/bin:/opt/amazon/efa/bin:$PATH \
    LD_LIBRARY_PATH=/opt/aws/neuron/lib:/opt/amazon/efa/lib \
    PYTHONUNBUFFERED=1
COPY pyproject.toml README.md LICENSE luigi.cfg /src/
COPY common /src/common
COPY configs /src/configs
COPY pipeline /src/pipeline
COPY stages /src/stages
COPY trainer /src/trainer
# The index of PyTorch's CPU wheels, as AWS's instructions have it; without it pip may take the larger CUDA build.
ARG TORCH_INDEX=
RUN pip install --no-cache-dir --extra-index-url=https://pip.repos.neuron.amazonaws.com \
    ${TORCH_INDEX:+--extra-index-url=$TORCH_INDEX} '/src[neuron-native]' && rm -r /src
