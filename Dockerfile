# docker build -t replug .
# docker build -t replug:gpu --build-arg FAISS=gpu --build-arg TORCH_INDEX=https://pypi.org/simple .
# docker run --shm-size=2g -v "$PWD:/work" replug train quickstart     (Ray keeps its objects in shared memory)
#
# The second is for a driver from 580 on, and `docker run` then takes --gpus=all. Both were written and never built.
FROM python:3.11-slim
ARG FAISS=cpu
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip install --no-cache-dir torch==2.13.0 --index-url "$TORCH_INDEX"
COPY . /replug
RUN cd /replug \
    && pip install --no-cache-dir --constraint constraints.txt ".[$FAISS,gguf,web,serve,wandb,lora]" \
    && pip install --no-cache-dir --no-deps $(sed -n 's/^QUICKSTART := //p' Makefile)
RUN useradd --create-home replug
USER replug
WORKDIR /work
ENTRYPOINT ["replug"]
