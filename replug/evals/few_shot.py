"""Questions after demonstrations: what mmlu, open_qa and popqa share.

A prompt is the demonstrations of the question's group, each with the first document that the method finds for it
(unless questions.documents_in_shots=false), then the question with its own document. If the LM holds fewer tokens, the
earliest demonstrations are left out (`answering.prompts.fit_shots`), and the table says of how many questions. A
question's own document is cut only where no demonstration is left, and only with lm.too_long=truncate; else the
question is refused by its name.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from replug.answering.prompts import AnyShot, fit_shots
from replug.config.evaluation_schema import EvaluationConfig
from replug.evals.evidence import Evidence, EvidenceBook
from replug.evals.kinds import EvalDataset, Finished, PromptedLM
from replug.evals.loop import Outcome, Outcomes, Task
from replug.evals.questions import BETWEEN_BLOCKS, STOP, queries_of
from replug.models.black_box_lm import AsyncLM, UnscorableText
from replug.models.generation import Generated, GenerationOptions
from replug.models.prompt import PromptTemplate

DROPPED = "dropped_shots"
ShotWithDocument = tuple[Any, str | None]  # a question of the kind's own, and its document
Shots = Mapping[tuple[str, str], Sequence[ShotWithDocument]]  # by method and group of questions


@dataclass(frozen=True, slots=True)
class FewShotPrompts:
    """The prompts [K] of a question under a method, one for each text, which all begin with `opening`."""

    opening: str
    prompts: tuple[str, ...]
    num_shots: int
    num_dropped: int

    @property
    def numbers(self) -> dict[str, float]:
        """Return what an outcome says of the demonstrations."""
        return {"shots": float(self.num_shots), DROPPED: float(self.num_dropped)}


class FewShot:
    """Build prompts with room for `num_after` tokens. `counting` knows the LM's limit, `template` may cut documents."""

    def __init__(self, template: PromptTemplate, counting: PromptTemplate, num_after: int) -> None:
        self.template, self._counting, self._num_after = template, counting, num_after

    def require(self, name: str, bare: str) -> None:
        """Raise UnscorableText if a question's prompt does not fit without any shot and document."""
        self.ask(name, (), "".join, lambda shots, document: bare, [None])

    def ask(
        self,
        name: str,
        shots: Sequence[AnyShot],
        opening: Callable[[Sequence[AnyShot]], str],
        prompt: Callable[[Sequence[AnyShot], str | None], str],
        texts: Sequence[str | None],
        keep_end: bool = False,
    ) -> FewShotPrompts:
        """Return the prompts of the question with this name: of shots, which `opening` is made of, and of each text.

        Raises UnscorableText where the question does not fit without shots.
        """

        def fits(shots: Sequence[AnyShot]) -> bool:
            build = self.template.around(partial(prompt, shots))
            return all(self._counting.holds(build(text), self._num_after) for text in texts)

        kept = fit_shots(shots, fits)
        build, num = self.template.around(partial(prompt, kept)), self._num_after
        if not kept and not self.template.cuts and not fits(kept):
            most = max(self._counting.num_tokens(build(text)) for text in texts)
            fix_hint = "shorter documents, or lm.too_long=truncate, which cuts them"
            raise UnscorableText(
                f"question {name}: its prompt has {most} tokens even without demonstrations, and the LM holds "
                f"{self._counting.max_tokens}, {num} of them for the answer; expected "
                f"{fix_hint if any(texts) else 'a shorter question, or an LM that holds more'}"
            )
        prompts = [self.template.fit(text, build, num, keep_end, name) for text in texts]
        return FewShotPrompts(self.template.opening(opening(kept)), tuple(prompts), len(kept), len(shots) - len(kept))


@dataclass(frozen=True, slots=True)
class PromptForm:
    """How a kind writes a question, with its document if it has one, and the answer that a demonstration shows."""

    block: Callable[[Any, str | None], str]
    answer: Callable[[Any], str]

    def opening(self, shots: Sequence[ShotWithDocument]) -> str:
        """Return the demonstrations, which the prompts of all questions of a group begin with."""
        return "".join(f"{self.block(shot, text)} {self.answer(shot)}{BETWEEN_BLOCKS}" for shot, text in shots)

    def prompt(self, question: Any, shots: Sequence[ShotWithDocument] = (), document: str | None = None) -> str:
        """Return what the LM continues: the demonstrations, then the question."""
        return self.opening(shots) + self.block(question, document)


@dataclass(frozen=True, slots=True)
class Asking:
    """All that a task puts questions to the LM with."""

    lm: AsyncLM
    few_shot: FewShot
    form: PromptForm
    shots: Shots


class FewShotTask(Task):
    """Ask questions, which have `example` and `answers`, and compare the first line of what the LM writes."""

    def __init__(self, asking: Asking, questions: Sequence[Any], max_new_tokens: int) -> None:
        self.asking, self.questions, self._max_new_tokens = asking, questions, max_new_tokens
        self.examples = [question.example for question in questions]

    def outcome(self, row: int, method: str, evidence: Evidence, generated: Generated) -> Outcome:
        """Return what is measured of an answer."""
        raise NotImplementedError

    def stop(self, row: int, method: str) -> str | None:
        """Return the text at which answers end."""
        return STOP

    def compared(self, row: int) -> tuple[str, ...]:
        return self.questions[row].example.query, *self.questions[row].answers

    def submit(self, row: int, evidence: Mapping[str, Evidence]) -> Callable[[], Outcomes]:
        prompts = {name: self.prompts(row, name, one) for name, one in evidence.items()}
        futures: dict[str, Future[Generated]] = {}
        for name, asked in prompts.items():
            options = GenerationOptions(self._max_new_tokens, self.stop(row, name), opening=asked.opening)
            futures[name] = evidence[name].submit(self.asking.lm, asked.prompts, options)

        def finish() -> Outcomes:
            outcomes = {name: self.outcome(row, name, evidence[name], one.result()) for name, one in futures.items()}
            for name, outcome in outcomes.items():
                outcome.numbers.update(prompts[name].numbers)
            return outcomes

        return finish

    def shown(self, row: int, method: str, evidence: Evidence) -> dict[str, Any]:
        references = list(self.questions[row].answers)
        return {"references": references, "prompt": self.prompts(row, method, evidence).prompts[0]}

    def prompts(self, row: int, method: str, evidence: Evidence) -> FewShotPrompts:
        """Return the prompts of a question under a method, one for each text of its evidence."""
        question, form = self.questions[row], self.asking.form
        return self.asking.few_shot.ask(
            question.example.id,
            self.asking.shots[method, question.example.group],
            form.opening,
            partial(form.prompt, question),
            evidence.texts,
            evidence.is_concatenated,
        )


def few_shot_dataset(
    config: EvaluationConfig,
    form: PromptForm,
    questions: Sequence[Any],
    shots: Mapping[str, Sequence[Any]],
    num_new: int,
    make_task: Callable[[Asking, EvidenceBook], Task],
    queries: Callable[[Sequence[Any]], list[str]] | None = None,
) -> EvalDataset:
    """Return questions whose demonstrations, `shots` by group, are searched for behind them.

    The LM must hold `num_new` tokens after a prompt. `queries` gives what is searched for, by default the questions in
    the form of `questions.query`.
    """
    shown = {shot.example.id: shot for own in shots.values() for shot in own}
    place_of = {name: len(questions) + place for place, name in enumerate(shown)}
    searched = [*questions, *shown.values()]

    def make(prompted: PromptedLM | None, book: EvidenceBook) -> Task:
        from replug.models.build import counting_template  # brings torch: only once the configuration is checked

        assert prompted is not None
        has_documents = config.questions.documents_in_shots
        documents = {
            (method.name, name): book.nearest(method, place) if has_documents else None
            for method in book.methods
            for name, place in place_of.items()
        }
        by_method = {
            (method.name, group): [(shot, documents[method.name, shot.example.id]) for shot in own]
            for method in book.methods
            for group, own in shots.items()
        }
        few_shot = FewShot(prompted.template, counting_template(prompted.source), num_new)
        return make_task(Asking(prompted.lm, few_shot, form, by_method), book)

    examples = [question.example for question in searched]
    return EvalDataset(
        queries(searched) if queries else queries_of(config, examples),
        make,
        questions=[example.query for example in examples],
        bare_prompts=[(question.example.id, form.prompt(question)) for question in questions],
        num_after=num_new,
    )


def dropped_shots(finished: Finished) -> list[Any]:
    """Return a line for each method with how many questions had fewer demonstrations than the others."""
    lines = []
    for method in finished.results:
        dropped = [int(row["methods"][method]["numbers"][DROPPED]) for row in finished.rows]
        if any(dropped):
            lines.append(
                f"{method}: {sum(map(bool, dropped))} of {len(dropped)} questions lost their earliest "
                f"demonstrations, {sum(dropped)} in all: the LM holds no more tokens."
            )
    return lines
