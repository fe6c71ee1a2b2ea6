"""The files of a rehearsal: a tiny encoder, and a prepared set with as many files as the run's, of a few short rows."""

from pathlib import Path

import numpy as np

from replug.config.schema import RetrieverConfig
from replug.data.files import file_sha256
from replug.data.manifest import write_mark
from replug.data.prepare.assembly import write_ids_of
from replug.data.records import Document, Window
from replug.data.shards import (
    DOCUMENT_SCHEMA,
    shard_paths,
    token_paths,
    write_rows,
    write_token_rules,
    write_windows,
)
from replug.data.sources.built_in_texts import stand_in_vocabulary
from replug.data.tokenizing import TokenIds
from replug.models.build import load_encoder
from replug.models.stand_in_encoder import write_stand_in_encoder
from replug.rehearsal.scaling import WIDTH, CorpusFiles

WORDS_PER_TEXT = 6


def write_stand_ins(retriever: Path, prepared: Path, files: CorpusFiles, num_queries: int, num_heldout: int) -> None:
    """The encoder's folder and the prepared set's."""
    write_stand_in_encoder(retriever, hidden_size=WIDTH, num_layers=1)
    rule = load_encoder(RetrieverConfig(path=str(retriever))).token_rule
    texts = _Texts()
    _write_documents(prepared / "documents", files, rule, texts)
    for split, count in (("queries", num_queries), ("heldout", num_heldout)):
        write_windows(prepared / f"{split}.arrow", (texts.window(split, number) for number in range(count)))
    _write_manifest(prepared, {"documents": files.documents, "queries": num_queries, "heldout": num_heldout})


class _Texts:
    """Short texts, the same in every rehearsal."""

    def __init__(self) -> None:
        self._rng, self._topics = np.random.default_rng(0), np.array(stand_in_vocabulary())

    def document(self, number: int) -> Document:
        return Document(f"document-{number}", self._text(), "stand_in", f"source-{number}")

    def window(self, split: str, number: int) -> Window:
        return Window(f"{split}-{number}", self._text(), f" {self._text()}", "stand_in", f"{split}-source-{number}")

    def _text(self) -> str:
        return " ".join(self._rng.choice(self._rng.choice(self._topics), WORDS_PER_TEXT))


def _write_documents(folder: Path, files: CorpusFiles, rule: TokenIds, texts: _Texts) -> None:
    folder.mkdir(parents=True)
    ends = np.linspace(0, files.documents, files.shards + 1).round().astype(int)
    for shard in range(files.shards):
        documents = [texts.document(number) for number in range(ends[shard], ends[shard + 1])]
        path = folder / f"{shard:05d}.arrow"
        write_rows(path, DOCUMENT_SCHEMA, documents)
        write_ids_of(path, documents, rule)
    write_token_rules(folder, rule.fingerprint)


def _write_manifest(prepared: Path, counts: dict[str, int]) -> None:
    documents = prepared / "documents"
    paths = [path for shard in shard_paths(documents) for path in (shard, *token_paths(shard))]
    paths += [documents / "tokens.json", prepared / "queries.arrow", prepared / "heldout.arrow"]
    manifest = {
        "counts": counts,
        "disjoint": {"shared_sources": [], "equal_texts": []},
        "files": {str(path.relative_to(prepared)): file_sha256(path) for path in paths},
    }
    write_mark(prepared / "manifest.json", manifest)
