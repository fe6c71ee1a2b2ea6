"""How fast and in how much memory raw text becomes a prepared set, against `datasets.map`; and how the store reads.

    python -m benchmarks.prepare --texts texts.jsonl [--parts speed,growth,store]

TEXTS is JSON Lines of id, text and domain; `benchmarks.debian_texts` makes 1.4 GB of real ones. Tokens are MiniLM's.

- speed: 200 MB with two processes. `datasets.map` tokenizes the same texts, cuts them at the same tokens, tokenizes the
  pieces for the retriever and saves them; replug also deals, sorts, drops what is equal, and proves. Pieces are
  compared
- growth: 50 MB, 200 MB and 1 GB, with the peak memory of the whole process tree (PSS: shared pages count once)
- store: how long it takes to open a million documents
"""

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import psutil

from benchmarks.machine import describe_machine
from replug.data.sampling import Shares, split_of
from replug.data.shards import read_documents_of, shard_paths, write_documents
from replug.data.store import CorpusStore, PreparedSet
from replug.data.words import normalise

SIZES = (50, 200, 1000)  # MB
TOKENS = 128
PROCESSES = 2
PAPER_DOCUMENTS = 36_000_000
OPTIONS = ("data.tokenizer=retriever", f"data.context_tokens={TOKENS}", "seed=0")


def take(texts: Path, megabytes: int, out: Path) -> None:
    """A random part of the texts of at least about this size, from all domains."""
    share = min(1.0, 1.1 * megabytes * 1e6 / texts.stat().st_size)
    rng = np.random.default_rng(0)
    with texts.open("rb") as lines, out.open("wb") as file:
        for line in lines:
            if rng.random() < share:
                file.write(line)


class PeakMemory:
    """Samples the memory of a process and all its children while a block runs."""

    def __init__(self, pid: int) -> None:
        self.peak, self._process, self._stop = 0, psutil.Process(pid), threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "PeakMemory":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(0.25):
            self.peak = max(self.peak, self._now())

    def _now(self) -> int:
        total = 0
        for process in [self._process, *self._children()]:
            try:
                total += process.memory_full_info().pss
            except psutil.Error:  # it ended meanwhile
                continue
        return total

    def _children(self) -> list[psutil.Process]:
        try:
            return self._process.children(recursive=True)
        except psutil.Error:
            return []


def prepare(texts: Path, out: Path, *options: str) -> tuple[float, int]:
    """Seconds and peak bytes of `replug prepare`, start and imports included."""
    command = [sys.executable, "-m", "replug", "prepare", "configs/own_data.yaml", f"data.source={texts}"]
    start = time.perf_counter()
    process = subprocess.Popen([*command, f"data.out={out}", *OPTIONS, *options], stdout=subprocess.DEVNULL)
    with PeakMemory(process.pid) as memory:
        process.wait()
    assert process.returncode == 0, "prepare failed"
    return time.perf_counter() - start, memory.peak


# Against datasets.map -----------------------------------------------------------------------------------


def cut(tokenizer, batch: dict[str, list[str]]) -> dict[str, list]:  # type: ignore[no-untyped-def]
    """The usual cutting: offsets of all tokens, a piece for every 128."""
    encoded = tokenizer(batch["text"], add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    pieces: dict[str, list] = {"text": [], "source": [], "tokens": []}
    for name, text, offsets in zip(batch["id"], batch["text"], encoded["offset_mapping"], strict=True):
        cuts = [0, *(offsets[i - 1][1] for i in range(TOKENS, len(offsets), TOKENS)), len(text)]
        for number, (start, end) in enumerate(itertools.pairwise(cuts)):
            pieces["text"].append(text[start:end])
            pieces["source"].append(name)
            pieces["tokens"].append(len(offsets) if number == 0 else 0)
    return pieces


def add_ids(tokenizer, batch: dict[str, list[str]]) -> dict[str, list]:  # type: ignore[no-untyped-def]
    return {"input_ids": tokenizer(batch["text"], truncation=True, max_length=512)["input_ids"]}


def by_datasets(texts: Path, folder: Path) -> tuple[float, float, int, Path]:
    """Seconds for tokenizing alone, seconds for all, source tokens, and where the pieces are."""
    from datasets import load_dataset
    from transformers import AutoTokenizer

    from replug.models.packaged import resolve_encoder_path

    tokenizer = AutoTokenizer.from_pretrained(resolve_encoder_path("package:minilm"), trust_remote_code=False)
    start = time.perf_counter()
    rows = load_dataset("json", data_files=str(texts), split="train", cache_dir=str(folder / "cache"))
    loaded = time.perf_counter()
    settings = {
        "batched": True,
        "num_proc": PROCESSES,
        "remove_columns": rows.column_names,
        "load_from_cache_file": False,
    }
    pieces = rows.map(partial(cut, tokenizer), batch_size=32, **settings)
    cut_at = time.perf_counter()
    pieces = pieces.map(partial(add_ids, tokenizer), batched=True, num_proc=PROCESSES, load_from_cache_file=False)
    pieces.save_to_disk(str(folder / "pieces"), num_proc=PROCESSES)
    end = time.perf_counter()
    return cut_at - loaded, end - start, sum(pieces["tokens"]), folder / "pieces"


def compare(ours: PreparedSet, theirs: Path) -> None:
    """The corpus holds what `datasets.map` cut of its sources, each text once."""
    from datasets import load_from_disk

    shares = Shares(0.2, 0.1)
    found = {normalise(doc.text) for path in shard_paths(ours.corpus_path) for doc in read_documents_of(path)}
    pieces = load_from_disk(str(theirs))
    expected = {
        normalise(text)
        for text, source in zip(pieces["text"], pieces["source"], strict=True)
        if text.strip() and split_of(source, 0, shares) == "documents"
    }
    missing, more = len(expected - found), len(found - expected)
    print(f"{len(found)} documents, {len(expected)} by datasets.map; {missing} only there, {more} only here")
    assert missing + more < 0.01 * len(expected), "the pieces differ"


def speed(texts: Path, folder: Path) -> None:
    part = folder / "part.jsonl"
    take(texts, SIZES[1], part)
    print(f"{part.stat().st_size / 1e6:.0f} MB, {PROCESSES} processes each", flush=True)
    tokenizing, seconds, tokens, pieces = by_datasets(part, folder)
    print(f"datasets.map, cut at 128 tokens: {tokens / tokenizing:,.0f} tokens/s", flush=True)
    print(f"datasets.map, the same with the pieces' token ids, saved: {tokens / seconds:,.0f} tokens/s", flush=True)
    ours, _ = prepare(
        part, folder / "set", "retriever.path=package:minilm", "data.num_queries=100", "data.num_heldout=10"
    )
    print(f"replug prepare: {tokens / ours:,.0f} tokens/s, {seconds / ours:.2f} times datasets.map")
    compare(PreparedSet(folder / "set"), pieces)


# Growth and memory --------------------------------------------------------------------------------------


def growth(texts: Path, folder: Path) -> None:
    megabytes, seconds = [], []
    take(texts, 1, folder / "1.jsonl")
    start, _ = prepare(folder / "1.jsonl", folder / "1", "retriever.path=package:minilm")
    print(f"     1 MB: {start:6.1f} s, which is how long starting takes; the fit is of the times beyond it", flush=True)
    for size in SIZES:
        part, out = folder / f"{size}.jsonl", folder / f"{size}"
        take(texts, size, part)
        taken, peak = prepare(part, out, "retriever.path=package:minilm")
        documents = PreparedSet(out).manifest["counts"]["documents"]
        megabytes.append(part.stat().st_size / 1e6)
        seconds.append(taken - start)
        print(
            f"{megabytes[-1]:6.0f} MB: {taken:6.1f} s, {documents} documents, peak {peak / 2**20:.0f} MiB", flush=True
        )
    exponent = np.polyfit(np.log(megabytes), np.log(seconds), 1)[0]
    scale = PAPER_DOCUMENTS / documents
    hours = seconds[-1] * scale**exponent * PROCESSES / 64 / 3600
    print(f"time grows as text^{exponent:.3f}; 36M documents would take {hours:.1f} hours on 64 such cores")


# The store ----------------------------------------------------------------------------------------------


def store(texts: Path, folder: Path) -> None:
    corpus = folder / "documents"
    write_documents(corpus, _documents(texts, 1_000_000))
    start = time.perf_counter()
    opened = CorpusStore(corpus)
    print(f"{len(opened)} documents in {len(shard_paths(corpus))} shards opened in {time.perf_counter() - start:.3f} s")


def _documents(texts: Path, number: int) -> Iterator:
    from replug.data.records import Document

    made = 0
    with texts.open("rb") as lines:
        for line in lines:
            row = json.loads(line)
            for start in range(0, len(row["text"]), 400):
                if made == number:
                    return
                yield Document(f"d{made}", row["text"][start : start + 400], row["domain"], row["id"])
                made += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--parts", default="speed,growth,store")
    parser.add_argument("--folder", type=Path, help="where to work; needs about six times the text's size")
    arguments = parser.parse_args()
    print(describe_machine(PROCESSES))
    for name, part in (("speed", speed), ("growth", growth), ("store", store)):
        if name in arguments.parts.split(","):
            with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
                part(arguments.texts, Path(folder))


if __name__ == "__main__":
    main()
