"""A policy of retrieval: by which signal and below which value documents are retrieved (Mallen et al. 2023, section 5).

`replug report DIR --policies OUT` writes policies from an evaluation's outcomes, each as a file of JSON.
`ReplugLM(policy=...)` and `replug ask --policy` follow one. A policy is fitted to one LM, one retriever over its
documents and two methods, and says nothing of others: whoever loads it compares.

    {"format": 3, "lm": ..., "retriever": ..., "closed": "none", "augmented": "replug@1", "signal": "popularity",
     "retrieves_when": "below", "thresholds": {"capital": 1841.0, "genre": "always"}, "pooled": 2310.0, "fitted": {...},
     "temperature": 1.0, "weighting": {"share": 1.0, "alone": 0.0, "prune": 0.0},
     "prompts": {"closed": {"capital": ["Q: {question} A:"]}, "augmented": ...}}
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Literal

from replug.config.errors import UserError
from replug.config.methods import GENREAD, METHOD, NONE, RANDOM, RERANKERS, WITHOUT_RETRIEVER
from replug.config.rules import QUESTION
from replug.data.files import write_json
from replug.models.ensemble import POSTERIOR, REPLUG_WEIGHTS, Weighting
from replug.models.generation import Generated

FORMAT = 3
FORM = 60  # characters of a prompt that an error shows
Threshold = float | Literal["never", "always"]
NEVER: Threshold = "never"
ALWAYS: Threshold = "always"


class KnownFrom(Enum):
    """The source of a signal, which says what it costs."""

    question = "the question"  # nothing, but it must be given
    closed_answer = "the closed-book answer"  # one call of the LM
    search = "the search"  # one call of the retriever


@dataclass(frozen=True, slots=True)
class Signal:
    """A number of a question by which retrieval is decided; `retrieves_when` it is below or above a threshold."""

    name: str
    retrieves_when: Literal["below", "above"]
    known_from: KnownFrom
    title: str

    @property
    def sign(self) -> float:
        """1, or -1 for a signal that is turned round so that retrieval is used below a threshold."""
        return 1.0 if self.retrieves_when == "below" else -1.0


# A question is answered from documents where the LM is unsure, or where the retriever is sure of what it found.
SIGNALS = {
    signal.name: signal
    for signal in (
        Signal("popularity", "below", KnownFrom.question, "popularity"),
        Signal("frequency", "below", KnownFrom.question, "documents naming the subject"),
        Signal("mean_logprob", "below", KnownFrom.closed_answer, "log-prob of the closed-book answer"),
        Signal("mean_entropy", "above", KnownFrom.closed_answer, "entropy of the closed-book answer"),
        Signal("top_score", "above", KnownFrom.search, "score of the first document"),
    )
}


@dataclass(frozen=True, slots=True)
class Subject:
    """What a prompt asks about: its relation, and its popularity as the policy counts it. That is page views, or for a
    policy by frequency the documents that name it."""

    relation: str | None = None
    popularity: float | None = None


@dataclass(frozen=True, slots=True)
class PolicyPrompts:
    """The prompts that a policy was fitted to, by relation: each shot, and last the question; joined they are a prompt.

    `query` is what was searched for. `lm_prompt` and `chat` are those keys of the LM.
    """

    closed: Mapping[str, Sequence[str]]
    augmented: Mapping[str, Sequence[str]]
    max_new_tokens: int
    query: str = QUESTION
    lm_prompt: str | None = None
    chat: bool = False

    def of(self, relation: str | None, retrieves: bool) -> Sequence[str]:
        """Return the parts of a relation's prompts; another relation has the shots of the first."""
        forms = self.augmented if retrieves else self.closed
        return forms.get(relation or "", next(iter(forms.values())))

    def require_form(self, lm_prompt: str | None, chat: bool) -> None:
        """Raise UserError where the LM is asked in another form than it was in fitting."""
        for name, fitted, given in (("prompt", self.lm_prompt, lm_prompt), ("chat", self.chat, chat)):
            if fitted != given:
                raise UserError(
                    f"lm.{name} is {given!r}, but the policy was fitted with {fitted!r}; expected lm.{name}={fitted}"
                )


@dataclass(frozen=True, slots=True)
class Policy:
    """Thresholds in the signal's own unit, by relation; `pooled` is for other relations, and where none is given.

    `lm` and `retriever` are identities; `closed` and `augmented` are methods as `configs.methods` reads them. `fitted`
    says from what and how well, for a reader. `temperature` and `weighting` are the ensemble's. `prompts` None means
    that whoever made the policy answers for the prompts.
    """

    lm: str
    retriever: str
    closed: str
    augmented: str
    signal: str
    thresholds: Mapping[str, Threshold]
    pooled: Threshold
    fitted: Mapping[str, Any] = field(default_factory=dict)
    temperature: float = 1.0
    weighting: Weighting = REPLUG_WEIGHTS
    prompts: PolicyPrompts | None = None

    def __post_init__(self) -> None:
        if self.signal not in SIGNALS:
            raise UserError(f"signal {self.signal!r} is unknown; expected one of {', '.join(SIGNALS)}")
        for relation, threshold in (*self.thresholds.items(), ("pooled", self.pooled)):
            is_known = threshold in (NEVER, ALWAYS)
            if isinstance(threshold, int | float) and not isinstance(threshold, bool):
                is_known = math.isfinite(threshold)
            if not is_known:
                raise UserError(f"threshold {threshold!r} of {relation}: expected a finite number, 'never' or 'always'")

    @property
    def decides_by(self) -> Signal:
        return SIGNALS[self.signal]

    @property
    def source(self) -> str:
        """Return where documents come from: bm25, genread, or the name of a retriever."""
        return self.augmented.partition("@")[0]

    @property
    def ensemble_size(self) -> int | None:
        """Documents that are retrieved, where the choice is between none and an ensemble weighed by similarity."""
        found = METHOD.fullmatch(self.augmented)
        if self.closed == NONE and self.augmented == GENREAD:
            return 1
        if self.closed != NONE or found is None or found["k"] is None or found["way"] not in (None, POSTERIOR):
            return None
        if found["source"] in (*RERANKERS, RANDOM):
            return None
        size = int(found["k"])
        return size if size == 1 or found["source"] not in WITHOUT_RETRIEVER else None

    def threshold(self, relation: str | None = None) -> Threshold:
        return self.pooled if relation is None else self.thresholds.get(relation, self.pooled)

    def retrieves(self, value: float | None, relation: str | None = None) -> bool:
        """Return whether a question with this value of the signal retrieves. Without a value it does, unless never."""
        threshold = self.threshold(relation)
        if isinstance(threshold, str):
            return threshold == ALWAYS
        if value is None or math.isnan(value):
            return True
        return self.decides_by.sign * value < self.decides_by.sign * threshold

    def reason(self, value: float | None, relation: str | None = None) -> str:
        """Return a line that says why a question does or does not retrieve."""
        alone = "no document" if self.closed == NONE else self.closed
        does = "documents" if self.retrieves(value, relation) else alone
        seen = "unknown" if value is None else f"{value:g}"
        whose = relation if relation in self.thresholds else "all relations together"
        return f"{does}: {self.signal} is {seen}; {whose}: {self.rule(relation)}"

    def rule(self, relation: str | None = None) -> str:
        """Return when a relation retrieves, such as "below 1841"."""
        threshold = self.threshold(relation)
        return threshold if isinstance(threshold, str) else f"{self.decides_by.retrieves_when} {threshold:g}"

    def require_lm(self, identity: str) -> None:
        """Raise UserError for another LM than the one that the policy was fitted to."""
        if identity != self.lm:
            raise UserError(
                f"the policy was fitted to another LM ({self.lm} then, {identity} now): bring that one back, or fit a "
                "policy to this one's outcomes"
            )

    def require_retriever(self, identity: str | None) -> None:
        """Raise UserError for another retriever, for other documents, and for a retriever that does not say which."""
        if identity is None:
            raise UserError(
                f"the policy was fitted to the retriever {self.retriever}, and this one does not say which it is; "
                "expected a retriever with an attribute `identity`"
            )
        if identity != self.retriever:
            raise UserError(
                f"the policy was fitted to another retriever or to other documents ({self.retriever} then, {identity} "
                "now): bring those back, or fit a policy to outcomes with these"
            )

    def query(self, question: str) -> str:
        """Return what documents are retrieved by, as in fitting; an LM that writes them is asked the question."""
        return (
            question
            if self.prompts is None or self.source == GENREAD
            else self.prompts.query.replace(QUESTION, question)
        )

    def require_prompt(self, prompt: str, joined: str, relation: str | None) -> str:
        """Return the question of a prompt, the whole prompt where the policy says no form.

        `joined` has DOCUMENT in the place of a document. Raises UserError for a prompt of another form.
        """
        if self.prompts is None:
            return prompt
        alone, augmented = ("".join(self.prompts.of(relation, has)) for has in (False, True))
        before, after = alone.split(QUESTION)
        question = prompt[len(before) : len(prompt) - len(after)]
        if prompt != before + question + after:
            raise UserError(
                f"the policy was fitted to prompts of the form {alone[-FORM:]!r}{_shots(self.prompts, relation)}, "
                f"found {prompt[-FORM:]!r}; expected that form, or a policy fitted to outcomes of this one"
            )
        if joined != augmented.replace(QUESTION, question):
            raise UserError(
                f"the policy was fitted to documents in prompts of the form {augmented[-FORM:]!r}"
                f"{_shots(self.prompts, relation)}, and here they are joined as {joined[:FORM]!r}; expected that form, "
                "such as separator='\\n\\n', or a policy fitted to outcomes of this one"
            )
        return question

    def require_ensemble(self, k: int, temperature: float = 1.0, weighting: Weighting = REPLUG_WEIGHTS) -> None:
        """Raise UserError unless the choice is between no document and an ensemble of `k` that is weighed so."""
        if self.ensemble_size is None:
            raise UserError(
                f"the policy chooses between {self.closed} and {self.augmented}; expected {NONE} and an ensemble "
                "weighed by similarity, such as replug@10, or one document, such as bm25@1 and genread"
            )
        if self.ensemble_size != k:
            raise UserError(f"k is {k}, but the policy was fitted to {self.augmented}; expected k={self.ensemble_size}")
        given = {"temperature": temperature} | asdict(weighting)
        for name, fitted in ({"temperature": self.temperature} | asdict(self.weighting)).items():
            if given[name] != fitted and k + bool(weighting.alone or self.weighting.alone) > 1:  # else nothing is mixed
                raise UserError(
                    f"the ensemble's {name} is {given[name]:g}, but the policy was fitted at {fitted:g}; "
                    f"expected ensemble.{name}={fitted:g}, or a policy fitted to outcomes at {given[name]:g}"
                )

    def value_given(self, subject: Subject) -> float:
        """Return the popularity. Raises UserError for a subject without one."""
        if subject.popularity is None or not math.isfinite(subject.popularity):
            raise UserError(f"popularity is missing: the policy decides by {self.signal} ({self.decides_by.title})")
        return subject.popularity

    def value_of_answer(self, closed: Generated) -> float | None:
        """Return the signal of an answer, None of an empty one. Raises UserError for an LM that does not show it."""
        if self.signal == "mean_logprob":
            return closed.mean_logprob
        if closed.token_entropies is None:
            raise UserError(f"the policy decides by {self.signal}, and the LM, such as a server, shows no entropies")
        return closed.mean_entropy

    def value_of_search(self, similarities: Sequence[float]) -> float | None:
        """Return the signal of similarities, the largest first; None where none was found."""
        return similarities[0] if similarities else None

    def save(self, path: Path) -> None:
        content = {"format": FORMAT, **asdict(self), "retrieves_when": self.decides_by.retrieves_when}
        write_json(path, content)


def _shots(prompts: PolicyPrompts, relation: str | None) -> str:
    num = len(prompts.of(relation, retrieves=True)) - 1
    return f" after {num} shots" if num else ""


def load_policy(path: Path) -> Policy:
    """Return a policy from its file. Raises UserError naming the file and what of it cannot be read."""
    content = _read(path)
    names = list(Policy.__dataclass_fields__)
    missing = [name for name in (*names, "retrieves_when") if name not in content]
    unknown = [name for name in content if name not in (*names, "format", "retrieves_when")]
    if missing or unknown:
        what = f"{missing[0]} is missing" if missing else f"{unknown[0]} is unknown"
        raise UserError(f"{path}: {what}; expected what `replug report --policies` writes")
    when = content.pop("retrieves_when")
    try:
        weighting = Weighting(**content["weighting"])
        prompts = None if content["prompts"] is None else PolicyPrompts(**content["prompts"])
        policy = Policy(**{name: content[name] for name in names} | {"weighting": weighting, "prompts": prompts})
    except (UserError, AttributeError, TypeError, ValueError) as error:
        raise UserError(f"{path}: {error}") from error
    if when != policy.decides_by.retrieves_when:
        raise UserError(
            f"{path}: retrieves_when is {when!r}; expected {policy.decides_by.retrieves_when!r} of {policy.signal}"
        )
    return policy


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise UserError(f"{path} does not exist; expected a policy that `replug report --policies` wrote")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(
            f"{path} is not valid JSON ({error}); expected what `replug report --policies` writes"
        ) from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise UserError(f"{path} is not a policy of format {FORMAT}; write it again with `replug report --policies`")
    return content
