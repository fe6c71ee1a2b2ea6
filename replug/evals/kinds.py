"""The kinds of evaluation: each is a module of this room whose `EVALUATION` says what it needs and measures.

The key `evaluation` names the module, so an evaluation is added by its module, its name in `KINDS`, and a YAML file.
"""

import importlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

from replug.config.errors import UserError
from replug.config.evaluation_schema import EvaluationConfig
from replug.config.keys import keys_of
from replug.config.load import load_evaluation_config
from replug.config.methods import GENREAD, INTERNET_QA, LONG_CONTEXT, Method
from replug.config.paths import check_names, check_paths
from replug.config.rules import evaluation_methods, lm_problems, rerank_lm_problems
from replug.config.schema import EnsembleConfig
from replug.data.store import Corpus
from replug.evals.evidence import EvidenceBook
from replug.evals.folder import EvaluationFolder
from replug.evals.loop import EXAMPLES_IN_FLIGHT, Row, Task
from replug.evals.results import Results
from replug.evals.tables import Blocks
from replug.models.black_box_lm import AsyncLM
from replug.models.lm_source import LMSource
from replug.models.prompt import PromptTemplate

KINDS = ("internet_qa", "language_modelling", "mmlu", "open_qa", "popqa", "retrieval", "token_gain")
# Sections and keys that every kind reads; `reads` of a kind names its others.
SHARED = (
    *("evaluation", "out", "methods", "k", "num_resamples", "seed"),
    *("data", "retriever", "lm", "index", "ray", "paper"),
)
MIXES = ("ensemble", "retrievers")
MEASURES_TEXTS = (
    *MIXES,
    "exclude_own_source",
    *(f"texts.{name}" for name in ("path", "max_examples", "scored_tokens", "context_tokens", "query_tokens")),
    *("texts.document_tokens", "texts.join", "texts.tokenizer", "texts.detokenize"),
)
DRAWS_QUESTIONS = ("questions.path", "questions.query", "questions.max_questions")
SHOWS_SHOTS = (*MIXES, *DRAWS_QUESTIONS, "questions.shots")
ANSWERS_QUESTIONS = (*SHOWS_SHOTS, "questions.demonstrations", "questions.max_new_tokens")
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
    and document, after which the LM must hold `num_after` tokens. `cut` shortens documents before the LM reads them.
    """

    queries: Sequence[str]
    make_task: Callable[[PromptedLM | None, EvidenceBook], Task]
    questions: Sequence[str] = ()
    sources: Sequence[str | None] = ()
    predicted: Sequence[str] = ()
    bare_prompts: Sequence[tuple[str, str]] = ()
    num_after: int = 0
    cut: Callable[[str], str] = str


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

    `reads` names the keys, or whole sections, that it reads beside SHARED; others are refused where they are set.
    `problems` are what a configuration lacks for it beside that, found before anything starts. `settle` makes what is
    compared of what was measured, where that is not the same: where some examples only serve to fit the rest.
    `searches` are what is found for every example beside the methods. `add_findings` adds to the results what is more
    than metrics by method, writes what goes with it, and returns more blocks of the table.
    """

    make_dataset: Callable[[EvaluationConfig, Corpus | None], EvalDataset]
    reads: tuple[str, ...]
    problems: Callable[[EvaluationConfig, Sequence[Method]], Iterable[str]] = lambda config, methods: ()
    asks_lm: bool = True
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
    for key in keys_of(EvaluationConfig):
        is_read = any(key.path == name or key.path.startswith(f"{name}.") for name in (*SHARED, *kind.reads))
        if not is_read and attrgetter(key.path)(config) != key.default:
            raise UserError(f"{key.path} is set, but evaluation={config.evaluation} does not read it. Remove it")
    return kind


def checked_evaluation(config: str | Path | EvaluationConfig, overrides: Sequence[str]) -> EvaluationConfig:
    """Load the configuration of an evaluation. Raises UserError for the first thing that it lacks or cannot find."""
    evaluation = load_evaluation_config(config, overrides)
    check_evaluation(evaluation)
    check_paths(evaluation)
    check_names(evaluation)
    return evaluation


def _problems(config: EvaluationConfig, kind: EvaluationKind, methods: Sequence[Method]) -> Iterator[str]:
    """Yield what does not go together in any kind of evaluation."""
    yield from _method_problems(config, kind, methods)
    if "questions.path" in kind.reads and not config.questions.path:
        yield f"questions.path is missing; evaluation={config.evaluation} expects the questions"
    if kind.asks_lm:
        votes = config.evaluation in ASK_QUESTIONS and all(method.num_mixed <= 1 for method in methods)
        yield from lm_problems(config.lm, votes=votes)
    if "rerank_lm" in kind.reads:
        yield from rerank_lm_problems(config)
    usual, follows = EnsembleConfig(), any(method.follows_text for method in methods)
    for name in ("prune", "read"):
        if getattr(config.ensemble, name) != getattr(usual, name) and not follows:
            yield f"ensemble.{name} is set, but no method's weights follow the text; expected such as replug/posterior"
    reranking = [method.name for method in methods if method.is_reranked]
    for lm, section in ((config.lm, "lm"), (config.rerank_lm, "rerank_lm")):
        key = "chat" if lm.chat else "prompt"
        if (lm.chat or lm.prompt is not None) and (reranking or config.evaluation == INTERNET_QA):
            what = f"the reranking of {reranking[0]}" if reranking else f"evaluation={INTERNET_QA}"
            yield f"{section}.{key} is set, but {what} asks by prompts of its own; expected it without {section}.{key}"


def _method_problems(config: EvaluationConfig, kind: EvaluationKind, methods: Sequence[Method]) -> Iterator[str]:
    """Yield methods that answer questions where none are asked, read on where no texts are, or are not counted."""
    name = config.evaluation
    asks_questions, reads_texts = "questions.shots" in kind.reads, "texts.path" in kind.reads
    for method in methods:
        if method.source == GENREAD and not asks_questions:
            yield f"methods: genread writes a document for a question; evaluation={name} asks the LM none"
        if method.votes and not asks_questions:
            yield f"methods: {method.name}; answers vote, and evaluation={name} asks the LM for none"
        if method.source == LONG_CONTEXT and not reads_texts:
            yield f"methods: long_context reads on in a text; evaluation={name} asks questions"
        if method.is_reranked and name not in MAY_RERANK_DOCUMENTS:
            yield (
                f"methods: {method.name} reranks documents by the LM, but evaluation={name} counts its calls "
                f"otherwise or asks none; expected it with {', '.join(MAY_RERANK_DOCUMENTS)}"
            )
