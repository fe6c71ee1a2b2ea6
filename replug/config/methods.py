"""Parse the names of an evaluation's methods.

none                no document
random, bm25        documents of equal weight
genread             one document that the LM writes for the question (Yu et al. 2023)
NAME                the ensemble of k documents of a retriever: `replug` (retriever.path) or a key of `retrievers`
untuned, tuned      synonyms of `replug` and `lsr`
SOURCE@3            three documents instead of k
SOURCE@3/concat     three documents in one prompt, the nearest last
SOURCE@3/even       three documents of equal weight
SOURCE@3/softmax    three documents weighted by the softmax of their similarities or BM25 scores
SOURCE@3/posterior  as SOURCE@3, with weights that follow the text (models/ensemble.py)
SOURCE@3/vote       three documents; the answers from each vote (models/generation.py)

`bm25@1` is in-context RALM (Ram et al. 2023).

`evaluation=internet_qa` (Lazaridou et al. 2022) has its own methods:

none                closed book: the most likely of many sampled answers
gold                the same, from the evidence of the data set
RERANKER@10         the best answer sampled from ten passages, by direct, rag, noisy_channel or poe
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from replug.config.errors import UserError

NONE, RANDOM, BM25, GENREAD, REPLUG = "none", "random", "bm25", "genread", "replug"
GOLD, RERANKERS = "gold", ("direct", "rag", "noisy_channel", "poe")  # answering/answerer.py
WEB_ENGINES = ("brave", "searxng")  # of `web.engine`, beside local
INTERNET_QA = "internet_qa"  # an evaluation with its own methods
SYNONYMS = {"untuned": REPLUG, "tuned": "lsr"}  # unless a retriever has that name
WITHOUT_RETRIEVER = (NONE, RANDOM, BM25, GENREAD)
WAYS = CONCAT, EVEN, SOFTMAX, POSTERIOR, VOTE = "concat", "even", "softmax", "posterior", "vote"
METHOD = re.compile(rf"(?P<source>[A-Za-z0-9_.-]+)(@(?P<k>[0-9]+))?(/(?P<way>{'|'.join(WAYS)}))?")

ANSWERING = re.compile(rf"{NONE}|{GOLD}|(?P<reranker>{'|'.join(RERANKERS)})(@(?P<k>[1-9][0-9]*))?")


@dataclass(frozen=True, slots=True)
class Method:
    """`source` is none, random, bm25, genread or a retriever's name; `k` documents, 0 for none.

    `weighting` is even, softmax, posterior or vote if the name ends so, else None. A method of
    `evaluation=internet_qa` reads passages of a search engine: its source is none, gold or a reranker.
    """

    name: str
    source: str
    k: int
    is_concatenated: bool
    weighting: str | None = None
    reads_passages: bool = False

    @property
    def takes_from_corpus(self) -> bool:
        """Return whether the method reads documents of a corpus."""
        return not self.reads_passages and self.source not in (NONE, GENREAD)

    @property
    def is_weighted(self) -> bool:
        """Return whether similarities weigh the documents; otherwise all have the same weight at first."""
        if self.is_concatenated or self.reads_passages:
            return False
        return self.weighting == SOFTMAX or (self.weighting != EVEN and self.source not in WITHOUT_RETRIEVER)

    @property
    def follows_text(self) -> bool:
        """Return whether the weights of the documents follow the text."""
        return self.weighting == POSTERIOR

    @property
    def votes(self) -> bool:
        """Return whether the answers of the documents vote; otherwise their predictions are mixed."""
        return self.weighting == VOTE

    @property
    def num_mixed(self) -> int:
        """Return the number of documents mixed side by side; 1 if the LM only answers."""
        return 1 if self.is_concatenated or self.votes else self.k

    @property
    def series(self) -> str:
        """Return the name without a number: methods of a series differ by their number of documents alone."""
        return "/".join([self.source, *self.name.split("/")[1:]])


def parse_methods(names: list[str], k: int, retrievers: Mapping[str, str]) -> list[Method]:
    """Return the methods in order. Raises UserError for an unknown or repeated name, or one that says too much."""
    return _all_different([_parse(name, k, retrievers) for name in names])


def _all_different(methods: list[Method]) -> list[Method]:
    if not methods:
        raise UserError("methods is empty; expected some, such as none")
    for place, method in enumerate(methods):
        if method in methods[:place]:
            raise UserError(f"methods names {method.name} twice; expected each method once")
    return methods


def _parse(name: str, k: int, retrievers: Mapping[str, str]) -> Method:
    match, known = METHOD.fullmatch(name), [*WITHOUT_RETRIEVER, *retrievers]
    source = match["source"] if match else name
    source = source if source in retrievers else SYNONYMS.get(source, source)
    if match is None or source not in known:
        raise UserError(
            f"methods: {name} is unknown; expected SOURCE, SOURCE@K or SOURCE@K/WAY with SOURCE one of "
            f"{', '.join(known)} and WAY one of {', '.join(WAYS)}. retriever.path=DIR gives `replug`, and "
            "retrievers.NAME=PATH another SOURCE"
        )
    number, way = int(match["k"] or k), match["way"]
    read = {NONE: 0, GENREAD: 1}.get(source, number)
    is_fixed = source in (NONE, GENREAD)
    if is_fixed and (way or match["k"] not in (None, str(read or None))):
        raise UserError(f"methods: {name}; `{source}` has {read} documents; expected `{source}` alone")
    if number < 1 or (source, way) == (RANDOM, SOFTMAX):
        raise UserError(f"methods: {name}; expected at least one document, and of random ones no /softmax")
    weighting = way if way in (EVEN, SOFTMAX, POSTERIOR, VOTE) else None
    return Method(name, source, read, way == CONCAT, weighting)


def meaningful_comparisons(methods: Sequence[Method]) -> list[tuple[str, str]]:
    """Return the comparisons (other, method) that have one cause, in the order of `methods`.

    A method is compared with the first, with no retrieval, and with earlier methods that differ in one thing: source,
    number or reading of the documents. Within a series of numbers each is compared with the one before it.
    """
    # A difference with two causes, such as lsr/posterior − replug, isolates neither. It would only make Holm's
    # correction stricter for the useful comparisons.
    pairs = []
    for place, method in enumerate(methods):
        series = [other for other in methods[:place] if other.series == method.series]
        for other in methods[:place]:
            is_base = other is methods[0] or NONE in (other.source, method.source)
            is_one_cause = other in series[-1:] or (other not in series and _differ_in_one(other, method))
            if is_base or is_one_cause:
                pairs.append((other.name, method.name))
    return pairs


def _differ_in_one(other: Method, method: Method) -> bool:
    """Return whether methods with equal numbers of documents (or none) share their source or their reading."""
    readings = {(one.is_concatenated, one.weighting) for one in (other, method)}
    read = {one.k for one in (other, method)} - {0}
    return len(read) <= 1 and (len(readings) == 1 or other.source == method.source)


def parse_answering_methods(names: list[str], k: int) -> list[Method]:
    """Return the methods of `internet_qa` in order. Raises UserError for an unknown or repeated name."""
    return _all_different([_parse_answering(name, k) for name in names])


def _parse_answering(name: str, k: int) -> Method:
    match = ANSWERING.fullmatch(name)
    if match is None:
        raise UserError(
            f"methods: {name} is unknown; expected one of {', '.join((NONE, GOLD, *RERANKERS))}, a reranker with its "
            "number of passages, such as poe@10"
        )
    reranker, number = match["reranker"], int(match["k"] or k)
    return Method(name, reranker or name, number if reranker else 0, False, reads_passages=True)
