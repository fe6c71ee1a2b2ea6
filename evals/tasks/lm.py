"""Language modelling: how well texts are predicted, in bits per byte and perplexity (REPLUG, sections 5.1 and 6.1)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from replug.configs.methods import Method
from replug.configs.schema import EvaluationConfig
from replug.data.records import Window
from replug.data.store import Corpus
from replug.evals.evidence import Evidence, EvidenceBook, texts_of
from replug.evals.examples import Example
from replug.evals.headroom import BETA, ORACLES, Headroom, headroom_lines, oracle_bits
from replug.evals.kinds import EvalDataset, EvaluationKind, Finished, PromptedLM
from replug.evals.loop import Metric, Outcome, Outcomes
from replug.evals.metrics import bits_of
from replug.evals.questions import unasked_problems
from replug.models.black_box_lm import AsyncLM, ContinuationScore
from replug.models.ensemble import mix_token_logprobs
from replug.models.prompt import PromptTemplate

BITS_PER_BYTE = Metric("bits", "bytes")


class LanguageModelling:
    """A `Task`: continuations of windows, after their contexts. A document that several methods use is scored once."""

    metrics: Mapping[str, Metric] = {
        "bpb": BITS_PER_BYTE,
        "token_perplexity": Metric("bits", "tokens", np.exp2),  # tokens of the LM
        "word_perplexity": Metric("bits", "words", np.exp2),  # words between white space
        **{f"bpb_{name}": Metric(bits, "bytes", may_be_unknown=True) for name, bits in ORACLES.items()},
    }

    def __init__(
        self,
        lm: AsyncLM,
        template: PromptTemplate,
        windows: Sequence[Window],
        tokens_of: Callable[[str], list[str]] | None = None,
        keeps_documents: bool = False,
        beta: float = BETA,
    ) -> None:
        """With `tokens_of`, which cuts a text into the LM's tokens, outcomes hold their texts.

        Those that keep documents hold `document_logprobs`, an array [K, T], and are not to be written as JSON. `beta`
        is the temperature of the oracle that weighs documents by the LM's own scores.
        """
        self._lm, self._template, self._windows, self._tokens_of = lm, template, windows, tokens_of
        self._keeps_documents, self._beta = keeps_documents, beta
        self.examples = window_examples(windows)

    def groups(self, example: Example) -> tuple[str, ...]:
        return (example.group,)

    def shown(self, row: int, method: str, evidence: Evidence) -> dict[str, Any]:
        window, text = self._windows[row], evidence.texts[0]
        prompt = self._template.prefix(text, window.context, window.continuation, evidence.is_concatenated)
        return {"references": [window.continuation], "prompt": prompt}

    def submit(self, row: int, evidence: Mapping[str, Evidence]) -> Callable[[], Outcomes]:
        window, texts = self._windows[row], texts_of(evidence)
        prefixes = [
            self._template.prefix(text, window.context, window.continuation, keep_end)
            for text, keep_end in texts.items()
        ]
        future = self._lm.submit(prefixes, [window.continuation] * len(prefixes))

        def finish() -> Outcomes:
            scores = dict(zip(texts, future.result(), strict=True))
            return {
                name: self._outcome(window, one, [scores[text] for text in one.texts]) for name, one in evidence.items()
            }

        return finish

    def _outcome(self, window: Window, evidence: Evidence, scores: Sequence[ContinuationScore]) -> Outcome:
        by_document = np.stack([score.token_logprobs for score in scores])
        mixed = mix_token_logprobs(by_document, evidence.logits)
        numbers = {
            "bits": bits_of(mixed),
            "bytes": float(len(window.continuation.encode())),
            "tokens": float(len(mixed)),
            "words": float(len(window.continuation.split())),
            **oracle_bits(by_document, self._beta),
        }
        tokens = {"token_texts": self._tokens_of(window.continuation)} if self._tokens_of else {}
        documents = {"document_logprobs": by_document} if self._keeps_documents else {}
        return Outcome(numbers, {**tokens, **documents, "token_logprobs": [round(float(value), 6) for value in mixed]})


def window_examples(windows: Sequence[Window]) -> list[Example]:
    """What is retrieved for is the context."""
    return [Example(w.id, w.context, w.domain, w.gold, w.source) for w in windows]


def lm_dataset(config: EvaluationConfig, corpus: Corpus | None, with_tokens: bool = False) -> EvalDataset:
    """Outcomes hold the texts of tokens where they are asked for."""
    from replug.evals.texts import read_windows, token_texts  # brings torch: only once the configuration is checked

    windows = read_windows(config, corpus)
    tokens_of = token_texts(config) if with_tokens else None

    def make_task(asked: PromptedLM | None, book: EvidenceBook) -> LanguageModelling:
        assert asked is not None
        return LanguageModelling(asked.lm, asked.template, windows, tokens_of)

    return EvalDataset([window.context for window in windows], make_task)


def add_headroom(finished: Finished) -> str:
    """What the oracles leave to gain; the numbers themselves are metrics already."""
    values = {
        method: Headroom(*(of[name]["value"] for name in ("bpb", "bpb_q_weighted", "bpb_best_document")))
        for method, of in finished.results.items()
        if {"bpb_q_weighted", "bpb_best_document"} <= of.keys()
    }
    sizes = {m.name: m.k for m in finished.book.methods if m.k > 1 and not m.is_concatenated}
    ensembles = {method: one for method, one in values.items() if method in sizes}
    lines = headroom_lines(ensembles, sizes)
    return "\n".join(["", *(f"- {line}" for line in lines), ""]) if lines else ""


def text_problems(config: EvaluationConfig, methods: Sequence[Method]) -> Iterator[str]:
    yield from unasked_problems(config, methods)
    data = config.data
    if not (config.texts.path or data.source or data.prepared or (data.queries and data.heldout)):
        yield "texts.path is missing; expected texts to measure, or held-out ones: data.prepared or data.source"


EVALUATION = EvaluationKind(lm_dataset, text_problems, add_findings=add_headroom)
