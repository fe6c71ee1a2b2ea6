# docker build -t replug .
# docker build -t replug:gpu --build-arg FAISS=gpu --build-arg TORCH_INDEX=https://pypi.org/simple .
# docker run --shm-size=2g -v "$PWD:/work" replug train quickstart     (Ray keeps its objects in shared memory)
#
# The second is for a driver from 580 on, and `docker run` then takes --gpus=all. Both were written and never built.
FROM python:3.11-slim
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
ARG FAISS=cpu
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip install --no-cache-dir torch==2.13.0 --index-url "$TORCH_INDEX"
COPY . /replug
WORKDIR /replug
RUN pip install --no-cache-dir --constraint constraints.txt ".[$FAISS,gguf,web,serve,wandb,lora]" \
    && sed -n 's/^QUICKSTART := //p' Makefile | xargs pip install --no-cache-dir --no-deps
RUN useradd --create-home --uid 1000 replug
USER 1000
WORKDIR /work
ENTRYPOINT ["replug"]
