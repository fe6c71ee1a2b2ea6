"""All that is known before the LM is opened: questions, shots, their gold evidence, and what was searched for them."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from replug.answering.prompts import AnswerPrompts, PromptForm, Shot, fit_shots
from replug.config.evaluation_schema import EvaluationConfig
from replug.config.methods import GOLD, NONE, Method
from replug.evals.internet.costs import NumTokens
from replug.evals.internet.gold import Texts, gold_evidence
from replug.evals.internet.questions import InternetQuestion, QuestionSet
from replug.evals.internet.splits import plan_questions
from replug.evals.kinds import PromptedLM
from replug.models.lm_source import LMSource
from replug.web.records import FoundEvidence, Passage

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Prepared:
    """`gold` is by question id: of those asked with it, and none else. `found` is empty where no method reranks."""

    methods: tuple[Method, ...]
    questions: tuple[InternetQuestion, ...]
    shots: tuple[Shot, ...]
    metric: str
    form: PromptForm
    gold: Mapping[str, str]
    found: Mapping[str, FoundEvidence]

    @property
    def labels(self) -> tuple[str, ...]:
        """All answers that there are; none where answers are free."""
        return self.questions[0].labels

    @property
    def num_passages(self) -> int:
        """As many as any method reads; 0 where none reranks."""
        return max(method.k for method in self.methods)

    def passages(self, question: InternetQuestion) -> Sequence[Passage]:
        return self.found[question.example.id].passages[: self.num_passages]

    def evidence(self, question: InternetQuestion) -> Iterator[str]:
        """Every text that a question is asked with."""
        if question.example.id in self.gold:
            yield self.gold[question.example.id]
        if self.num_passages:
            yield from (passage.text for passage in self.passages(question))


def plan(config: EvaluationConfig, methods: Sequence[Method], of: QuestionSet, texts: Texts | None) -> Prepared:
    """What a configuration measures, before anything is searched for. Raises UserError for gold evidence that lacks."""
    reads = any(method.source != NONE for method in methods)
    planned = plan_questions(config.questions, of, config.seed, with_evidence=reads)
    shown = gold_evidence(planned.shots, texts, "a shot (questions.shots)") if reads else {}
    measured = planned.measured if any(method.source == GOLD for method in methods) else ()
    return Prepared(
        tuple(methods),
        planned.measured,
        shots_of(planned.shots, shown),
        of.metric,
        PromptForm(question_first=config.questions.question_first),
        gold_evidence(measured, texts, "the method gold"),
        {},
    )


def shots_of(questions: Sequence[InternetQuestion], evidence: Mapping[str, str]) -> tuple[Shot, ...]:
    """With their first answers, and their evidence by id where they have some."""
    return tuple(Shot(one.example.query, one.answers[0], evidence.get(one.example.id)) for one in questions)


def fitting_prompts(prepared: Prepared, lm: PromptedLM, max_new_tokens: int) -> AnswerPrompts:
    """With as many shots as fit beside the longest question and evidence of the set.

    An LM whose tokenizer or limit is not known has all shots: what is too long is refused when it is asked.
    """
    prompts, count, limit = AnswerPrompts(prepared.form, prepared.shots), token_counter(lm.source), lm.lm.max_tokens
    if count is None or limit is None:
        return prompts
    fitting = fit_shots(prompts, asked_with(prepared), count, limit, max_new_tokens)
    if len(fitting.shots) < len(prompts.shots):
        log.warning(
            f"{len(fitting.shots)} of {len(prompts.shots)} shots fit beside the longest evidence: the LM holds {limit} "
            "tokens"
        )
    return fitting


def token_counter(source: LMSource | None) -> NumTokens | None:
    """Counts the tokens of a text; None where the LM's tokenizer is not known."""
    tokenizer = source.tokenizer() if source else None
    if tokenizer is None:
        return None
    return lambda text: len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def asked_with(prepared: Prepared) -> Iterator[tuple[str, str | None]]:
    """Every question with every text that it is asked with, and closed book."""
    for question in prepared.questions:
        yield question.example.query, None
        yield from ((question.example.query, text) for text in prepared.evidence(question))
