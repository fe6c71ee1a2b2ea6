"""Where documents help: each token's change of probability, by token, by its word's rarity, and as a coloured text.

A token's gain is log2 p with documents minus log2 p without, in bits: above 0 the documents helped. Pure.

Whether words of one rarity gain more than others is what the difference of their mean gain from that of all other
tokens says; that two intervals overlap says nothing of it.
"""

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from replug.evals.intervals import Clusters, Interval, Ratio, difference_and_p, interval_of
from replug.evals.results import Entry, correct_for_many
from replug.evals.tables import Block, Html, Table, difference_text, html_page

HELPED, HURT = "46,125,50", "198,40,40"  # green and red
FULL_COLOUR_BITS = 4.0
NO_WORD = "no word"
RARITY_TITLES = (
    "times in the corpus",
    "tokens",
    "sources",
    "mean gain, bits",
    "95% interval",
    "minus all other tokens",
)
_WORD = re.compile(r"\w+")

TOKEN_CSS = """
.text { white-space: pre-wrap; background: #fff; border: 1px solid #ddd; padding: .6rem .8rem; border-radius: 6px; }
"""


@dataclass(frozen=True, slots=True)
class TokenGain:
    """One token: its word (None for punctuation and space), how often the corpus has that, and both probabilities."""

    text_id: str
    position: int
    token: str
    word: str | None
    count: int | None
    probability_without: float
    probability_with: float
    gain_bits: float


@dataclass(frozen=True, slots=True)
class RarityBin:
    """Tokens whose words the corpus has about as often, and their mean gain in bits with its interval.

    `num_sources` texts hold them. `from_rest` is the difference from the mean gain of all other tokens, as an entry of
    `results.json`; None where there are no others.
    """

    count_range: str
    num_tokens: int
    num_sources: int
    gain: Interval
    from_rest: Entry | None


def count_words(texts: Iterable[str]) -> Counter[str]:
    """How often texts hold each word, as `token_gains` cuts words: runs of word characters in lower case."""
    return Counter(word.lower() for text in texts for word in _WORD.findall(text))


def token_gains(
    text_id: str, tokens: Sequence[str], without: np.ndarray, with_documents: np.ndarray, counts: Mapping[str, int]
) -> list[TokenGain]:
    """Every token of a text in order, from its T tokens, which join to it, and their log-probs [T] in nats each way.

    A word that `counts` does not hold occurs 0 times. Raises ValueError where tokens and log-probs are not as many.
    """
    if not len(tokens) == len(without) == len(with_documents):
        raise ValueError(f"{text_id}: {len(tokens)} tokens, but another number of log-probs")
    gains = (np.asarray(with_documents, np.float64) - np.asarray(without, np.float64)) / math.log(2)
    return [
        TokenGain(
            text_id=text_id,
            position=position,
            token=token,
            word=word,
            count=None if word is None else counts.get(word, 0),
            probability_without=math.exp(without[position]),
            probability_with=math.exp(with_documents[position]),
            gain_bits=float(gains[position]),
        )
        for position, (token, word) in enumerate(zip(tokens, words_of_tokens(tokens), strict=True))
    ]


def words_of_tokens(tokens: Sequence[str]) -> list[str | None]:
    """For each token the first word, in lower case, that it is a part of; None where it holds no word character."""
    words = list(_WORD.finditer("".join(tokens)))
    found: list[str | None] = []
    start = at = 0
    for token in tokens:
        while at < len(words) and words[at].end() <= start:
            at += 1
        begins = at < len(words) and words[at].start() < start + len(token)
        found.append(words[at].group().lower() if begins else None)
        start += len(token)
    return found


def most_changed(gains: Iterable[TokenGain], num: int) -> tuple[list[TokenGain], list[TokenGain]]:
    """The tokens that gained most, and those that lost most; equal ones in the order given."""
    ordered = sorted(gains, key=lambda gain: gain.gain_bits)
    helped = [gain for gain in sorted(ordered, key=lambda gain: -gain.gain_bits) if gain.gain_bits > 0]
    return helped[:num], [gain for gain in ordered if gain.gain_bits < 0][:num]


def rarity_bins(
    by_text: Sequence[Sequence[TokenGain]],
    num_resamples: int = 10_000,
    seed: int = 0,
    clusters: Clusters | None = None,
) -> list[RarityBin]:
    """Mean gain by how often the corpus has the word: 0, 1-9, 10-99, ..., and tokens without a word last.

    Intervals are of a bootstrap over `clusters` of texts, by default each by itself: the tokens of a text are not
    independent. P-values of the differences from the rest are corrected for the number of bins.
    """
    clusters = clusters or Clusters.by_name(range(len(by_text)))
    sums, counts = _sums_by_digits(by_text)
    bins = [_bin(digits, sums, counts, clusters, (num_resamples, seed)) for digits in sorted(sums)]
    correct_for_many([one.from_rest for one in bins if one.from_rest is not None])
    return bins


def _sums_by_digits(by_text: Sequence[Sequence[TokenGain]]) -> tuple[dict[float, np.ndarray], dict[float, np.ndarray]]:
    """Gains added up, and their number, [N] of N texts, by digits of the number of times that the corpus has a word."""
    found = {_digits(gain) for gains in by_text for gain in gains}
    sums, counts = ({digits: np.zeros(len(by_text)) for digits in found} for _ in range(2))
    for row, gains in enumerate(by_text):
        for digits, some in itertools.groupby(sorted(gains, key=_digits), key=_digits):
            values = [gain.gain_bits for gain in some]
            sums[digits][row], counts[digits][row] = math.fsum(values), len(values)
    return sums, counts


def _bin(
    digits: float,
    sums: Mapping[float, np.ndarray],
    counts: Mapping[float, np.ndarray],
    clusters: Clusters,
    resampling: tuple[int, int],
) -> RarityBin:
    """The interval of its own gain is over the texts that hold such tokens; that of the difference is over all."""
    rows = np.flatnonzero(counts[digits])
    of_these = clusters.among(rows)
    gain = interval_of(Ratio(sums[digits][rows], counts[digits][rows]), *resampling, of_these)
    rest = [other for other in sums if other != digits]
    num_tokens = int(counts[digits].sum())
    if not rest:
        return RarityBin(_count_range(digits), num_tokens, len(of_these), gain, None)
    others = Ratio(sum(sums[other] for other in rest), sum(counts[other] for other in rest))  # type: ignore[arg-type]
    difference, p = difference_and_p(Ratio(sums[digits], counts[digits]), others, *resampling, clusters)
    entry = {"value": difference.value, "n": num_tokens, "interval": [difference.low, difference.high], "p": p}
    return RarityBin(_count_range(digits), num_tokens, len(of_these), gain, entry)


def gains_by_rarity(bins: Iterable[RarityBin]) -> dict[str, Entry]:
    """As entries of `results.json`: `gain_bits/1-9` -> value, n (tokens), interval, and `gain_bits/1-9 - rest`."""
    entries: dict[str, Entry] = {}
    for b in bins:
        interval = [b.gain.low, b.gain.high]
        of = {"value": b.gain.value, "n": b.num_tokens, "clusters": b.num_sources, "interval": interval}
        entries[f"gain_bits/{b.count_range}"] = of
        if b.from_rest is not None:
            entries[f"gain_bits/{b.count_range} - rest"] = b.from_rest
    return entries


def rarity_blocks(bins: Sequence[RarityBin]) -> list[Block]:
    """Return bins as a table."""
    foot = f"Verdicts on differences: Holm's correction for {len(bins)} comparisons."
    return [Table(RARITY_TITLES, list(map(_cells, bins))), foot]


def _cells(b: RarityBin) -> list[str]:
    interval = f"{b.gain.low:+.3f} to {b.gain.high:+.3f}"
    from_rest = "" if b.from_rest is None else difference_text(b.from_rest)
    return [b.count_range, f"{b.num_tokens:,}", f"{b.num_sources:,}", f"{b.gain.value:+.3f}", interval, from_rest]


def token_gain_page(by_text: Sequence[Sequence[TokenGain]], bins: Sequence[RarityBin], num_rows: int = 20) -> str:
    """One self-contained page: gain by rarity, the tokens that changed most, and every text with coloured tokens."""
    helped, hurt = most_changed((gain for gains in by_text for gain in gains), num_rows)
    coloured = [
        Html(f"<h3>{escape(gains[0].text_id)}</h3><div class=text>{''.join(map(_span, gains))}</div>")
        for gains in by_text
        if gains
    ]
    legend = (
        "Green: more probable with documents; red: less. Full colour at "
        f"{FULL_COLOUR_BITS:.0f} bits. Point at a token for its probabilities."
    )
    sections: dict[str, Sequence[Block]] = {
        "By rarity of the word": rarity_blocks(bins),
        "Helped most": [_token_table(helped)],
        "Hurt most": [_token_table(hurt)],
        "Texts": [legend, *coloured],
    }
    return html_page("What documents do for each token", sections, TOKEN_CSS)


def _digits(gain: TokenGain) -> float:
    """Of the number of times that the corpus has the word; 0 for none, infinity where there is no word."""
    return math.inf if gain.count is None else len(str(gain.count)) if gain.count else 0


def _count_range(digits: float) -> str:
    if math.isinf(digits):
        return NO_WORD
    return f"{10 ** (int(digits) - 1)}-{10 ** int(digits) - 1}" if digits else "0"


def _token_table(gains: Sequence[TokenGain]) -> Table:
    rows = [
        [
            *(repr(gain.token), gain.word or "", "" if gain.count is None else f"{gain.count:,}"),
            *(f"{gain.probability_without:.4g}", f"{gain.probability_with:.4g}"),
            *(f"{gain.gain_bits:+.2f}", gain.text_id),
        ]
        for gain in gains
    ]
    return Table(("token", "word", "times in the corpus", "p without", "p with", "gain, bits", "text"), rows)


def _span(gain: TokenGain) -> str:
    colour = HELPED if gain.gain_bits > 0 else HURT
    opacity = min(1.0, abs(gain.gain_bits) / FULL_COLOUR_BITS)
    title = f"p {gain.probability_without:.4g} → {gain.probability_with:.4g}, {gain.gain_bits:+.2f} bits"
    return f'<span title="{title}" style="background:rgba({colour},{opacity:.2f})">{escape(gain.token)}</span>'
