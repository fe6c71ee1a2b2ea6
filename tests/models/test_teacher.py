"""Teachers without log-probs of the prompt: z by hand, local tops against a naive softmax, identities and cache."""

import math
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from replug.config.choices import Teacher
from replug.config.errors import RunError, UserError
from replug.config.load import load_config
from replug.config.schema import LMConfig
from replug.models.black_box_lm import Call
from replug.models.build import lm_source, opened_lm
from replug.models.generation import Generated, GenerationOptions, by_text
from replug.models.lm_source import InProcessLM, TeacherLM, yes_logprob
from replug.models.local.stand_in_lm import StandInLM
from tests.support.tiny_lms import load, random_lms_need_make_no_sense, write_llama  # noqa: F401

KEYS = ("data.corpus=c", "data.train=q", "data.heldout=h", "retriever.path=stand_in", "lm.path=stand_in")
ASKS = ("lm.score=yes", 'lm.prompt="{document}\\nDoes that help?\\n{context}"')
WITHOUT = ("evaluate.heldout=false", *ASKS)
CHAT = ("lm.path=null", "lm.url=http://127.0.0.1:1/v1", "lm.model=m", "lm.api=chat")


class SayingLM(InProcessLM):
    """Says what it is given, in order."""

    def __init__(self, said: Sequence[Any]) -> None:
        super().__init__(StandInLM())
        self.said, self.calls = said, []

    def submit_call(self, call: Call) -> "Future[list[Any]]":
        self.calls.append(call)
        future: Future[list[Any]] = Future()
        future.set_result(list(self.said))
        return future


def saying(text: str = "", **tops: float) -> Generated:
    return Generated(text, np.empty(0, np.float32), tops={word: math.log(share) for word, share in tops.items()})


@pytest.mark.parametrize(
    ("tops", "probability"),
    [
        ({"Yes": 0.6, " yes.": 0.1, "No": 0.1, "Yesterday": 0.1}, 0.7),
        ({"Yes": 0.4, "ĠYes": 0.2, "▁yes": 0.1, "ĠNo": 0.2}, 0.7),  # as servers name tokens that begin with a blank
        ({"No": 0.7, "It": 0.1, "I": 0.05}, 0.05),  # at most as likely as the least shown
        ({"No": 0.9, "I": 0.08}, 0.02),  # and at most what is left
        ({"No": 1.0}, 1e-9),
    ],
)
def test_yes_is_added_up_and_at_most_what_it_can_be(tops: dict[str, float], probability: float) -> None:
    logprobs = {text: math.log(share) for text, share in tops.items()}
    assert math.exp(yes_logprob(logprobs)) == pytest.approx(probability)


def test_an_lm_without_likely_tokens_is_an_error_and_not_a_hang() -> None:
    with pytest.raises(RunError, match=r"no likeliest tokens .* set lm\.score=answer"):
        TeacherLM(SayingLM([saying("Yes")]), "teacher", Teacher.yes).submit(["a"], [" b"]).result(10)


def test_answers_are_compared_with_the_continuation() -> None:
    lm = SayingLM([saying("The Rhine."), saying("on Rhine"), saying("")])
    scores = TeacherLM(lm, "teacher", Teacher.answer).score(["a", "b", "c"], [" Rhine"] * 3)
    assert [one.sum_logprob for one in scores] == pytest.approx([1, 2 / 3, 0])
    assert [one.num_tokens for one in scores] == [1, 1, 1]
    assert [(call.draws, call.options.temperature) for call in lm.calls] == [(False, 0)]


def test_local_tops_are_the_likeliest_of_a_naive_softmax(tmp_path: Path) -> None:
    lm = load(write_llama, tmp_path)
    prompts = ["the cat sat on the", "the mat", "a longer prompt about the cat"]
    options = GenerationOptions(2, num_tops=5)
    for prompt, answer in zip(prompts, lm.generate(prompts, options), strict=True):
        with torch.no_grad():
            logits = lm.model(torch.tensor([lm.tokenizer(prompt)["input_ids"]])).logits[0, -1]
        likeliest = logits.double().log_softmax(-1).topk(5)
        texts = [lm.tokenizer.decode([token]) for token in likeliest.indices]  # parts of characters look alike
        assert answer.tops == pytest.approx(by_text(zip(texts, likeliest.values.tolist(), strict=True)), abs=1e-4)
        assert answer.text.startswith(next(iter(answer.tops)))


def test_teachers_have_identities_and_cached_scores_of_their_own(tmp_path: Path) -> None:
    prefixes, continuations = ["yes yes no", "a boat"], [" boat", " boat"]
    found = {}
    for score in Teacher:
        lm = LMConfig(path="stand_in", score=score)  # prompts are the test's own
        source = lm_source(lm, tmp_path / "budget.json", tmp_path / "scores.sqlite")
        found[source.identity] = source.open_here().score(prefixes, continuations)
        cached_lm = SimpleSource(source)
        with opened_lm(lm, cached_lm, tmp_path / "scores.sqlite") as cached:
            first = cached.submit_sums(prefixes, continuations).result()
            again = cached.submit_sums(prefixes, continuations).result()
            assert cached.num_misses == 2
        np.testing.assert_array_equal(first, again)
        assert first[:, 0].tolist() == [one.sum_logprob for one in found[source.identity]]
    assert list(found) == ["stand_in", "stand_in yes", "stand_in answer"]


class SimpleSource:
    """A source that is opened in this process, without Ray."""

    def __init__(self, source: Any) -> None:
        self.open = lambda lm: source.open_here()


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            ("lm.score=yes",),
            r"lm.prompt is missing; expected a question .*'lm.prompt=\"Passage: \{document\}\\n\\nText",
        ),
        (ASKS, r"lm.score=yes gives no log-probs.*set evaluate.heldout=false, and measure"),
        ((*CHAT, "lm.chat=true"), r"lm.chat is true with lm.api=chat.*expected lm.chat=false"),
        (CHAT, r"lm.api is chat, which gives no log-probs"),
        ((*WITHOUT, "data.dev=d", "train.labels=auto", "train.patience=2"), r"train.patience=null data.dev=null"),
        (
            ("evaluate.heldout=false", "lm.score=answer", "loss.lm_score=probability"),
            r"loss.lm_score is probability, but a score by lm.score=answer is not a log-prob",
        ),
        (("lm.api=chat",), r"lm.api is chat, but lm.path"),
    ],
)
def test_keys_that_do_not_go_with_a_teacher_are_refused(tmp_path: Path, overrides: Sequence[str], says: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"run_dir: {tmp_path}\n")
    with pytest.raises(UserError, match=says):
        load_config(file, [*KEYS, "train.epochs=1" if "train.labels=auto" in overrides else "seed=1", *overrides])
