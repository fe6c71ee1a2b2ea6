"""The options of `replug ask` as values, which of them do not go together, and the policy that a question follows."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from replug.config.errors import UserError
from replug.config.methods import REPLUG, RERANKERS
from replug.web.records import ENGINE_NAMES

if TYPE_CHECKING:  # brings numpy
    from replug.models.policy import Policy, Subject

LOCAL = "local"  # the engine that searches documents of the user's
QUESTION = "{question}"  # where a question stands in --template
QUICKSTART = Path("runs/quickstart")  # searched where nothing is named


@dataclass(frozen=True, slots=True)
class Decoding:
    """How an answer is decoded; None is what the way to answer has by default."""

    max_new_tokens: int | None = None
    stop: tuple[str, ...] = ()
    temperature: float | None = None
    top_p: float | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class AskOptions:
    """What was typed. `engine` is None where an index is searched; `k` is None where no option says."""

    index: Path | None = None
    corpus: Path | None = None
    engine: str | None = None
    retriever: str | None = None
    way: str = REPLUG
    k: int | None = None
    template: str | None = None
    shots: Path | None = None
    policy: Path | None = None
    weights: Path | None = None

    @property
    def reranks(self) -> bool:
        return self.way != REPLUG

    @property
    def searched(self) -> str:
        """What the evidence is from, for a reader."""
        place = self.corpus or self.index
        return " ".join(str(part) for part in (self.engine or "index", place) if part is not None)


def checked(options: AskOptions, decoding: Decoding, overrides: Sequence[str]) -> None:
    """Raise UserError for the first thing that cannot be meant."""
    for problem in _problems(options, decoding, overrides):
        raise UserError(problem)


def _problems(options: AskOptions, decoding: Decoding, overrides: Sequence[str]) -> Iterator[str]:
    if options.way not in (REPLUG, *RERANKERS):
        yield f"--rerank is {options.way}; expected one of {', '.join((REPLUG, *RERANKERS))}"
    yield from _engine_problems(options)
    yield from _override_problems(options, overrides)
    yield from _prompt_problems(options, decoding)
    if options.weights is not None and not options.weights.is_file():
        yield f"--weights: {options.weights} is no file; expected the weights.json of an evaluation=internet_qa"
    if options.weights is not None and not options.reranks:
        yield "--weights are of a reranker's factors; expected a reranker too, such as --rerank poe"
    if options.policy is not None and (options.engine is not None or options.reranks):
        yield "--policy was fitted to the ensemble of an index's documents; expected it without --engine and --rerank"


def _engine_problems(options: AskOptions) -> Iterator[str]:
    engine, places = options.engine, [place for place in (options.index, options.corpus) if place is not None]
    if engine is not None and engine not in ENGINE_NAMES:
        yield f"--engine is {engine}; expected one of {', '.join(ENGINE_NAMES)}"
    for option, place in (("--index", options.index), ("--corpus", options.corpus)):
        if place is not None and not place.exists():
            yield f"{option}: {place} does not exist"
    if engine == LOCAL and len(places) != 1:
        yield "--engine local searches documents of yours; expected --index RUN_DIR or --corpus FILE.jsonl, one of them"
    if engine not in (LOCAL, None) and options.index is not None:
        yield f"--index and --engine {engine} are both given; expected one of them"
    if engine != LOCAL and options.corpus is not None:
        yield "--corpus is for --engine local; expected it too"
    if engine is None and options.index is None and options.k != 0:
        yield (
            f"there is nothing to search, and no {QUICKSTART}; expected --index RUN_DIR, --engine local with --corpus, "
            f"or --engine with one of {', '.join(name for name in ENGINE_NAMES if name != LOCAL)}"
        )


def _override_problems(options: AskOptions, overrides: Sequence[str]) -> Iterator[str]:
    """Keys of sections that play no part."""
    if options.engine is None and any(one.startswith("web.") for one in overrides):
        yield "keys of web are for a search engine; expected --engine too"
    if options.engine is None and (options.retriever or any(one.startswith("retriever.") for one in overrides)):
        yield "--retriever re-ranks what --engine finds, and an index has its own encoder; expected --engine too"
    if options.engine is not None and not options.retriever and any(one.startswith("ensemble.") for one in overrides):
        yield "ensemble.temperature is of a retriever's similarities, and --engine has TF-IDF; expected --retriever too"
    if not options.reranks and any(one.startswith("rerank_lm.") for one in overrides):
        yield "keys of rerank_lm are for --rerank; expected a reranker such as --rerank poe"
    for option, key in (("--engine", "web.engine"), ("--retriever", "retriever.path")):
        if any(one.startswith(f"{key}=") for one in overrides):
            yield f"{key} is set as a key; expected {option}"


def _prompt_problems(options: AskOptions, decoding: Decoding) -> Iterator[str]:
    if options.template is not None and QUESTION not in options.template:
        yield f"--template is {options.template!r}; expected a text with {QUESTION} in it"
    if options.template is not None and options.shots is not None:
        yield "--shots and --template are both given; expected one of them, or the shots in the template"
    if options.reranks and options.template is not None:
        yield f"--template is for the ensemble; --rerank {options.way} has prompts of its own: leave one out"
    if options.reranks and decoding.stop:
        yield f"--stop is for the ensemble; candidates of --rerank {options.way} end with their line: leave one out"
    if "" in decoding.stop:
        yield "--stop is empty; expected a text, such as \\n for the end of a line"
    if decoding.top_p is not None and not 0 < decoding.top_p <= 1:
        yield f"--top-p is {decoding.top_p}; expected above 0 and at most 1"
    if decoding.temperature is not None and not 0 <= decoding.temperature < math.inf:
        yield f"--temperature is {decoding.temperature}; expected 0 (greedy) or more"


@dataclass(frozen=True, slots=True)
class Followed:
    """A policy, and what the question asks about."""

    policy: "Policy"
    subject: "Subject"


def policy_of(path: Path | None, subject: "Subject") -> Followed | None:
    """The policy of a file, and what the question asks about; raises UserError for what the policy has no use for."""
    if path is None:
        for option, value in (("--relation", subject.relation), ("--popularity", subject.popularity)):
            if value is not None:
                raise UserError(f"{option} is for a policy; expected --policy too")
        return None
    from replug.models.policy import KnownFrom, load_policy

    policy = load_policy(path)
    if subject.popularity is None and policy.decides_by.known_from is KnownFrom.question:
        raise UserError(f"--popularity is missing: the policy decides by {policy.signal} ({policy.decides_by.title})")
    if subject.popularity is not None and policy.decides_by.known_from is not KnownFrom.question:
        raise UserError(f"--popularity: the policy decides by {policy.signal}; leave it out")
    return Followed(policy, subject)
