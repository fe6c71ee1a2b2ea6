"""What every source of documents finds for the examples of an evaluation, each found once and kept in a file."""

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from configs.methods import BM25, NONE, RANDOM, REPLUG, Method
from configs.schema import Config, EvaluationConfig
from data.files import replace_file
from data.progress import say
from data.store import Corpus
from evals.language_modelling import Choice, random_choice
from index_workers.bm25 import Bm25Index
from index_workers.service import IndexService
from train import wiring
from train.pipeline import IndexState


def find_all(
    config: EvaluationConfig, corpus: Corpus, queries: Sequence[str], methods: Sequence[Method], out: Path, depth: int
) -> dict[str, Choice]:
    """Rows and similarities [N, K] by source, as many as any of its methods uses and at least `depth`. Ray must run."""
    out.mkdir(parents=True, exist_ok=True)
    found = {}
    for source in dict.fromkeys(method.source for method in methods if method.source != NONE):
        k = min(len(corpus.corpus), max(depth, *(method.k for method in methods if method.source == source)))
        path = out / f"{source}.npz"
        if not path.exists():
            write_choice(path, _find(config, corpus, queries, source, k, out))
        found[source] = read_choice(path)
    return found


def _find(config: EvaluationConfig, corpus: Corpus, queries: Sequence[str], source: str, k: int, out: Path) -> Choice:
    if source == RANDOM:
        rows = random_choice(len(corpus.corpus), len(queries), k, config.seed)
        return Choice(rows, np.zeros(rows.shape))
    say(f"searching for {len(queries)} texts: {source}")
    if source == BM25:
        texts = [document.text for document in corpus.corpus.iterate()]
        return Choice(*Bm25Index(texts).search(queries, k))
    return _find_dense(
        config.run_config(), corpus, queries, k, _encoder_path(config, source), _root(config, source, out)
    )


def _find_dense(
    config: Config, corpus: Corpus, queries: Sequence[str], k: int, encoder_path: str, root: Path
) -> Choice:
    encoder = wiring.load_encoder(config, wiring.resolve_encoder_path(encoder_path))
    index = IndexService(root, wiring.index_settings(config))
    try:
        wiring.require_same_index(config, encoder, corpus, index.store)
        wiring.build_version(config, encoder, corpus, index, IndexState(0, 0))
        result = index.search(0, encoder.encode(list(queries)).numpy(), k)
    finally:
        index.close()
    return Choice(result.doc_rows, result.similarities)


def _encoder_path(config: EvaluationConfig, source: str) -> str:
    return config.retriever.path if source == REPLUG else config.retrievers[source]


def _root(config: EvaluationConfig, source: str, out: Path) -> Path:
    """`index.out` is the index of retriever.path, which `replug index` may have made; others have their own here."""
    given = config.index.out if source == REPLUG else None
    return Path(given).expanduser() if given else out / "index" / source


def write_choice(path: Path, choice: Choice) -> None:
    content = io.BytesIO()
    np.savez(content, doc_rows=choice.doc_rows, similarities=choice.similarities)
    replace_file(path, content.getvalue())


def read_choice(path: Path) -> Choice:
    with np.load(path, allow_pickle=False) as arrays:
        return Choice(arrays["doc_rows"], arrays["similarities"])
