"""Where documents help: language modelling under two methods, token by token (REPLUG, arXiv text, section 7.3).

With `texts.entities` the named entities among the tokens are compared by popularity: the paper's analysis is of one.

Where documents help: named entities in texts, by how popular they are (REPLUG, arXiv text, section 7.3).

The paper shows one text, in which the tokens of a rare name gain most from one document. Here every mention of a known
name counts: the gain of its tokens in bits, by the power of ten of the name's popularity, beside that of all tokens
that are no part of one. Pure.
"""

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from replug.config.errors import UserError
from replug.config.evaluation_schema import EvaluationConfig
from replug.config.methods import Method
from replug.data.files import replace_file
from replug.data.store import Corpus
from replug.evals.evidence import EvidenceBook
from replug.evals.intervals import Clusters, Interval, Ratio, interval_of
from replug.evals.kinds import EvalDataset, EvaluationKind, Finished
from replug.evals.outcomes import Row
from replug.evals.popqa_sets import popularity_bin, read_popqa
from replug.evals.results import clusters_of
from replug.evals.tables import Block, Table
from replug.evals.tasks.lm import lm_dataset, text_problems
from replug.evals.token_gain import (
    TokenGain,
    count_words,
    gains_by_rarity,
    rarity_bins,
    rarity_blocks,
    token_gain_page,
    token_gains,
)

NO_ENTITY = "no entity"
TITLES = ("entities", "mentions", "names", "tokens", "mean gain, bits a token", "95% interval")
_WORD = re.compile(r"\w+")
Words = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Mention:
    """A name in a text, from one character to another."""

    name: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class EntityBin:
    """Mentions of names of about the same popularity, how many names these are, and their tokens' mean gain in bits."""

    popularity: str
    num_mentions: int
    num_names: int
    num_tokens: int
    gain: Interval


class EntityNames:
    """Finds names by their words, as they are written: "Live" is a name, "live" is none."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names: dict[Words, str] = {}
        for name in names:
            if words := tuple(_WORD.findall(name)):
                self._names.setdefault(words, name)
        self._lengths: dict[str, list[int]] = {}
        for first, of in itertools.groupby(sorted(self._names), key=lambda words: words[0]):
            self._lengths[first] = sorted({len(words) for words in of}, reverse=True)

    def mentions(self, text: str) -> list[Mention]:
        """In order; of names that begin at one word the longest, and none within another."""
        words, place = list(_WORD.finditer(text)), 0
        found: list[Mention] = []
        while place < len(words):
            length = self._length_at(words, place)
            if length:
                names = tuple(word.group() for word in words[place : place + length])
                found.append(Mention(self._names[names], words[place].start(), words[place + length - 1].end()))
            place += max(1, length)
        return found

    def _length_at(self, words: Sequence[re.Match[str]], place: int) -> int:
        """Words of the longest name that begins there; 0 for none."""
        for length in self._lengths.get(words[place].group(), ()):
            name = tuple(word.group() for word in words[place : place + length])
            if len(name) == length and name in self._names:  # at the text's end a slice may be a shorter name
                return length
        return 0


def entity_bins(
    by_text: Sequence[Sequence[TokenGain]],
    popularity: Mapping[str, float],
    num_resamples: int = 10_000,
    seed: int = 0,
    clusters: Clusters | None = None,
) -> list[EntityBin]:
    """Mean gain by popularity, rising, and of all other tokens last. `popularity` is by name.

    A token belongs to a mention where it holds a character of it. Intervals are of a bootstrap over `clusters` of
    texts, by default each by itself.
    """
    names, clusters = EntityNames(popularity), clusters or Clusters.by_name(range(len(by_text)))
    parts = [part for row, gains in enumerate(by_text) for part in _parts(row, gains, names, popularity)]

    def rank(name: str) -> tuple[bool, int]:
        power = re.search(r"10\^(\d+)", name)  # of the bin's lower end
        return name == NO_ENTITY, int(power[1]) if power else -1

    order = sorted({part.bin for part in parts}, key=rank)
    return [_bin([part for part in parts if part.bin == name], clusters, num_resamples, seed) for name in order]


@dataclass(frozen=True, slots=True)
class _Part:
    """What a text has of one bin."""

    row: int  # of the text
    bin: str
    gains: tuple[float, ...]
    names: tuple[str, ...]


def _parts(
    row: int, gains: Sequence[TokenGain], names: EntityNames, popularity: Mapping[str, float]
) -> Iterator[_Part]:
    mentions = names.mentions("".join(gain.token for gain in gains))
    owners = _owners(gains, mentions)
    for name in dict.fromkeys([*(popularity_bin(popularity[one.name]) for one in mentions), NO_ENTITY]):
        own = [i for i, one in enumerate(mentions) if popularity_bin(popularity[one.name]) == name]
        wanted: set[int | None] = set(own) if name != NO_ENTITY else {None}
        some = tuple(gain.gain_bits for gain, owner in zip(gains, owners, strict=True) if owner in wanted)
        if some:
            yield _Part(row, name, some, tuple(mentions[i].name for i in own))


def _owners(gains: Sequence[TokenGain], mentions: Sequence[Mention]) -> list[int | None]:
    """For each token the first mention that it holds a character of."""
    owners: list[int | None] = []
    start = at = 0
    for gain in gains:
        end = start + len(gain.token)
        while at < len(mentions) and mentions[at].end <= start:
            at += 1
        owners.append(at if at < len(mentions) and mentions[at].start < end else None)
        start = end
    return owners


def _bin(parts: Sequence[_Part], clusters: Clusters, num_resamples: int, seed: int) -> EntityBin:
    """Of parts of one bin; the interval is over the texts that have some."""
    ratio = Ratio(np.array([sum(part.gains) for part in parts]), np.array([len(part.gains) for part in parts]))
    mentions = [one for part in parts for one in part.names]
    num_tokens = sum(len(part.gains) for part in parts)
    gain = interval_of(ratio, num_resamples, seed, clusters.among(np.array([part.row for part in parts])))
    return EntityBin(parts[0].bin, len(mentions), len(set(mentions)), num_tokens, gain)


def gains_by_popularity(bins: Iterable[EntityBin]) -> dict[str, dict]:
    """As entries of `results.json`: `entity_gain_bits/popularity 10^2-10^3` -> value, n (mentions), interval.

    Of `no entity` n is the number of tokens.
    """
    return {
        f"entity_gain_bits/{b.popularity}": {
            "value": b.gain.value,
            "n": b.num_mentions if b.popularity != NO_ENTITY else b.num_tokens,
            "interval": [b.gain.low, b.gain.high],
        }
        for b in bins
    }


def entity_table(bins: Iterable[EntityBin]) -> Table:
    """Return bins as a table."""
    rows = [
        [
            b.popularity,
            *(f"{count:,}" for count in (b.num_mentions, b.num_names, b.num_tokens)),
            f"{b.gain.value:+.3f}",
            f"{b.gain.low:+.3f} to {b.gain.high:+.3f}",
        ]
        for b in bins
    ]
    return Table(TITLES, rows)


def token_dataset(config: EvaluationConfig, corpus: Corpus | None) -> EvalDataset:
    if config.texts.entities:
        read_popularity(Path(config.texts.entities))  # a file that cannot be read is told before anything is measured
    return lm_dataset(config, corpus, with_tokens=True)


def token_problems(config: EvaluationConfig, methods: Sequence[Method]) -> Iterator[str]:
    if len(methods) != 2:
        yield f"methods has {len(methods)} entries; evaluation=tokens compares two, such as [none, replug]"
    yield from text_problems(config, methods)


def add_gains(finished: Finished) -> list[Block]:
    """The gain by rarity among the second method's results, and tokens.html, a coloured page."""
    config, book = finished.config, finished.book
    by_text = _gains_by_text(finished.rows, book)
    bins = rarity_bins(by_text, config.num_resamples, config.seed, clusters_of(finished.rows))
    finished.results[book.methods[1].name] |= gains_by_rarity(bins)
    replace_file(finished.folder.tokens, token_gain_page(by_text, bins).encode())
    if not config.texts.entities:
        return rarity_blocks(bins)
    popularity = read_popularity(Path(config.texts.entities))
    entities = entity_bins(by_text, popularity, config.num_resamples, config.seed, clusters_of(finished.rows))
    finished.results[book.methods[1].name] |= gains_by_popularity(entities)
    return [*rarity_blocks(bins), entity_table(entities)]


def read_popularity(path: Path) -> dict[str, float]:
    """Page views by subject, of a file of PopQA's. Raises UserError where it tells none."""
    found = {question.subject: question.subject_popularity for question in read_popqa(path.expanduser())}
    known = {subject: views for subject, views in found.items() if views is not None}
    if not known:
        raise UserError(f"texts.entities: {path} tells no popularity (s_pop) of its subjects; expected PopQA's table")
    return known


def _gains_by_text(rows: Sequence[Row], book: EvidenceBook) -> list[list[TokenGain]]:
    """The first method's probabilities against the second's."""
    before, after = (method.name for method in book.methods)
    counts = count_words(book.all_texts())
    gains = []
    for row in rows:
        first, second = row["methods"][before]["detail"], row["methods"][after]["detail"]
        without, with_documents = (np.array(detail["token_logprobs"]) for detail in (first, second))
        gains.append(token_gains(row["id"], first["token_texts"], without, with_documents, counts))
    return gains


EVALUATION = EvaluationKind(token_dataset, token_problems, has_sources=True, add_findings=add_gains)
