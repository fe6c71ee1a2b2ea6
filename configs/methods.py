"""How an evaluation's methods are written, and what each gives the LM to read.

none              no document
random, bm25      documents weighted evenly: what chose them has no similarity that REPLUG could weigh them by
genread           one document, which the LM itself writes for the question (Yu et al. 2023)
NAME              the ensemble of k documents of a retriever: `replug` (retriever.path), or a key of `retrievers`
SOURCE@3          three documents instead of k
SOURCE@3/concat   three documents one after the other in one prompt, the nearest last, next to the text
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from replug.configs.errors import UserError

NONE, RANDOM, BM25, GENREAD, REPLUG = "none", "random", "bm25", "genread", "replug"
GOLD, RERANKERS = "gold", ("direct", "rag", "rag_full", "noisy_channel", "poe")  # answering/rerankers.py
INTERNET_QA = "internet_qa"  # the evaluation whose methods these are
WITHOUT_RETRIEVER = (NONE, RANDOM, BM25, GENREAD)
METHOD = re.compile(r"(?P<source>[A-Za-z0-9_.-]+)(@(?P<k>[0-9]+))?(?P<concat>/concat)?")


@dataclass(frozen=True, slots=True)
class Method:
    """`source` is none, random, bm25, genread or a retriever's name; `k` documents, 0 for none."""

    name: str
    source: str
    k: int
    is_concatenated: bool

    @property
    def takes_from_corpus(self) -> bool:
        """Whether its documents are those of a corpus."""
        return self.source not in (NONE, GENREAD)

    @property
    def is_weighted(self) -> bool:
        """Whether similarities weigh the documents; else all weigh the same."""
        return self.source not in WITHOUT_RETRIEVER and not self.is_concatenated


def parse_methods(names: list[str], k: int, retrievers: Mapping[str, str]) -> list[Method]:
    """In the order given. Raises UserError for a name that is not of the form above, unknown, or there twice."""
    if not names:
        raise UserError("methods is empty; expected some of none, random, bm25, replug")
    methods = [_parse(name, k, retrievers) for name in names]
    for method in methods:
        if names.count(method.name) > 1:
            raise UserError(f"methods names {method.name} twice")
    return methods


def _parse(name: str, k: int, retrievers: Mapping[str, str]) -> Method:
    found = METHOD.fullmatch(name)
    if found is None:
        raise UserError(f"methods: {name!r} is not of the form SOURCE, SOURCE@K or SOURCE@K/concat, such as replug@3")
    source, number, concat = found["source"], int(found["k"] or k), bool(found["concat"])
    known = [*WITHOUT_RETRIEVER, *retrievers]
    if source not in known:
        raise UserError(
            f"methods: {name} is unknown; expected one of {', '.join(known)}; other retrievers are named by "
            "retrievers.NAME=PATH, and retriever.path is `replug`"
        )
    if source == NONE and (found["k"] or concat):
        raise UserError(f"methods: {name}; `none` has no documents, so neither a number nor concat")
    if source == GENREAD and (found["k"] not in (None, "1") or concat):
        raise UserError(f"methods: {name}; the LM writes one document, so expected `genread`")
    if number < 1:
        raise UserError(f"methods: {name}; expected at least one document")
    return Method(name, source, {NONE: 0, GENREAD: 1}.get(source, number), concat)
