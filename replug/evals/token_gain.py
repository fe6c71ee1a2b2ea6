"""Token gain: the benefit of documents for language modelling, token by token (REPLUG, arXiv text, section 7.3).

A token's gain is log2 p with documents minus log2 p without, in bits: above 0 the documents helped. Tokens are binned
by the frequency of their word in the corpus, and with PopQA's table as `questions.path` by the popularity of the name
that contains them: the paper shows one text, in which the tokens of a rare name gain most from one document.

To judge whether a bin gains more than the others, read the difference between its mean gain and that of all other
tokens; overlapping intervals do not answer it.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Self

import numpy as np

from replug.config.evaluation_schema import EvaluationConfig
from replug.config.methods import Method
from replug.data.store import Corpus
from replug.evals.intervals import Clusters, Ratio, difference_and_p, interval_of
from replug.evals.language_modelling import LanguageModelling, token_texts
from replug.evals.loop import Row
from replug.evals.popqa import popularity_bin, read_popqa
from replug.evals.results import Entry, Results, clusters_of, correct_for_many
from replug.evals.tables import Block, Blocks, Table, difference_text
from replug.models.lm_source import LMSource

NO_WORD, NO_ENTITY = "no word", "no entity"
REST = " - rest"
BIN_TITLES = ("tokens", "sources", "mean gain, bits", "95% interval", "minus all other tokens")
RARITY, POPULARITY = "times in the corpus", "popularity of the name"
_WORD = re.compile(r"\w+")
Mention = tuple[str, int, int]  # a name, and its start and end in a text


def words_of_tokens(tokens: Sequence[str]) -> list[str | None]:
    """Return for each token the first whole word that it overlaps, in lower case, else None."""
    words = list(_WORD.finditer("".join(tokens)))
    owners = first_spans(tokens, [word.span() for word in words])
    return [None if owner is None else words[owner].group().lower() for owner in owners]


def first_spans(tokens: Sequence[str], spans: Sequence[tuple[int, int]]) -> list[int | None]:
    """Return for each token the index of the first character span that it overlaps, else None."""
    found: list[int | None] = []
    start = at = 0
    for token in tokens:
        end = start + len(token)
        while at < len(spans) and spans[at][1] <= start:
            at += 1
        found.append(at if at < len(spans) and spans[at][0] < end else None)
        start = end
    return found


def gain_bits(without: Sequence[float], with_documents: Sequence[float]) -> np.ndarray:
    """Return the gain of T tokens in bits, from log-probs [T] (nats) without and with documents."""
    return (np.asarray(with_documents, np.float64) - np.asarray(without, np.float64)) / math.log(2)


def mean_gains(
    metric: str,
    by_text: Sequence[Sequence[float] | np.ndarray],
    names: Sequence[Sequence[str]],
    seed: int = 0,
    clusters: Clusters | None = None,
    num_resamples: int = 10_000,
) -> dict[str, Entry]:
    """Return the mean gain of tokens in bits by bin; `by_text` and `names` have the gain and the bin of every token.

    `METRIC/BIN` has the number of tokens `n` and of `clusters` with such tokens, and `METRIC/BIN - rest` the difference
    from all other tokens, if there are others, with a p-value corrected for the number of bins. Intervals come from a
    bootstrap over `clusters` of texts, by default single texts: the tokens of a text are not independent. The interval
    of a mean uses texts with tokens of the bin, the interval of a difference all texts.
    """
    clusters = clusters or Clusters.by_name(range(len(by_text)))
    bins = sorted({name for own in names for name in own}, key=_rank)
    sums, counts = np.zeros((2, len(bins), len(by_text)))
    for row, (gains, own) in enumerate(zip(by_text, names, strict=True)):
        places = [bins.index(name) for name in own]
        counts[:, row] = np.bincount(places, minlength=len(bins))
        sums[:, row] = np.bincount(places, gains, len(bins))
    entries: dict[str, Entry] = {}
    for place, name in enumerate(bins):
        rows, n = np.flatnonzero(counts[place]), int(counts[place].sum())
        own_clusters = clusters.among(rows)
        mean = interval_of(Ratio(sums[place][rows], counts[place][rows]), num_resamples, seed, own_clusters)
        interval = [mean.low, mean.high]
        entries[f"{metric}/{name}"] = {"value": mean.value, "n": n, "clusters": len(own_clusters), "interval": interval}
        if len(bins) > 1:
            rest = Ratio(sums.sum(0) - sums[place], counts.sum(0) - counts[place])
            difference, p = difference_and_p(Ratio(sums[place], counts[place]), rest, num_resamples, seed, clusters)
            interval = [difference.low, difference.high]
            entries[f"{metric}/{name}{REST}"] = {"value": difference.value, "n": n, "interval": interval, "p": p}
    correct_for_many([entry for name, entry in entries.items() if name.endswith(REST)])
    return entries


def _rank(name: str) -> tuple[bool, int]:
    """Return the sort key of a bin: its first number; bins without a word or a name come last."""
    number = re.search(r"(?:10\^)?(\d+)", name)
    return name in (NO_WORD, NO_ENTITY), int(number[1]) if number else -1


def rarities(words: Sequence[str | None], counts: Mapping[str, int]) -> list[str]:
    """Return the bin of each token by the corpus frequency of its word: 0, 1-9, 10-99, ..., or NO_WORD."""
    names = []
    for word in words:
        count = counts.get(word, 0) if word is not None else 0
        low = 10 ** (len(str(count)) - 1)
        known = f"{low}-{10 * low - 1}" if count else "0"
        names.append(NO_WORD if word is None else known)
    return names


def bin_table(title: str, entries: Mapping[str, Entry], more: Mapping[str, Mapping[str, int]] | None = None) -> Table:
    """Return the entries of `mean_gains` as a table; `more` are further columns of counts, by title and bin."""
    more, rows = more or {}, []
    for name, mean in entries.items():
        if not name.endswith(REST):
            label, rest = name.partition("/")[2], entries.get(f"{name}{REST}")
            counts = [f"{counts.get(label, 0):,}" for counts in more.values()]
            counts += [f"{mean['n']:,}", f"{mean['clusters']:,}", f"{mean['value']:+.3f}"]
            interval = "{:+.3f} to {:+.3f}".format(*mean["interval"])
            rows.append([label, *counts, interval, difference_text(rest) if rest else ""])
    return Table((title, *more, *BIN_TITLES), rows)


# Names of entities ------------------------------------------------------------------------------------------------


class EntityNames:
    """Find names by their words, case-sensitively: "Live" is a name, "live" is not."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names: dict[tuple[str, ...], str] = {}
        for name in names:
            self._names.setdefault(tuple(_WORD.findall(name)), name)
        self._longest = max(map(len, self._names), default=0)

    def mentions(self, text: str) -> list[Mention]:
        """Return names in order, without overlaps; the longest of names with the same start."""
        words, found, at = [*_WORD.finditer(text)], list[Mention](), 0
        while at < len(words):
            known = [word.group() for word in words[at : at + self._longest]]
            lengths = (num for num in range(len(known), 0, -1) if tuple(known[:num]) in self._names)
            if num := next(lengths, 0):
                name = self._names[tuple(known[:num])]
                found.append((name, words[at].start(), words[at + num - 1].end()))
            at += max(num, 1)
        return found


def popularities(tokens: Sequence[str], mentions: Sequence[Mention], popularity: Mapping[str, float]) -> list[str]:
    """Return the bin of each token by the popularity of its name, as powers of ten, or NO_ENTITY.

    A token belongs to a mention if they share a character.
    """
    owners = first_spans(tokens, [(start, end) for _, start, end in mentions])
    return [NO_ENTITY if owner is None else popularity_bin(popularity[mentions[owner][0]]) for owner in owners]


# The evaluation ---------------------------------------------------------------------------------------------------


class TokenGain(LanguageModelling):
    """Language modelling with token texts in the outcomes, for gains by token."""

    reads = (*LanguageModelling.reads, "questions.path")
    _config: EvaluationConfig
    _popularity: Mapping[str, float]  # of entities; empty without questions.path

    @classmethod
    def problems(cls, config: EvaluationConfig, methods: Sequence[Method]) -> Iterator[str]:
        if len(methods) != 2:
            yield f"methods has {len(methods)} entries; evaluation=token_gain compares two, such as [none, replug]"
        yield from super().problems(config, methods)

    @classmethod
    def of(cls, config: EvaluationConfig, corpus: Corpus | None, source: LMSource | None) -> Self:
        task = super().of(config, corpus, source)
        task._tokens_of, task._config = token_texts(config.lm), config
        task._popularity = (
            {one.subject: one.popularity for one in read_popqa(config.questions.path)} if config.questions.path else {}
        )
        return task

    def findings(self, rows: Sequence[Row], results: Results, folder: object) -> Blocks:
        """Add gains to the second method's results, and return their tables."""
        before, after = (method.name for method in self.book.methods)
        counts_of_words = Counter(word.lower() for text in self.book.all_texts() for word in _WORD.findall(text))
        tokens, by_text = [], []
        for row in rows:
            without, with_documents = (row["methods"][name]["detail"] for name in (before, after))
            tokens.append(without["token_texts"])
            by_text.append(gain_bits(without["token_logprobs"], with_documents["token_logprobs"]))
        words = [rarities(words_of_tokens(own), counts_of_words) for own in tokens]
        resampling = self._config.seed, clusters_of(rows)
        entries = mean_gains("gain_bits", by_text, words, *resampling)
        blocks: list[Block] = [bin_table(RARITY, entries)]
        if popularity := self._popularity:
            names = EntityNames(popularity)
            mentions = [names.mentions("".join(own)) for own in tokens]
            labels = [popularities(own, found, popularity) for own, found in zip(tokens, mentions, strict=True)]
            of_names = mean_gains("entity_gain_bits", by_text, labels, *resampling)
            found = [(popularity_bin(popularity[name]), name) for own in mentions for name, _, _ in own]
            counts = {"mentions": Counter(name for name, _ in found), "names": Counter(name for name, _ in set(found))}
            blocks.append(bin_table(POPULARITY, of_names, counts))
            entries |= of_names
        results[after] |= entries
        return [*blocks, "Verdicts on differences: Holm's correction for the bins of a table."]
