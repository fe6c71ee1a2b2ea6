# docker build -t replug .
# docker build -t replug:gpu --build-arg TORCH_INDEX=https://pypi.org/simple .
# docker run --shm-size=2g -v "$PWD:/work" replug train quickstart     (Ray keeps its objects in shared memory)
#
# The second is for a driver from 580 on, and `docker run` then takes --gpus=all. Built on 2026-11-27 with buildah on
# Debian 12's Python 3.11 and PyPI's torch (6.8 GB, 2 to 4 minutes), `replug train debug` ran in it as user 1000; never
# built with Docker, or from pytorch.org's index.
FROM python:3.11-slim
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip install --no-cache-dir torch==2.13.0 --index-url "$TORCH_INDEX"
COPY . /replug
WORKDIR /replug
RUN pip install --no-cache-dir --constraint constraints.txt ".[gguf,web,serve,wandb,lora]" \
    && sed -n 's/^QUICKSTART := //p' Makefile | xargs pip install --no-cache-dir --no-deps
RUN useradd --create-home --uid 1000 replug
USER 1000
WORKDIR /work
ENTRYPOINT ["replug"]
