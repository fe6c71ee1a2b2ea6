"""Language modelling: how well texts are predicted, in bits per byte and perplexity (REPLUG, section 6.1)."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from replug.config.evaluation_schema import EvaluationConfig, TextsConfig
from replug.config.methods import LONG_CONTEXT, REPLUG, WITHOUT_RETRIEVER, Method
from replug.data.records import Example
from replug.data.store import Corpus
from replug.evals.evidence import Evidence, EvidenceBook, texts_of
from replug.evals.headroom import BETA, ORACLES, Headroom, headroom_lines, oracle_bits
from replug.evals.intervals import bits_of
from replug.evals.kinds import EvalDataset, EvaluationKind, Finished, PromptedLM
from replug.evals.loop import Item, Metric, Outcome, Outcomes
from replug.evals.questions import unasked_problems
from replug.evals.spans import ScoredSpan, scored_span
from replug.models.black_box_lm import AsyncLM, ContinuationScore
from replug.models.ensemble import mix_token_logprobs
from replug.models.prompt import PromptTemplate

BITS_PER_BYTE = Metric("bits", "bytes")


class LanguageModelling:
    """A `Task`: continuations of examples, after their contexts. A document that several methods use is scored once."""

    metrics: Mapping[str, Metric] = {
        "bpb": BITS_PER_BYTE,
        "token_perplexity": Metric("bits", "tokens", np.exp2),  # tokens of the LM
        "word_perplexity": Metric("bits", "words", np.exp2),  # words and line ends of the original text
        **{f"bpb_{name}": Metric(bits, "bytes", may_be_unknown=True) for name, bits in ORACLES.items()},
    }

    def __init__(
        self,
        lm: AsyncLM,
        template: PromptTemplate,
        examples: Sequence[Example],
        tokens_of: Callable[[str], list[str]] | None = None,
        keeps_documents: bool = False,
        beta: float = BETA,
    ) -> None:
        """With `tokens_of`, which cuts a text into the LM's tokens, outcomes hold their texts.

        Those that keep documents hold `document_logprobs`, an array [K, T], and are not to be written as JSON. `beta`
        is the temperature of the oracle that weighs documents by the LM's own scores.
        """
        self._lm, self._template, self._tokens_of = lm, template, tokens_of
        self._keeps_documents, self._beta = keeps_documents, beta
        self._spans = [scored_span(example) for example in examples]
        self.examples = items_of(self._spans)

    def groups(self, example: Item) -> tuple[str, ...]:
        return (example.group,)

    def compared(self, row: int) -> tuple[str, ...]:
        span = self._spans[row]
        return span.context + span.continuation, span.continuation

    def shown(self, row: int, method: str, evidence: Evidence) -> dict[str, Any]:
        span = self._spans[row]
        prefixes = self._prefixes(span, {method: evidence})
        return {"references": [span.continuation], "prompt": prefixes[evidence.texts[0], evidence.has_long_context]}

    def submit(self, row: int, evidence: Mapping[str, Evidence]) -> Callable[[], Outcomes]:
        span = self._spans[row]
        prefixes = self._prefixes(span, evidence)
        asked = list(dict.fromkeys(prefixes.values()))
        future = self._lm.submit(asked, [span.continuation] * len(asked))

        def finish() -> Outcomes:
            scores = dict(zip(asked, future.result(), strict=True))
            return {
                name: self._outcome(span, one, [scores[prefixes[text, one.has_long_context]] for text in one.texts])
                for name, one in evidence.items()
            }

        return finish

    def _prefixes(self, span: ScoredSpan, evidence: Mapping[str, Evidence]) -> dict[tuple[str | None, bool], str]:
        """By document, and whether the LM reads as much of the text before as it holds."""
        short = {name: one for name, one in evidence.items() if not one.has_long_context}
        prefixes = {
            (text, False): self._template.prefix(text, span.context, span.continuation, keep_end)
            for text, keep_end in texts_of(short).items()
        }
        if len(short) < len(evidence):
            assert span.long_context is not None, "the texts were read for a method that reads on in them"
            prefixes[None, True] = self._template.prefix(None, span.long_context, span.continuation)
        return prefixes

    def _outcome(self, span: ScoredSpan, evidence: Evidence, scores: Sequence[ContinuationScore]) -> Outcome:
        by_document = np.stack([score.token_logprobs for score in scores])
        mixed = mix_token_logprobs(by_document, evidence.logits)
        numbers = {
            "bits": bits_of(mixed),
            "bytes": float(len(span.continuation.encode())),
            "tokens": float(len(mixed)),
            "words": float(span.num_words),
            **oracle_bits(by_document, self._beta),
        }
        tokens = {"token_texts": self._tokens_of(span.continuation)} if self._tokens_of else {}
        documents = {"document_logprobs": by_document} if self._keeps_documents else {}
        return Outcome(numbers, {**tokens, **documents, "token_logprobs": [round(float(value), 6) for value in mixed]})


def items_of(examples: Sequence[Example]) -> list[Item]:
    """What is retrieved for is the context, or the end of it that is a span's query."""
    return [Item(w.id, w.query, w.domain, w.gold, w.source) for w in map(scored_span, examples)]


def lm_dataset(config: EvaluationConfig, corpus: Corpus | None, with_tokens: bool = False) -> EvalDataset:
    """Outcomes hold the texts of tokens where they are asked for."""
    from replug.evals.search import require_sources
    from replug.evals.texts import read_spans, token_texts  # brings torch: only once the configuration is checked

    spans = read_spans(config, corpus)
    tokens_of = token_texts(config) if with_tokens else None

    def make_task(asked: PromptedLM | None, book: EvidenceBook) -> LanguageModelling:
        assert asked is not None
        return LanguageModelling(asked.lm, asked.template, spans, tokens_of)

    sources = [span.source for span in spans]
    if config.exclude_own_source:
        require_sources([span.id for span in spans], sources)
    predicted = [span.continuation for span in spans]
    return EvalDataset([span.query for span in spans], make_task, sources=sources, predicted=predicted)


def add_headroom(finished: Finished) -> str:
    """What the oracles leave to gain; the numbers themselves are metrics already."""
    values = {
        method: Headroom(*(of[name]["value"] for name in ("bpb", "bpb_q_weighted", "bpb_best_document")))
        for method, of in finished.results.items()
        if {"bpb_q_weighted", "bpb_best_document"} <= of.keys()
    }
    sizes = mixed_documents(finished.book.methods)
    ensembles = {method: one for method, one in values.items() if method in sizes}
    lines = headroom_lines(ensembles, sizes, untuned(finished.book.methods, ensembles))
    return "\n".join(["", *(f"- {line}" for line in lines), ""]) if lines else ""


def mixed_documents(methods: Sequence[Method]) -> dict[str, int]:
    """How many documents each method mixes, of those that mix several."""
    return {m.name: m.k for m in methods if m.num_read > 1 and not m.is_concatenated}


def untuned(methods: Sequence[Method], measured: Collection[str]) -> dict[str, str]:
    """Of each method of another retriever, REPLUG's that mixes as many documents in the same way."""
    others = (m for m in methods if m.name in measured and m.source not in (REPLUG, *WITHOUT_RETRIEVER))
    bases = {m.name: REPLUG + m.name.removeprefix(m.source) for m in others}
    return {name: base for name, base in bases.items() if base in measured}


def text_problems(config: EvaluationConfig, methods: Sequence[Method]) -> Iterator[str]:
    yield from unasked_problems(config, methods)
    data, keys = config.data, config.texts
    if not (keys.path or data.source or data.prepared or (data.queries and data.heldout)):
        yield "texts.path is missing; expected texts to measure, or held-out ones: data.prepared or data.source"
    if not keys.path:
        yield from _heldout_problems(config, methods)


def _heldout_problems(config: EvaluationConfig, methods: Sequence[Method]) -> Iterator[str]:
    """Held-out texts are measured as they were cut."""
    usual = TextsConfig(max_examples=config.texts.max_examples, entities=config.texts.entities)
    for field in fields(TextsConfig):
        if getattr(config.texts, field.name) != getattr(usual, field.name):
            yield f"texts.{field.name} is set, but held-out texts are measured as they are; expected it with texts.path"
    if any(method.source == LONG_CONTEXT for method in methods):
        yield "methods: long_context reads on in whole texts, and held-out ones have no more; expected texts.path"


EVALUATION = EvaluationKind(lm_dataset, text_problems, add_findings=add_headroom, has_sources=True)
