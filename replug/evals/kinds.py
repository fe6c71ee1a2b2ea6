"""The kinds of evaluation, each a task in the module of its name, and checks of a configuration for its kind.

To add an evaluation, write its module, its line in `KINDS`, and a YAML file.
"""

from collections.abc import Iterator, Sequence
from importlib import import_module
from operator import attrgetter
from pathlib import Path

from replug.config.errors import UserError
from replug.config.evaluation_schema import EvaluationConfig
from replug.config.keys import keys_of
from replug.config.load import load_evaluation_config
from replug.config.methods import GENREAD, INTERNET_QA, Method
from replug.config.paths import check_names, check_paths
from replug.config.rules import evaluation_methods, lm_problems, rerank_lm_problems
from replug.config.schema import EnsembleConfig
from replug.evals.loop import Task

KINDS = {
    "internet_qa": "InternetQa",
    "language_modelling": "LanguageModelling",
    "mmlu": "Mmlu",
    "open_qa": "OpenQa",
    "popqa": "PopQa",
    "retrieval": "Retrieval",
    "token_gain": "TokenGain",
}
# Sections and keys that every kind reads; `Task.reads` names the others of a kind.
SHARED = (
    *("evaluation", "out", "methods", "k", "seed"),
    *("data", "retriever", "lm", "index", "resources.score", "resources.index", "ray"),
)
ASK_QUESTIONS = ("open_qa", "popqa")  # for whole answers


def check_evaluation(config: EvaluationConfig) -> type[Task]:
    """Return the task class of a configuration's kind. Raises UserError for the first problem."""
    if config.evaluation not in KINDS:
        raise UserError(f"evaluation: {config.evaluation!r} is unknown; expected one of {', '.join(KINDS)}")
    kind: type[Task] = getattr(import_module(f"replug.evals.{config.evaluation}"), KINDS[config.evaluation])
    methods = evaluation_methods(config)
    for problem in (*_problems(config, kind, methods), *kind.problems(config, methods)):
        raise UserError(problem)
    for key in keys_of(EvaluationConfig):
        is_read = any(key.path == name or key.path.startswith(f"{name}.") for name in (*SHARED, *kind.reads))
        if not is_read and attrgetter(key.path)(config) != key.default:
            raise UserError(f"{key.path} is set, but evaluation={config.evaluation} does not read it. Remove it")
    return kind


def checked_evaluation(config: str | Path | EvaluationConfig, overrides: Sequence[str]) -> EvaluationConfig:
    """Load and check the configuration of an evaluation. Raises UserError for the first problem or missing path."""
    evaluation = load_evaluation_config(config, overrides)
    check_evaluation(evaluation)
    check_paths(evaluation)
    check_names(evaluation)
    return evaluation


def _problems(config: EvaluationConfig, kind: type[Task], methods: Sequence[Method]) -> Iterator[str]:
    """Yield the problems of a configuration that are common to all kinds."""
    for method in methods:
        if (method.source == GENREAD or method.votes) and "questions.shots" not in kind.reads:
            yield f"methods: {method.name} answers questions, and evaluation={config.evaluation} asks the LM none"
    if "questions.query" in kind.reads and not config.questions.path:
        yield f"questions.path is missing; evaluation={config.evaluation} expects the questions"
    if kind.asks_lm:
        votes = config.evaluation in ASK_QUESTIONS and all(method.num_mixed <= 1 for method in methods)
        yield from lm_problems(config.lm, votes=votes)
    if "rerank_lm" in kind.reads:
        yield from rerank_lm_problems(config)
    usual, follows = EnsembleConfig(), any(method.follows_text for method in methods)
    for name in ("prune", "read"):
        if getattr(config.ensemble, name) != getattr(usual, name) and not follows:
            yield f"ensemble.{name} is set, but no method's weights follow the text; expected one like replug/posterior"
    for lm, section in ((config.lm, "lm"), (config.rerank_lm, "rerank_lm")):
        key = "chat" if lm.chat else "prompt"
        if (lm.chat or lm.prompt is not None) and config.evaluation == INTERNET_QA:
            yield f"{section}.{key} is set, but evaluation={INTERNET_QA} uses fixed prompts. Remove {section}.{key}"
