"""The kinds of evaluation: each is a module of this room whose `EVALUATION` says what it needs and measures.

The key `evaluation` names the module, so an evaluation is added by its module, its name in `KINDS`, and a YAML file.
"""

import importlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from replug.config.errors import UserError
from replug.config.evaluation_schema import EvaluationConfig
from replug.config.methods import INTERNET_QA, Method
from replug.config.rules import (
    evaluation_methods,
    has_rerank_lm,
    lm_problems,
    rerank_lm_problems,
)
from replug.config.schema import EnsembleConfig
from replug.data.store import Corpus
from replug.evals.evidence import EvidenceBook
from replug.evals.folder import EvaluationFolder
from replug.evals.loop import EXAMPLES_IN_FLIGHT, Task
from replug.evals.outcomes import Row
from replug.evals.results import Results
from replug.evals.tables import Blocks
from replug.models.black_box_lm import AsyncLM
from replug.models.lm_source import LMSource
from replug.models.prompt import PromptTemplate

KINDS = ("internet_qa", "language_modelling", "mmlu", "open_qa", "popqa", "retrieval", "token_gain")
DRAW_DEMONSTRATIONS = ("internet_qa", "open_qa", "popqa")
ASK_QUESTIONS = ("open_qa", "popqa")  # for whole answers
MAY_RERANK_DOCUMENTS = ("language_modelling", "mmlu", "open_qa", "token_gain")


@dataclass(frozen=True, slots=True)
class PromptedLM:
    """The LM that is asked, behind its cache, and how texts are put to it.

    `source` is where the LM comes from. `reranker` is `rerank_lm`, where another LM is to say how good answers are.
    `num_in_flight` examples are put to the LM before the first is waited for.
    """

    lm: AsyncLM
    template: PromptTemplate
    source: LMSource | None = None
    reranker: "PromptedLM | None" = None
    num_in_flight: int = EXAMPLES_IN_FLIGHT


@dataclass(frozen=True, slots=True)
class EvalDataset:
    """The set that is measured: a text to retrieve for by example (empty where nothing can be retrieved), and the task.

    `questions`, one for each query, are what an LM is to write documents for; none where the LM is asked no questions.
    `sources`, one for each query, are those whose documents it must not find; none where it may find all. `predicted`
    are the texts that an LM is to predict. `bare_prompts` are examples' names with their prompts without demonstration
    and document, after which the LM must hold `num_after` tokens.
    """

    queries: Sequence[str]
    make_task: Callable[[PromptedLM | None, EvidenceBook], Task]
    questions: Sequence[str] = ()
    sources: Sequence[str | None] = ()
    predicted: Sequence[str] = ()
    bare_prompts: Sequence[tuple[str, str]] = ()
    num_after: int = 0


@dataclass(frozen=True, slots=True)
class Finished:
    """All that an evaluation has measured, with the results that are made of it."""

    config: EvaluationConfig
    folder: EvaluationFolder
    rows: Sequence[Row]
    book: EvidenceBook
    results: Results


@dataclass(frozen=True, slots=True)
class EvaluationKind:
    """`make_dataset` reads what is measured; `corpus` is None where no method retrieves.

    `settle` makes what is compared of what was measured, where that is not the same: where some examples only serve to
    fit the rest. `problems` are what a configuration lacks for it, found before anything starts. `add_findings` adds to
    the results what is more than metrics by method, writes what goes with it, and returns more blocks of the table.
    `reranks` says that it may have another LM for that, `rerank_lm`. `searches` are what is found for every example
    beside the methods. `has_sources` says that examples are cut from texts, whose own documents can be left out.
    """

    make_dataset: Callable[[EvaluationConfig, Corpus | None], EvalDataset]
    problems: Callable[[EvaluationConfig, Sequence[Method]], Iterable[str]]
    asks_lm: bool = True
    reranks: bool = False
    has_sources: bool = False
    searches: Callable[[EvaluationConfig], Sequence[Method]] = lambda config: ()
    settle: Callable[[EvaluationConfig, EvaluationFolder, Task, Sequence[Row]], tuple[Task, Sequence[Row]]] = (
        lambda config, folder, task, rows: (task, rows)
    )
    add_findings: Callable[[Finished], Blocks] = lambda finished: ()


def check_evaluation(config: EvaluationConfig) -> EvaluationKind:
    """Return the kind that a configuration names. Raises UserError for the first thing that it lacks."""
    if config.evaluation not in KINDS:
        raise UserError(f"evaluation: {config.evaluation!r} is unknown; expected one of {', '.join(KINDS)}")
    kind: EvaluationKind = importlib.import_module(f"replug.evals.{config.evaluation}").EVALUATION
    methods = evaluation_methods(config)
    for problem in (*_problems(config, kind, methods), *kind.problems(config, methods)):
        raise UserError(problem)
    return kind


def _problems(config: EvaluationConfig, kind: EvaluationKind, methods: Sequence[Method]) -> Iterable[str]:
    """Yield what does not go together in any kind of evaluation."""
    if kind.asks_lm:
        votes = config.evaluation in ASK_QUESTIONS and all(method.num_mixed <= 1 for method in methods)
        yield from lm_problems(config.lm, votes=votes)
        yield from rerank_lm_problems(config) if kind.reranks else ()
    if config.evaluation != INTERNET_QA and (config.questions.dataset or config.questions.question_first):
        key = "dataset" if config.questions.dataset else "question_first"
        yield f"questions.{key} is set, but evaluation={config.evaluation} reads no such key; {INTERNET_QA} does"
    if config.questions.qrels and config.evaluation != "retrieval":
        yield f"questions.qrels is set, but evaluation={config.evaluation} reads no such key; retrieval does"
    seed = "questions.demonstration_seed"
    if config.questions.demonstration_seed is not None and config.evaluation not in DRAW_DEMONSTRATIONS:
        yield f"{seed} is set, but evaluation={config.evaluation} draws none; {', '.join(DRAW_DEMONSTRATIONS)} do"
    elif config.questions.demonstration_seed is not None and not config.questions.demonstrations:
        yield (
            f"{seed} is set without questions.demonstrations: other demonstrations out of questions.path would leave "
            "other questions to measure; expected a file of demonstrations"
        )
    if config.exclude_own_source and not kind.has_sources:
        yield f"exclude_own_source is set, but evaluation={config.evaluation} asks questions, which are of no source"
    if config.texts.entities and config.evaluation != "token_gain":
        yield f"texts.entities is set, but evaluation={config.evaluation} reads no such key; token_gain does"
    if config.ensemble.temperature is not None and (not kind.asks_lm or config.evaluation == INTERNET_QA):
        yield f"ensemble.temperature is set, but evaluation={config.evaluation} mixes no predictions; expected null"
    usual, follows = EnsembleConfig(), any(method.follows_text for method in methods)
    for name in ("share", "alone", "prune", "read"):
        if getattr(config.ensemble, name) != getattr(usual, name) and not follows:
            yield f"ensemble.{name} is set, but no method's weights follow the text; expected such as replug/posterior"
    if not kind.reranks and has_rerank_lm(config):
        yield f"rerank_lm is set, but evaluation={config.evaluation} reranks no answers; expected it with internet_qa"
    names = [method.name for method in methods if method.is_reranked]
    for lm, section in ((config.lm, "lm"), (config.rerank_lm, "rerank_lm")):
        key = "chat" if lm.chat else "prompt"
        if (lm.chat or lm.prompt is not None) and (names or config.evaluation == INTERNET_QA):
            what = f"the reranking of {names[0]}" if names else f"evaluation={INTERNET_QA}"
            yield f"{section}.{key} is set, but {what} asks by prompts of its own; expected it without {section}.{key}"
    if names and config.evaluation not in MAY_RERANK_DOCUMENTS:
        yield (
            f"methods: {names[0]} reranks documents by the LM, but evaluation={config.evaluation} counts its calls "
            f"otherwise or asks none; expected it with {', '.join(MAY_RERANK_DOCUMENTS)}"
        )
