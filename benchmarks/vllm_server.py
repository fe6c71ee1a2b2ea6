"""A real vLLM server on this machine, asked over HTTP as a user would ask it, for `score_throughput`."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from benchmarks.workloads import Pairs
from replug.config.schema import LMConfig
from replug.models.http.http_lm import HttpLM
from replug.models.http.request_budget import RequestBudget

START_SECONDS = 300


@contextmanager
def vllm_server(python: str, model: str) -> Iterator[str]:
    """The server's URL, once it answers; compiled (not eager), as it is fastest."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--served-model-name", "lm"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16", "--max-model-len", "1024"]
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    with Path("/tmp/vllm-benchmark.log").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        _wait(process, port)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait(process: subprocess.Popen, port: int) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        if process.poll() is not None:
            raise RuntimeError("vLLM did not start; see /tmp/vllm-benchmark.log")
        with socket.socket() as connection:
            if connection.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(1)
    raise TimeoutError(f"vLLM did not answer within {START_SECONDS} s; see /tmp/vllm-benchmark.log")


def rates_of_vllm(
    python: str, model: str, texts: Pairs, tokens: int, rounds: int
) -> tuple[list[float], list[np.ndarray]]:
    """Tokens a second of each round, and the log-probs; the same token ids as the other ways."""
    with vllm_server(python, model) as url:
        lm = HttpLM(LMConfig(url=url, model="lm", tokenizer=model), RequestBudget(None))
        lm.score(texts.prefixes[:8], texts.continuations[:8])  # warm
        rates = []
        for _ in range(rounds):
            start = time.perf_counter()
            scores = lm.score(texts.prefixes, texts.continuations)
            rates.append(tokens / (time.perf_counter() - start))
            print(f"{'vllm':>16}: {rates[-1]:7.0f} tokens/s", flush=True)
        lm.close()
    return rates, [score.token_logprobs for score in scores]
