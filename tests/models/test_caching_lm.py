"""The disk cache over an LM that counts, and whose scores differ each time it computes one."""

from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest

from models.black_box_lm import AsyncLM, ContinuationScore
from models.caching_lm import CachingLM

Pair = tuple[str, str]


class CountingLM:
    """Records its calls. While `held`, an answer waits for `finish`. No two answers have the same bits."""

    max_tokens: int | None = None

    def __init__(self, identity: str = "fake", held: bool = False) -> None:
        self.identity, self.held = identity, held
        self.calls: list[list[Pair]] = []
        self.futures: list[Future[list[ContinuationScore]]] = []
        self.answers: list[list[ContinuationScore]] = []
        self._rng = np.random.default_rng(0)

    def submit(self, prefixes: Sequence[str], continuations: Sequence[str]) -> Future:
        self.calls.append(list(zip(prefixes, continuations, strict=True)))
        self.futures.append(Future())
        self.answers.append([self._draw(continuation) for continuation in continuations])
        if not self.held:
            self.finish(-1)
        return self.futures[-1]

    def finish(self, call: int) -> None:
        self.futures[call].set_result(self.answers[call])

    def score(self, prefixes: Sequence[str], continuations: Sequence[str]) -> list[ContinuationScore]:
        return self.submit(prefixes, continuations).result()

    def generate(self, prompts: Sequence[str], max_new_tokens: int, stop: str | None = None) -> list[str]:
        return [prompt + "!" for prompt in prompts]

    def _draw(self, continuation: str) -> ContinuationScore:
        return ContinuationScore(-self._rng.random(len(continuation), dtype=np.float32))


def bits(scores: list[ContinuationScore]) -> list[bytes]:
    return [score.token_logprobs.tobytes() for score in scores]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "deeper" / "scores.sqlite"


def test_it_is_the_language_model_that_it_wraps(path: Path) -> None:
    cached = CachingLM(CountingLM(), path)
    assert isinstance(cached, AsyncLM)
    assert (cached.identity, cached.max_tokens) == ("fake", None)
    assert cached.generate(["a"], 1) == ["a!"]
    assert cached.score([], []) == []


def test_the_second_call_is_a_hit_with_the_same_bits(path: Path) -> None:
    lm = CountingLM()
    cached = CachingLM(lm, path)
    first = cached.score(["p", "q"], ["one", "two"])
    assert bits(first) == bits(lm.answers[0])
    again = cached.score(["q", "p"], ["two", "one"])
    assert bits(again) == bits(first)[::-1]
    assert again[0].token_logprobs.dtype == np.float32
    assert len(lm.calls) == 1
    assert (cached.num_hits, cached.num_misses) == (2, 2)


def test_only_what_is_missing_is_asked_for_in_the_order_given(path: Path) -> None:
    lm = CountingLM()
    cached = CachingLM(lm, path)
    cached.score(["b"], ["y"])
    scores = cached.score(["a", "b", "c"], ["y", "y", "y"])
    assert lm.calls == [[("b", "y")], [("a", "y"), ("c", "y")]]
    assert bits(scores) == bits([lm.answers[1][0], lm.answers[0][0], lm.answers[1][1]])


def test_duplicates_within_a_call_are_scored_once(path: Path) -> None:
    lm = CountingLM()
    cached = CachingLM(lm, path)
    scores = cached.score(["p", "q", "p"], ["y", "y", "y"])
    assert lm.calls == [[("p", "y"), ("q", "y")]]
    assert bits(scores) == bits([lm.answers[0][0], lm.answers[0][1], lm.answers[0][0]])
    assert (cached.num_hits, cached.num_misses) == (1, 2)


def test_a_pair_under_way_is_awaited_and_not_computed_again(path: Path) -> None:
    lm = CountingLM(held=True)
    cached = CachingLM(lm, path)
    first = cached.submit(["a", "b"], ["y", "y"])
    second = cached.submit(["b", "c"], ["y", "y"])
    assert lm.calls == [[("a", "y"), ("b", "y")], [("c", "y")]]
    lm.finish(1)
    assert not first.done()
    assert not second.done()
    lm.finish(0)
    assert bits(first.result(1)) == bits(lm.answers[0])
    assert bits(second.result(1)) == bits([lm.answers[0][1], lm.answers[1][0]])
    assert (cached.num_hits, cached.num_misses) == (1, 3)


def test_an_error_reaches_every_waiter_and_leaves_nothing_behind(path: Path) -> None:
    lm = CountingLM(held=True)
    cached = CachingLM(lm, path)
    first = cached.submit(["a", "b"], ["y", "y"])
    second = cached.submit(["b", "c"], ["y", "y"])
    lm.finish(1)
    lm.futures[0].set_exception(OSError("the scorer is gone"))
    for waiter in (first, second):
        with pytest.raises(OSError, match="the scorer is gone"):
            waiter.result(1)
    lm.held = False
    scores = cached.score(["a", "b", "c"], ["y", "y", "y"])
    assert lm.calls[-1] == [("a", "y"), ("b", "y")]  # c was stored: its own call had succeeded
    assert bits(scores) == bits([*lm.answers[2], lm.answers[1][0]])


def test_an_error_raised_at_once_leaves_nothing_behind(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = CountingLM()
    cached = CachingLM(lm, path)
    with monkeypatch.context() as patch:
        patch.setattr(lm, "submit", lambda prefixes, continuations: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            cached.submit(["a"], ["y"]).result(1)
    assert bits(cached.submit(["a"], ["y"]).result(1)) == bits(lm.answers[0])


def test_an_answer_of_the_wrong_length_is_an_error(path: Path) -> None:
    lm = CountingLM(held=True)
    cached = CachingLM(lm, path)
    waiting = cached.submit(["a", "b"], ["y", "y"])
    lm.futures[0].set_result(lm.answers[0][:1])
    with pytest.raises(ValueError):
        waiting.result(1)


def test_scores_survive_reopening_the_file(path: Path) -> None:
    cached = CachingLM(CountingLM(), path)
    first = cached.score(["p", "日本"], ["one", "🙂"])
    cached.close()
    lm = CountingLM()
    reopened = CachingLM(lm, path)
    assert bits(reopened.score(["p", "日本"], ["one", "🙂"])) == bits(first)
    assert lm.calls == []
    assert (reopened.num_hits, reopened.num_misses) == (2, 0)


def test_another_prefix_continuation_or_model_is_another_key(path: Path) -> None:
    lm = CountingLM()
    cached = CachingLM(lm, path)
    pairs = [("ab", "c"), ("a", "bc"), ("ab", "d"), ("b", "c"), ("", "abc")]
    for prefix, continuation in pairs:
        cached.score([prefix], [continuation])
    assert lm.calls == [[pair] for pair in pairs]
    other = CountingLM(identity="fak")
    CachingLM(other, path).score(["eab", "ab"], ["c", "c"])
    assert other.calls == [[("eab", "c"), ("ab", "c")]]
