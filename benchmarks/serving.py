"""What `replug serve` adds to its LM: answers from k documents against the same k prompts answered apart.

    python -m benchmarks.serving DIRECTORY [--questions 32] [--k 5] [--tokens 32]

DIRECTORY is a run or an index. The server is the real command, asked over HTTP by 1 and by 8 clients at once. Apart is
the same LM in this process, without HTTP: the k prompts of one question, or of eight, continued greedily in one call.
Both are asked in turn, and both read the same prompts. Checked: an answer that is served is what the same weights mix
here. Then embeddings and searches by eight clients.
"""

import argparse
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
import torch

from benchmarks.machine import describe_machine
from benchmarks.workloads import Cutter
from replug.models.black_box_lm import Mixture
from replug.models.generation import GenerationOptions
from replug.models.hardware import resolve_dtype
from replug.models.local.hf_lm import HuggingFaceLM
from replug.models.packaged import resolve_lm_path
from replug.models.prompt import PromptTemplate

LM, CLIENTS, WARM, START_SECONDS = "package:smollm2", 8, 2, 300
Json = dict[str, Any]


@dataclass
class Measured:
    """Of one way: seconds of each request, seconds in all, and tokens that were answered."""

    latencies: list[float] = field(default_factory=list)
    seconds: float = 0.0
    tokens: int = 0

    def line(self, name: str) -> str:
        p50, p99 = np.percentile(self.latencies, [50, 99])
        rate = len(self.latencies) / self.seconds
        return f"{name}: p50 {p50:.3f} s, p99 {p99:.3f} s, {rate:.2f} requests/s, {self.tokens} tokens answered"


class Client:
    """Asks one server; httpx's client is for all threads."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=START_SECONDS)

    def post(self, path: str, **body: object) -> Json:
        response = self._http.post(path, json=body)
        response.raise_for_status()
        return response.json()

    def is_ready(self) -> bool:
        return self._http.get("/health").status_code == 200


@contextmanager
def served(directory: str, k: int) -> Iterator[Client]:
    command = [sys.executable, "-m", "replug.commands.cli", "serve", directory, f"lm.path={LM}"]
    command += ["--port", "0", "--k", str(k)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert process.stdout is not None
        found = (re.search(r"listening on (\S+);", line) for line in process.stdout)
        url = next((one[1] for one in found if one), None)
        if url is None:
            raise RuntimeError(f"the server did not start: {' '.join(command)}")
        client, end = Client(url), time.monotonic() + START_SECONDS
        while not client.is_ready():
            if time.monotonic() > end:
                raise TimeoutError(f"the server was not ready within {START_SECONDS} s")
            time.sleep(0.2)
        yield client
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)


def prompts_of(client: Client, question: str, k: int) -> list[str]:
    """What the server's LM reads of a question."""
    found = client.post("/search", query=question, k=k)["data"][0]["documents"]
    return [PromptTemplate().whole(one["text"], question) for one in found]


def ask_served(client: Client, questions: Sequence[str], tokens: int, measured: Measured) -> None:
    """All questions at once, by a client each."""

    def ask(question: str) -> tuple[float, int]:
        start = time.perf_counter()
        answer = client.post("/v1/completions", model="replug", prompt=question, max_tokens=tokens)
        return time.perf_counter() - start, answer["usage"]["completion_tokens"]

    start = time.perf_counter()
    with ThreadPoolExecutor(len(questions)) as clients:
        asked = list(clients.map(ask, questions))
    measured.seconds += time.perf_counter() - start
    measured.latencies += [latency for latency, _ in asked]
    measured.tokens += sum(made for _, made in asked)


def ask_apart(lm: HuggingFaceLM, prompts: Sequence[list[str]], tokens: int, measured: Measured) -> None:
    """The prompts of all questions in one call, each with an answer of its own."""
    start = time.perf_counter()
    drawn = lm.sample([prompt for own in prompts for prompt in own], GenerationOptions(tokens))
    seconds = time.perf_counter() - start
    measured.seconds += seconds
    measured.latencies += [seconds] * len(prompts)
    measured.tokens += sum(len(sample.token_logprobs) for [sample] in drawn)


def check_equal(client: Client, lm: HuggingFaceLM, questions: Sequence[str], tokens: int) -> None:
    for question in questions:
        answer = client.post("/v1/completions", model="replug", prompt=question, max_tokens=tokens)
        documents = answer["replug"]["documents"]
        prompts = [PromptTemplate().whole(one["text"], question) for one in documents]
        [here] = lm.generate([Mixture(prompts, [one["weight"] for one in documents])], GenerationOptions(tokens))
        served = answer["choices"][0]["text"]
        assert served == here.text, f"served {served!r}, here {here.text!r}"


def compare(client: Client, lm: HuggingFaceLM, questions: list[str], arguments: argparse.Namespace) -> None:
    """Both ways in turn, with one client and with many."""
    prompts = [prompts_of(client, question, arguments.k) for question in questions]
    for together in (1, CLIENTS):
        ours, apart, ratios = Measured(), Measured(), []
        for first in range(0, len(questions), together):
            before = ours.seconds, apart.seconds
            group = slice(first, first + together)
            ask_served(client, questions[group], arguments.tokens, ours)
            ask_apart(lm, prompts[group], arguments.tokens, apart)
            ratios.append((ours.seconds - before[0]) / (apart.seconds - before[1]))
        print(ours.line(f"served, {together} at once"))
        print(apart.line(f"apart, {together} at once"))
        low, high = np.percentile(ratios, [25, 75])
        print(f"  served / apart: {np.median(ratios):.3f}, middle half {low:.3f} to {high:.3f}", flush=True)


def time_retriever(name: str, ask: Callable[[str], Json], questions: Sequence[str]) -> None:
    def seconds(question: str) -> float:
        start = time.perf_counter()
        ask(question)
        return time.perf_counter() - start

    start = time.perf_counter()
    with ThreadPoolExecutor(CLIENTS) as clients:
        measured = Measured(list(clients.map(seconds, questions)))
    measured.seconds = time.perf_counter() - start
    print(measured.line(f"{name}, {CLIENTS} at once"), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory")
    parser.add_argument("--questions", type=int, default=32)
    parser.add_argument("--k", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=32)
    arguments = parser.parse_args()
    print(describe_machine(torch.get_num_threads()))
    lm = HuggingFaceLM(resolve_lm_path(LM), dtype=resolve_dtype("auto"))
    cut = Cutter(lm.tokenizer, 100 * arguments.questions, seed=0)
    questions = [cut.text(30, 60) for _ in range(arguments.questions)]
    with served(arguments.directory, arguments.k) as client:
        check_equal(client, lm, questions[:WARM], arguments.tokens)
        compare(client, lm, questions, arguments)
        many = questions * 8
        time_retriever("/search", lambda text: client.post("/search", query=text, k=arguments.k), many)
        embed = {"model": "retriever", "input_type": "query"}
        time_retriever("/v1/embeddings", lambda text: client.post("/v1/embeddings", input=text, **embed), many)


if __name__ == "__main__":
    main()
