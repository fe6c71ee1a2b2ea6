"""An LM whose every answer is known, and the outcomes of a task that asks it."""

from concurrent.futures import Future
from types import SimpleNamespace

import numpy as np

from replug.data.records import Document
from replug.evals import loop
from replug.evals.loop import PromptedLM
from replug.models.black_box_lm import ContinuationScore
from replug.models.generation import Generated
from replug.models.local.stand_in_lm import StandInLM
from replug.models.prompt import PromptTemplate


class KnownLM:
    """Log-probs by a rule of prefix and continuation; keeps what it was asked."""

    identity, max_tokens = "known", None

    def __init__(self, rule):
        self.rule, self.prompts = rule, []

    def submit(self, prefixes, continuations, opening=None):
        assert all(prefix.startswith(opening or "") for prefix in prefixes)
        self.prompts.append(list(prefixes))
        done = Future()
        logprobs = [np.array(self.rule(*pair), np.float32) for pair in zip(prefixes, continuations, strict=True)]
        done.set_result(list(map(ContinuationScore, logprobs)))
        return done

    def submit_call(self, call):
        [mixture] = call.prompts
        self.prompts.append(list(mixture.prompts))
        done = Future()
        said = self.rule(mixture.prompts[int(np.argmax(mixture.weights))], "")
        done.set_result([Generated(said, np.zeros(1), np.zeros(1), np.array(mixture.weights))])
        return done


class ImmediateLM(StandInLM):
    """The stand-in, whose answers are there at once; keeps what it was asked."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def submit(self, prefixes, continuations, *, opening=None, read=0):
        self.calls.append(list(zip(prefixes, continuations, strict=True)))
        future = Future()
        future.set_result(self.score(prefixes, continuations, read=read))
        return future


def outcome_rows(task, evidence):
    """The rows of the loop, with the same evidence for every example."""
    return list(loop.outcome_rows(task, SimpleNamespace(of=lambda row: evidence)))


def opened(task, lm, book=None, methods=("none",), template=None):
    """The task, which asks this LM after a template that joins by line ends; by default no method has documents."""
    none = SimpleNamespace(methods=[SimpleNamespace(name=name) for name in methods], nearest=lambda method, row: None)
    task.open(PromptedLM(lm, template or PromptTemplate()), book or none)
    return task


class KnownTexts:
    """A corpus of these texts, by their rows: what a book of evidence asks of a corpus store."""

    def __init__(self, texts):
        self._texts = texts

    def texts(self, rows):
        return [self._texts[row] for row in rows]

    def documents(self, rows):
        return [Document(f"d{row}", self._texts[row], "all", "s") for row in rows]
