"""Where documents help: language modelling under two methods, token by token (REPLUG, arXiv text, section 7.3).

With `texts.entities` the named entities among the tokens are compared by popularity: the paper's analysis is of one.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from replug.config.errors import UserError
from replug.config.evaluation_schema import EvaluationConfig
from replug.config.methods import Method
from replug.data.files import replace_file
from replug.data.store import Corpus
from replug.evals.comparison import clusters_of
from replug.evals.entity_gain import entity_bins, entity_lines, gains_by_popularity
from replug.evals.evidence import EvidenceBook
from replug.evals.kinds import EvalDataset, EvaluationKind, Finished
from replug.evals.outcomes import Row
from replug.evals.popqa.questions import read_popqa
from replug.evals.tasks.lm import lm_dataset, text_problems
from replug.evals.token_gain import (
    ScoredText,
    TokenGain,
    count_words,
    gains_by_rarity,
    rarity_bins,
    rarity_lines,
    token_gain_page,
    token_gains,
)


def token_dataset(config: EvaluationConfig, corpus: Corpus | None) -> EvalDataset:
    if config.texts.entities:
        read_popularity(Path(config.texts.entities))  # a file that cannot be read is told before anything is measured
    return lm_dataset(config, corpus, with_tokens=True)


def token_problems(config: EvaluationConfig, methods: Sequence[Method]) -> Iterator[str]:
    if len(methods) != 2:
        yield f"methods has {len(methods)} entries; evaluation=tokens compares two, such as [none, replug]"
    yield from text_problems(config, methods)


def add_gains(finished: Finished) -> str:
    """The gain by rarity among the second method's results, and tokens.html, a coloured page."""
    config, book = finished.config, finished.book
    by_text = _gains_by_text(finished.rows, book)
    bins = rarity_bins(by_text, config.num_resamples, config.seed, clusters_of(finished.rows))
    finished.results[book.methods[1].name] |= gains_by_rarity(bins)
    replace_file(finished.folder.tokens, token_gain_page(by_text, bins).encode())
    return rarity_lines(bins) + _entity_gains(finished, by_text)


def _entity_gains(finished: Finished, by_text: Sequence[Sequence[TokenGain]]) -> str:
    config, book = finished.config, finished.book
    if not config.texts.entities:
        return ""
    popularity = read_popularity(Path(config.texts.entities))
    bins = entity_bins(by_text, popularity, config.num_resamples, config.seed, clusters_of(finished.rows))
    finished.results[book.methods[1].name] |= gains_by_popularity(bins)
    return entity_lines(bins)


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
    texts = (
        ScoredText(
            row["id"],
            tuple(row["methods"][before]["detail"]["token_texts"]),
            np.array(row["methods"][before]["detail"]["token_logprobs"]),
            np.array(row["methods"][after]["detail"]["token_logprobs"]),
        )
        for row in rows
    )
    return [token_gains(text, counts) for text in texts]


EVALUATION = EvaluationKind(token_dataset, token_problems, has_sources=True, add_findings=add_gains)
