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

import itertools
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
    """Return the methods in order. Raises UserError for a malformed, unknown or repeated name."""
    _require_different(names, (NONE, RANDOM, BM25, REPLUG))
    return [_parse(name, k, retrievers) for name in names]


def _require_different(names: list[str], known: Sequence[str]) -> None:
    if not names:
        raise UserError(f"methods is empty; expected some of {', '.join(known)}")
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"methods names {name} twice; expected each method once")


def _parse(name: str, k: int, retrievers: Mapping[str, str]) -> Method:
    match = METHOD.fullmatch(name)
    if match is None:
        raise UserError(
            f"methods: {name!r} is not of the form SOURCE, SOURCE@K or SOURCE@K/WAY, such as replug@3; WAY is one of "
            f"{', '.join(WAYS)}"
        )
    source, number, way = match["source"], int(match["k"] or k), match["way"]
    source = source if source in retrievers else SYNONYMS.get(source, source)
    known = [*WITHOUT_RETRIEVER, *retrievers]
    if source == REPLUG and source not in known:
        raise UserError(
            f"methods: {name} is unknown, since retriever.path is missing; expected retriever.path=DIR for `replug`, "
            "or methods without it"
        )
    if source not in known:
        raise UserError(
            f"methods: {name} is unknown; expected one of {', '.join(known)}. Name other retrievers "
            "with retrievers.NAME=PATH"
        )
    if source == NONE and (match["k"] or way):
        raise UserError(f"methods: {name}; `{source}` reads no documents; expected no @K and no /{way or CONCAT}")
    if source == GENREAD and (match["k"] not in (None, "1") or way):
        raise UserError(f"methods: {name}; the LM writes one document; expected `genread`")
    if number < 1:
        raise UserError(f"methods: {name}; expected at least one document")
    if source == RANDOM and way == SOFTMAX:
        raise UserError(f"methods: {name}; random documents have no similarity for /softmax; expected random")
    weighting = way if way in (EVEN, SOFTMAX, POSTERIOR, VOTE) else None
    return Method(name, source, {NONE: 0, GENREAD: 1}.get(source, number), way == CONCAT, weighting)


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
    _require_different(names, (NONE, GOLD, *RERANKERS))
    methods = [_parse_answering(name, k) for name in names]
    for first, second in itertools.combinations(methods, 2):
        if (first.source, first.k) == (second.source, second.k):
            raise UserError(f"methods: {first.name} and {second.name} are the same; expected one of them")
    return methods


def _parse_answering(name: str, k: int) -> Method:
    source, at, number = name.partition("@")
    if source not in (NONE, GOLD, *RERANKERS):
        raise UserError(
            f"methods: {name} is unknown; expected one of {', '.join((NONE, GOLD, *RERANKERS))}, a reranker with its "
            "number of passages, such as poe@10"
        )
    if source in (NONE, GOLD):
        if at:
            raise UserError(f"methods: {name}; `{source}` reads no passages; expected no number")
        return Method(name, source, 0, False, reads_passages=True)
    if at and (not number.isdecimal() or int(number) < 1):
        raise UserError(f"methods: {name}; expected a number of passages, 1 or more, such as {source}@10")
    return Method(name, source, int(number) if at else k, False, reads_passages=True)
