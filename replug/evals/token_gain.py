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
from pathlib import Path
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
BIN_TITLES = ("tokens", "sources", "mean gain, bits", "95% interval", "minus all other tokens")
RARITY, POPULARITY = "times in the corpus", "popularity of the name"
_WORD = re.compile(r"\w+")
Words = tuple[str, ...]
# bin -> (mean gain of its tokens in bits, with the number of `clusters`; difference from the mean of all other tokens,
# None without others)
Bins = Mapping[str, tuple[Entry, Entry | None]]
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
    by_text: Sequence[Sequence[float] | np.ndarray],
    names: Sequence[Sequence[str]],
    seed: int = 0,
    clusters: Clusters | None = None,
    num_resamples: int = 10_000,
) -> Bins:
    """Return the mean gain of tokens by bin; `by_text` has the gain and `names` the bin of every token of every text.

    Intervals come from a bootstrap over `clusters` of texts, by default single texts: the tokens of a text are not
    independent. The interval of a mean uses texts with tokens of the bin, the interval of a difference all texts.
    P-values of the differences from the rest are corrected for the number of bins.
    """
    clusters = clusters or Clusters.by_name(range(len(by_text)))
    found = {name for own in names for name in own}
    sums, counts = ({name: np.zeros(len(by_text)) for name in found} for _ in range(2))
    for row, (gains, own) in enumerate(zip(by_text, names, strict=True)):
        bits: dict[str, list[float]] = {}
        for gain, name in zip(gains, own, strict=True):
            bits.setdefault(name, []).append(float(gain))
        for name, values in bits.items():
            sums[name][row], counts[name][row] = math.fsum(values), len(values)
    bins: dict[str, tuple[Entry, Entry | None]] = {}
    for name in sorted(found, key=_rank):
        rows = np.flatnonzero(counts[name])
        of_these, num_tokens = clusters.among(rows), int(counts[name].sum())
        mean = interval_of(Ratio(sums[name][rows], counts[name][rows]), num_resamples, seed, of_these)
        entry = {"value": mean.value, "n": num_tokens, "clusters": len(of_these), "interval": [mean.low, mean.high]}
        from_rest = None
        if rest := [other for other in sums if other != name]:
            others = Ratio(np.sum([sums[o] for o in rest], axis=0), np.sum([counts[o] for o in rest], axis=0))
            own_ratio = Ratio(sums[name], counts[name])
            difference, p = difference_and_p(own_ratio, others, num_resamples, seed, clusters)
            interval = [difference.low, difference.high]
            from_rest = {"value": difference.value, "n": num_tokens, "interval": interval, "p": p}
        bins[name] = entry, from_rest
    correct_for_many([rest for _, rest in bins.values() if rest is not None])
    return bins


def _rank(name: str) -> tuple[bool, int]:
    """Return the sort key of a bin: its first number; bins without a word or a name come last."""
    number = re.search(r"(?:10\^)?(\d+)", name)
    return name in (NO_WORD, NO_ENTITY), int(number[1]) if number else -1


def rarities(words: Sequence[str | None], counts: Mapping[str, int]) -> list[str]:
    """Return the bin of each token by the corpus frequency of its word: 0, 1-9, 10-99, ..., or NO_WORD."""
    names = []
    for word in words:
        count = counts.get(word, 0) if word is not None else 0
        digits = len(str(count)) if count else 0
        known = f"{10 ** (digits - 1)}-{10**digits - 1}" if digits else "0"
        names.append(NO_WORD if word is None else known)
    return names


def bin_table(title: str, bins: Bins, more: Mapping[str, Mapping[str, int]] | None = None) -> list[Block]:
    """Return bins as a table; `more` are further columns of counts, by title and bin."""
    more = more or {}
    rows = [
        [
            name,
            *(f"{counts.get(name, 0):,}" for counts in more.values()),
            *(f"{mean['n']:,}", f"{mean['clusters']:,}", f"{mean['value']:+.3f}"),
            "{:+.3f} to {:+.3f}".format(*mean["interval"]),
            "" if rest is None else difference_text(rest),
        ]
        for name, (mean, rest) in bins.items()
    ]
    foot = f"Verdicts on differences: Holm's correction for {len(bins)} comparisons."
    return [Table((title, *more, *BIN_TITLES), rows), foot]


def bin_entries(metric: str, bins: Bins) -> dict[str, Entry]:
    """Return entries of `results.json`: `gain_bits/1-9` -> value, n (tokens), interval, and `gain_bits/1-9 - rest`."""
    entries: dict[str, Entry] = {}
    for name, (mean, rest) in bins.items():
        entries |= {f"{metric}/{name}": mean} | ({f"{metric}/{name} - rest": rest} if rest else {})
    return entries


# Names of entities ------------------------------------------------------------------------------------------------


class EntityNames:
    """Find names by their words, case-sensitively: "Live" is a name, "live" is not."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names: dict[Words, str] = {}
        for name in names:
            if words := tuple(_WORD.findall(name)):
                self._names.setdefault(words, name)
        longest_first: dict[str, list[str]] = {}  # patterns by first word
        for words in sorted(self._names, key=len, reverse=True):
            longest_first.setdefault(words[0], []).append(r"\W+".join(words))
        self._patterns = {word: re.compile(rf"(?:{'|'.join(some)})\b") for word, some in longest_first.items()}

    def mentions(self, text: str) -> list[Mention]:
        """Return names in order, without overlaps; the longest of names with the same start."""
        found: list[Mention] = []
        for word in _WORD.finditer(text):
            pattern, is_free = self._patterns.get(word.group()), not found or word.start() >= found[-1][2]
            if is_free and pattern and (match := pattern.match(text, word.start())):
                found.append((self._names[tuple(_WORD.findall(match.group()))], *match.span()))
        return found


def popularities(tokens: Sequence[str], mentions: Sequence[Mention], popularity: Mapping[str, float]) -> list[str]:
    """Return the bin of each token by the popularity of its name, as powers of ten, or NO_ENTITY.

    A token belongs to a mention if they share a character.
    """
    owners = first_spans(tokens, [(start, end) for _, start, end in mentions])
    return [NO_ENTITY if owner is None else popularity_bin(popularity[mentions[owner][0]]) for owner in owners]


def read_popularity(path: str) -> dict[str, float]:
    """Return the page views of subjects in a PopQA file."""
    return {question.subject: question.popularity for question in read_popqa(Path(path).expanduser())}


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
        task._popularity = read_popularity(config.questions.path) if config.questions.path else {}
        return task

    def findings(self, rows: Sequence[Row], results: Results, folder: object) -> Blocks:
        """Add gains to the second method's results, and return their tables."""
        before, after = (method.name for method in self.book.methods)
        of = results[after]
        counts_of_words = Counter(word.lower() for text in self.book.all_texts() for word in _WORD.findall(text))
        tokens, by_text = [], []
        for row in rows:
            without, with_documents = (row["methods"][name]["detail"] for name in (before, after))
            tokens.append(without["token_texts"])
            by_text.append(gain_bits(without["token_logprobs"], with_documents["token_logprobs"]))
        resampling = self._config.seed, clusters_of(rows)
        bins = mean_gains(by_text, [rarities(words_of_tokens(own), counts_of_words) for own in tokens], *resampling)
        of |= bin_entries("gain_bits", bins)
        blocks = bin_table(RARITY, bins)
        if popularity := self._popularity:
            names = EntityNames(popularity)
            mentions = [names.mentions("".join(own)) for own in tokens]
            labels = [popularities(own, found, popularity) for own, found in zip(tokens, mentions, strict=True)]
            bins = mean_gains(by_text, labels, *resampling)
            found = [(popularity_bin(popularity[name]), name) for own in mentions for name, _, _ in own]
            counts = {"mentions": Counter(name for name, _ in found), "names": Counter(name for name, _ in set(found))}
            blocks += bin_table(POPULARITY, bins, counts)
            of |= bin_entries("entity_gain_bits", bins)
            for name, number in counts["mentions"].items():
                of[f"entity_gain_bits/{name}"]["n"] = number
        return blocks
