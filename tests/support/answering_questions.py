"""A few questions that tests of answering share: shots, passages, and an LM that counts what it is asked."""

from collections import Counter
from concurrent.futures import Future

from replug.answering.prompts import AnswerPrompts, Shot
from replug.models.black_box_lm import Call, ScoreCall
from replug.models.lm_source import InProcessLM
from replug.models.local.stand_in_lm import StandInLM
from replug.web.records import Passage

SHOTS = [
    Shot("who wrote Faust?", "Goethe", "Goethe wrote\n Faust  in Weimar."),
    Shot("which river flows through Nantes?", "the Loire", "The Loire flows through Nantes."),
]
QUESTION = "which river flows through Basel?"
TEXTS = ["The Rhine flows through Basel.", "Basel lies on a river,\nthe Rhine.", "The Rhone flows through Lyon."]
PROBABILITIES = [0.5, 0.3, 0.2]
PASSAGES = [
    Passage(text, f"https://example.org/{number}", "a page", "2026-11-24", number + 1, share, share)
    for number, (text, share) in enumerate(zip(TEXTS, PROBABILITIES, strict=True))
]
PROMPTS = AnswerPrompts(SHOTS)


class CountingLM(InProcessLM):
    """The stand-in; counts every pair and every prompt that it is asked about."""

    def __init__(self) -> None:
        super().__init__(StandInLM())
        self.asked: Counter[tuple] = Counter()
        self.openings: list[str | None] = []

    def submit_call(self, call: Call) -> "Future[list]":
        if isinstance(call, ScoreCall):
            self.asked.update(zip(call.prefixes, call.continuations, strict=True))
            self.openings.append(call.opening)
        elif call.draws:
            self.asked.update((prompt, call.options.num_samples) for prompt in call.prompts)
        return super().submit_call(call)
