"""How fast real documents of 12-128 tokens are embedded, against the ways it is usually done; all in one run.

    python -m benchmarks.embedding [--documents 600]
    python -m benchmarks.embedding --growth

Same weights, threads and texts for all; the vectors are compared before a ratio is printed. Ratios are medians over
rounds, each within its round, since a machine's speed drifts. MiniLM, unit vectors, at most 128 tokens.

- loop: as Contriever's generate_passage_embeddings: file order, batches of 64 padded to their longest, float32
- sentence-transformers: its encode in bfloat16, at the best of its batch sizes on this machine; it sorts by length
- replug: Encoder.encode in bfloat16; in float32; and without tokenizing, as every refresh after the first embeds

--growth instead embeds growing corpora through Builder.embed_file, from the texts to marked files, and fits how the
time grows. The larger ones repeat the texts of the smaller, in other blocks.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from sentence_transformers import SentenceTransformer

from benchmarks.machine import describe_machine
from benchmarks.workloads import Cutter
from replug.data.records import Document
from replug.data.shards import corpus_sha256, write_documents
from replug.index_workers.build_plan import BuildPlan
from replug.index_workers.builder import Builder
from replug.index_workers.version_store import VersionStore
from replug.models.batching import ENCODER_TOKENS
from replug.models.encoder import Encoder
from replug.models.hardware import resolve_dtype
from replug.models.packaged import resolve_encoder_path

MAX_TOKENS = 128
LOOP_BATCH = 64
BATCH_SIZES = (8, 16, 32, 64, 128)  # of sentence-transformers, of which the best counts
TOLERANCES = {"replug": 2e-2, "replug, tokens kept": 2e-2, "replug, float32": 1e-5, "loop": 1e-5}
GROWTH = (1_000, 10_000, 50_000)
GROWTH_TEXTS = 4_000  # different ones; larger corpora repeat them
PAPER_DOCUMENTS = 36_000_000

Way = Callable[[], np.ndarray]


def real_documents(encoder: Encoder, number: int) -> list[str]:
    """Texts of 12 to 128 tokens, [CLS] and [SEP] counted."""
    cut = Cutter(encoder.model.tokenizer, num_tokens=number * MAX_TOKENS, seed=0)
    return [cut.text(10, MAX_TOKENS - 2) for _ in range(number)]


def plain_loop(encoder: Encoder, texts: list[str]) -> np.ndarray:
    vectors = []
    with torch.no_grad():
        for start in range(0, len(texts), LOOP_BATCH):
            batch = encoder.model.tokenizer(
                texts[start : start + LOOP_BATCH],
                padding=True,
                truncation=True,
                max_length=MAX_TOKENS,
                return_tensors="pt",
            )
            mask = batch["attention_mask"].unsqueeze(-1)
            pooled = (encoder.backbones[0](**batch).last_hidden_state * mask).sum(1) / mask.sum(1)
            vectors.append(torch.nn.functional.normalize(pooled, dim=-1))
    return torch.cat(vectors).numpy()


def sentence_transformer(path: str, dtype: torch.dtype) -> SentenceTransformer:
    model = SentenceTransformer(path, device="cpu", model_kwargs={"dtype": dtype})
    model.max_seq_length = MAX_TOKENS
    return model


def by_sentence_transformers(model: SentenceTransformer, texts: list[str], batch_size: int) -> np.ndarray:
    return model.encode(texts, batch_size=batch_size, normalize_embeddings=True)


def best_batch_size(model: SentenceTransformer, texts: list[str], rounds: int) -> int:
    """By the median of its times, each size once in a round."""
    times: dict[int, list[float]] = {size: [] for size in BATCH_SIZES}
    for _ in range(rounds + 1):
        for size in BATCH_SIZES:
            times[size].append(timed(partial(by_sentence_transformers, model, texts, size))[0])
    medians = {size: statistics.median(seconds[1:]) for size, seconds in times.items()}  # the first round warms up
    for size, median in medians.items():
        print(f"sentence-transformers, batches of {size:3}: {len(texts) / median:6.0f} documents/s", flush=True)
    return min(medians, key=lambda size: medians[size])


def timed(way: Way) -> tuple[float, np.ndarray]:
    start = time.perf_counter()
    vectors = way()
    return time.perf_counter() - start, vectors


def compare(texts: list[str], rounds: int, tokens_per_batch: int) -> None:
    path = resolve_encoder_path("package:minilm")
    full, half = (Encoder(path, max_tokens=MAX_TOKENS).to(dtype) for dtype in (torch.float32, torch.bfloat16))
    peer = sentence_transformer(path, torch.bfloat16)
    size, ids = best_batch_size(peer, texts, rounds), half.token_ids(texts)
    print(f"{len(texts)} documents, {sum(map(len, ids)) / len(ids):.0f} tokens in a document")
    ways: dict[str, Way] = {
        "loop": lambda: plain_loop(full, texts),
        "sentence-transformers": lambda: by_sentence_transformers(peer, texts, size),
        "replug": lambda: half.encode(texts, tokens_per_batch).numpy(),
        "replug, tokens kept": lambda: half.encode_tokens(ids, tokens_per_batch).numpy(),
        "replug, float32": lambda: full.encode(texts, tokens_per_batch).numpy(),
    }
    found = {name: timed(way)[1] for name, way in ways.items()}  # warms up too
    require_equal(found, by_sentence_transformers(sentence_transformer(path, torch.float32), texts, 32))
    report([{name: timed(way)[0] for name, way in ways.items()} for _ in range(rounds)], len(texts))


def require_equal(found: dict[str, np.ndarray], expected: np.ndarray) -> None:
    for name, tolerance in TOLERANCES.items():
        difference = float(np.abs(found[name] - expected).max())
        assert difference < tolerance, f"{name}: differs by {difference:.1e}, at most {tolerance} is allowed"
        print(f"{name:>22}: differs from sentence-transformers in float32 by at most {difference:.1e}")


def report(rounds: list[dict[str, float]], documents: int) -> None:
    for name in rounds[0]:
        rate = statistics.median(documents / times[name] for times in rounds)
        ratios = [times[name] / times["replug"] for times in rounds]
        print(
            f"{name:>22}: median {rate:6.0f} documents/s; replug has {statistics.median(ratios):.2f} times that "
            f"({min(ratios):.2f} to {max(ratios):.2f} in {len(rounds)} rounds)"
        )


def growth(threads: int, tokens_per_batch: int) -> None:
    path = resolve_encoder_path("package:minilm")
    encoder = Encoder(path, max_tokens=MAX_TOKENS)
    texts = real_documents(encoder, GROWTH_TEXTS)
    print(f"{len(texts)} texts; larger corpora repeat them")
    seconds = []
    for number in GROWTH:
        with tempfile.TemporaryDirectory() as folder:
            seconds.append(seconds_to_build(Path(folder), encoder, texts, number, threads, tokens_per_batch))
        print(f"{number:6} documents: {seconds[-1]:6.1f} s, {number / seconds[-1]:.0f} documents/s", flush=True)
    exponent, logarithm = np.polyfit(np.log(GROWTH), np.log(seconds), 1)
    hours = np.exp(logarithm + exponent * np.log(PAPER_DOCUMENTS)) / 3600
    print(f"time grows as documents^{exponent:.3f}; {PAPER_DOCUMENTS} documents would take {hours:.0f} hours here")


def seconds_to_build(
    folder: Path, encoder: Encoder, texts: list[str], number: int, threads: int, tokens_per_batch: int
) -> float:
    """From loaded encoder to marked files of vectors and tokens."""
    corpus = folder / "documents"
    write_documents(corpus, (Document(f"d{i}", texts[i % len(texts)], "x", "s") for i in range(number)))
    store = VersionStore(folder / "index")
    plan = make_plan(store, encoder, corpus, number, tokens_per_batch)
    store.begin(plan)
    builder = Builder(store.root, threads)
    builder.encode(plan, texts[:256])  # loads and warms up
    return timed(partial(embed_all, builder, plan))[0]


def embed_all(builder: Builder, plan: BuildPlan) -> np.ndarray:
    for file in range(plan.num_files):
        builder.embed_file(plan, file)
    return np.array([len(plan.rows_of_file(file)) for file in range(plan.num_files)])


def make_plan(store: VersionStore, encoder: Encoder, corpus: Path, number: int, tokens_per_batch: int) -> BuildPlan:
    return BuildPlan(
        version=0,
        step=0,
        weights_sha256=store.save_snapshot(0, encoder.save),
        corpus_path=str(corpus),
        corpus_sha256=corpus_sha256(corpus),
        num_documents=number,
        block_documents=1024,
        similarity=encoder.similarity,
        max_tokens=MAX_TOKENS,
        dim=encoder.dim,
        dtype=str(resolve_dtype("auto")).removeprefix("torch."),
        tokens_per_batch=tokens_per_batch,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=600)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens-per-batch", type=int, default=ENCODER_TOKENS["cpu"])
    parser.add_argument("--growth", action="store_true", help="how the time grows with the corpus, instead")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(describe_machine(arguments.threads))
    if arguments.growth:
        growth(arguments.threads, arguments.tokens_per_batch)
    else:
        tokenizer_of = Encoder(resolve_encoder_path("package:minilm"), max_tokens=MAX_TOKENS)
        compare(real_documents(tokenizer_of, arguments.documents), arguments.rounds, arguments.tokens_per_batch)


if __name__ == "__main__":
    main()
