"""Ten million vectors whose neighbours are like those of real embeddings, from a hundred thousand real ones.

    python -m benchmarks.debian_texts FOLDER_OF_DEBS > texts.jsonl
    python -m benchmarks.grown_vectors embed --texts texts.jsonl --rows 100000 --out real.npy --queries queries.npy
    python -m benchmarks.grown_vectors narrow --real real.npy --queries queries.npy --dims 128 --out FOLDER
    python -m benchmarks.grown_vectors grow --real real.npy --rows 10000000 --out grown.npy

`embed` cuts texts into passages of 24 words and embeds them by MiniLM: [N, 384] float16, rows of norm 1, in an order
that is drawn once; and 1,000 others, which are the queries. `narrow` keeps their first principal components, so that
ten million take a third of the time; its files in FOLDER have the same names. `grow` makes each new vector of a real
one and one of its nearest: a point between them, and noise that has the covariance of such differences, as long as
`NOISE` times this one, so that dense places stay dense. `benchmarks.host_search` says what lossy kinds find of either.
"""

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from replug.index_workers.exact_search import BlockVectors
from replug.models.encoder import Encoder
from replug.models.hardware import resolve_dtype
from replug.models.packaged import resolve_encoder_path

WORDS, MAX_TOKENS = 24, 64  # of a passage
QUERIES = 1_000
NEIGHBOURS = 10  # among which the other one is
NOISE = 0.4  # length of the noise, by that of the difference
BLOCK = 65_536
CPU = torch.device("cpu")


def passages(texts: Path) -> Iterator[str]:
    """Whole passages of each text in a file of JSON Lines, in its order."""
    with texts.open() as lines:
        for line in lines:
            words = json.loads(line)["text"].split()
            for start in range(0, len(words) - WORDS + 1, WORDS):
                yield " ".join(words[start : start + WORDS])


def drawn_passages(texts: Path, rows: int) -> list[str]:
    """Different ones; the same every time."""
    kept = sorted(set(passages(texts)))
    if len(kept) < rows:
        raise SystemExit(f"{texts} has {len(kept)} different passages of {WORDS} words; expected {rows} or more")
    return [kept[place] for place in np.random.default_rng(0).permutation(len(kept))[:rows]]


def embed(texts: Path, rows: int, out: Path, queries: Path) -> None:
    encoder = Encoder(resolve_encoder_path("package:minilm"), max_tokens=MAX_TOKENS).to(resolve_dtype("auto"))
    drawn, parts = drawn_passages(texts, QUERIES + rows), []
    for start in range(0, len(drawn), 4_096):
        parts.append(encoder.encode(drawn[start : start + 4_096]).half().numpy())
        print(f"{start:,} of {len(drawn):,}: {time.process_time():.0f} s", flush=True)
    vectors = np.concatenate(parts)
    np.save(queries, vectors[:QUERIES].astype(np.float32))
    np.save(out, vectors[QUERIES:])


def blocks_of(vectors: np.ndarray, rows: range | None = None) -> BlockVectors:
    """Vectors [N, D] as a shard has them, or some rows of them."""
    rows = rows or range(len(vectors))
    starts = range(rows.start, rows.stop, BLOCK)
    blocks = [vectors[start : min(start + BLOCK, rows.stop)] for start in starts]
    return BlockVectors(rows.start, blocks, vectors.shape[1])


def neighbours_of(vectors: np.ndarray) -> torch.Tensor:
    """Rows [N, NEIGHBOURS] of those nearest to each vector, itself not among them; by products in bfloat16."""
    halves, found = torch.from_numpy(vectors).bfloat16(), []
    for start in range(0, len(halves), 1_024):
        products = halves[start : start + 1_024] @ halves.T
        products.diagonal(start).fill_(-torch.inf)
        found.append(products.topk(NEIGHBOURS).indices)
    return torch.cat(found)


class Grower:
    """Vectors grown from real ones [N, D] float16, block by block, each from its own seed."""

    def __init__(self, real: np.ndarray) -> None:
        self._real = torch.from_numpy(np.ascontiguousarray(real))
        self._near = neighbours_of(real)
        # R [D, D], so that z R of normal z has the covariance of the differences and a mean square length of 1
        some = torch.arange(min(len(self._real), BLOCK))
        differences = (self._real[self._near[some, 0]] - self._real[some]).float()
        units = torch.nn.functional.normalize(differences, dim=1)
        values, axes = torch.linalg.eigh(units.T @ units / len(units))
        self._shape = (axes * values.clamp(min=0).sqrt()).T.contiguous()

    def block(self, number: int, rows: int) -> np.ndarray:
        """[rows, D] float16 of norm 1."""
        draw = torch.Generator().manual_seed(number)
        ones = torch.randint(len(self._real), (rows,), generator=draw)
        others = self._near[ones, torch.randint(NEIGHBOURS, (rows,), generator=draw)]
        difference = self._real[others].float() - self._real[ones].float()
        between = self._real[ones].float() + torch.rand(rows, 1, generator=draw) * difference
        noise = torch.randn(rows, difference.shape[1], generator=draw) @ self._shape
        grown = between + NOISE * difference.norm(dim=1, keepdim=True) * noise
        return torch.nn.functional.normalize(grown, dim=1).half().numpy()


def grow(real: np.ndarray, rows: int, out: Path) -> None:
    """A file of vectors [rows, D], a block in memory at a time."""
    grower, vectors = Grower(real), np.lib.format.open_memmap(out, "w+", np.float16, (rows, real.shape[1]))
    for number, start in enumerate(range(0, rows, BLOCK)):
        vectors[start : start + BLOCK] = grower.block(number, min(BLOCK, rows - start))
    vectors.flush()


def narrow(real: np.ndarray, queries: np.ndarray, dims: int) -> tuple[np.ndarray, np.ndarray]:
    """Real vectors [N, dims] float16 and queries [M, dims] along the axes of most of the real ones, of norm 1 again."""
    wide = torch.from_numpy(real).float()
    axes = torch.linalg.eigh(wide.T @ wide).eigenvectors[:, -dims:]
    found = [torch.nn.functional.normalize(part @ axes, dim=1).numpy() for part in (wide, torch.from_numpy(queries))]
    return found[0].astype(np.float16), found[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("embed", "narrow", "grow"))
    parser.add_argument("--texts", type=Path)
    parser.add_argument("--real", type=Path)
    parser.add_argument("--queries", type=Path)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--dims", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.what == "embed":
        embed(arguments.texts, arguments.rows, arguments.out, arguments.queries)
    elif arguments.what == "narrow":
        found = narrow(np.load(arguments.real), np.load(arguments.queries), arguments.dims)
        for source, vectors in zip((arguments.real, arguments.queries), found, strict=True):
            np.save(arguments.out / source.name, vectors)
    else:
        grow(np.load(arguments.real), arguments.rows, arguments.out)


if __name__ == "__main__":
    main()
