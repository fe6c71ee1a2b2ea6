"""The task that asks: closed book, with gold evidence, and for candidates and factors from passages."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict

from replug.answering.answerer import Answered, AnsweredAlone, Answerer, AnsweringOptions
from replug.answering.prompts import AnswerPrompts
from replug.config.methods import GOLD, NONE
from replug.evals.evidence import Evidence
from replug.evals.examples import Example
from replug.evals.internet.costs import AnswerCosts, LineCounter, LineTokens
from replug.evals.internet.deciding import metrics_beside
from replug.evals.internet.expectation import ExpectedTokens, expected_of_passages
from replug.evals.internet.measured import PASSAGES, measured_passages, passages_outcome
from replug.evals.internet.preparing import Prepared, fitting_prompts, token_counter
from replug.evals.internet.questions import InternetQuestion
from replug.evals.kinds import PromptedLM
from replug.evals.loop import Metric, Outcome, Outcomes

log = logging.getLogger(__name__)


class InternetQa:
    """A `Task`. Its outcomes are named by what was asked (`evals.internet.measured`), not by method.

    Nothing of `evidence` is read: passages come from a search engine, which was asked before.
    """

    def __init__(self, prepared: Prepared, asked: PromptedLM, options: AnsweringOptions) -> None:
        self.prepared, self._options = prepared, options
        scorer = asked.reranker or asked
        self._prompts = prompts = fitting_prompts(prepared, asked, options.max_new_tokens)
        of_scorer = fitting_prompts(prepared, scorer, options.max_new_tokens) if asked.reranker else prompts
        self._answerer = Answerer(asked.lm, prompts, options, scorer.lm, of_scorer)
        self.lm, self.reranker = asked.lm.identity, scorer.lm.identity
        self._asked, self._scored = _counter(asked, prompts), _counter(scorer, of_scorer)
        self._sources = {method.source for method in prepared.methods}
        self.examples = [question.example for question in prepared.questions]
        self.metrics: Mapping[str, Metric] = {
            prepared.metric: Metric(prepared.metric),
            **metrics_beside(prepared.metric),
        }

    def groups(self, example: Example) -> tuple[str, ...]:
        return (example.group,)

    def compared(self, row: int) -> tuple[str, ...]:
        question = self.prepared.questions[row]
        return question.example.query, *question.answers

    def submit(self, row: int, evidence: Mapping[str, Evidence]) -> Callable[[], Outcomes]:
        question = self.prepared.questions[row]
        alone = {
            source: self._answerer.submit_alone(question.example.query, text)
            for source, text in ((NONE, None), (GOLD, self.prepared.gold.get(question.example.id)))
            if source in self._sources
        }
        reranked = self._submit_passages(question) if self.prepared.num_passages else None

        def outcomes() -> Outcomes:
            told = {source: self._alone(question, source, wait()) for source, wait in alone.items()}
            return {**told, PASSAGES: self._passages(question, reranked())} if reranked else told

        return outcomes

    def expected_tokens(self) -> ExpectedTokens | None:
        """Of the whole evaluation; None where the LM's tokenizer is not known."""
        if self._asked is None:
            return None
        shown = [self._asked.answer(shot.answer) for shot in self._prompts.shots]
        of_answer = max(1, round(sum(shown) / max(1, len(shown))))
        rerankers = [method.source for method in self.prepared.methods if method.k]
        total = ExpectedTokens()
        for question in self.prepared.questions:
            for source, text in ((NONE, None), (GOLD, self.prepared.gold.get(question.example.id))):
                if source in self._sources:
                    prompt = self._asked.alone(question.example.query, text)
                    total += ExpectedTokens(prompt, prompt - self._asked.opening(text is not None))
            if rerankers:
                total += expected_of_passages(
                    self._lines(self._asked, question, ()), self._options, of_answer, rerankers
                )
        return total

    def _submit_passages(self, question: InternetQuestion) -> Callable[[], Answered]:
        return self._answerer.submit(question.example.query, self.prepared.passages(question))

    def _alone(self, question: InternetQuestion, source: str, answered: AnsweredAlone) -> Outcome:
        text = self.prepared.gold[question.example.id] if source == GOLD else None
        costs = self._costs_alone(question.example.query, text, answered)
        return Outcome({}, {"answer": answered.answer, "costs": asdict(costs) if costs else None})

    def _costs_alone(self, question: str, text: str | None, answered: AnsweredAlone) -> AnswerCosts | None:
        """Of samples, or of labels, which the LM that reranks scores."""
        if self._asked is None or self._scored is None:
            return None
        if not self._options.labels:
            return AnswerCosts(1, self._asked.alone(question, text), answered.written_tokens)
        prompt = self._scored.alone(question, text)
        ends = [self._scored.answer(label) for label in self._options.labels]
        return AnswerCosts(len(ends), 0, 0, prompt * len(ends) + sum(ends))

    def _passages(self, question: InternetQuestion, answered: Answered) -> Outcome:
        found = self.prepared.found[question.example.id]
        distinct = answered.factors.distinct
        asked, scored = (
            self._lines(counter, question, distinct) if counter else None for counter in (self._asked, self._scored)
        )
        return passages_outcome(measured_passages(answered, question.answers, asked, scored), found.failures)

    def _lines(self, counter: LineCounter, question: InternetQuestion, answers: tuple[str, ...]) -> LineTokens:
        texts = [passage.text for passage in self.prepared.passages(question)]
        return counter.lines(question.example.query, texts, answers)


def _counter(lm: PromptedLM, prompts: AnswerPrompts) -> LineCounter | None:
    count = token_counter(lm.source)
    return LineCounter(count, prompts) if count else None
