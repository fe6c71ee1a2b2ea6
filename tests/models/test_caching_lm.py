"""The disk cache over an LM that counts, and whose scores differ each time it computes one."""

import hashlib
import sqlite3
import threading
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replug.config.errors import RunError
from replug.models.black_box_lm import Call, ContinuationScore, GenerateCall, Mixture, gathered, sums_of
from replug.models.ensemble import Weighting
from replug.models.generation import Generated, GenerationOptions
from replug.models.lm_source import InProcessLM
from replug.models.local.stand_in_lm import StandInLM
from replug.models.score_cache import CachingLM
from tests.support.cached_scores import num_cached
from tests.support.lm_answers import answer_bits, bits, mixed


class CountingLM(InProcessLM):
    """Records its calls. While `held`, scores wait for `finish`. No two answers have the same bits."""

    def __init__(self, identity: str = "fake", held: bool = False, unit_size: int = 100) -> None:
        super().__init__(StandInLM())
        self.identity, self.held, self.unit_size = identity, held, unit_size
        self.calls: list[list[Any]] = []
        self.futures: list[Future[list[ContinuationScore]]] = []
        self.answers: list[list[ContinuationScore]] = []
        self._rng = np.random.default_rng(0)

    def units(self, call: Call) -> list[list[int]]:
        rows = range(len(call))
        return [list(rows[start : start + self.unit_size]) for start in rows[:: self.unit_size]]

    def submit_call(self, call: Call) -> Future:
        if isinstance(call, GenerateCall):
            self.calls.append([(*call.prompts[0].prompts, call.options)])
            answer: Future[list[Generated]] = Future()
            answer.set_result([Generated("an answer", *self._rng.random((2, 3), dtype=np.float32), prompt_tokens=7)])
            return answer
        self.calls.append(list(zip(call.prefixes, call.continuations, strict=True)))
        self.futures.append(Future())
        self.answers.append([self._draw(continuation) for continuation in call.continuations])
        if not self.held:
            self.finish(-1)
        return self.futures[-1]

    def finish(self, call: int) -> None:
        self.futures[call].set_result(self.answers[call])

    def _draw(self, continuation: str) -> ContinuationScore:
        return ContinuationScore(-self._rng.random(len(continuation), dtype=np.float32))


class CompanyLM(CountingLM):
    """The last bits of a score follow from the unit that it was computed in, as with a real LM's batches."""

    def submit_call(self, call: Call) -> Future:
        texts = [*call.prefixes, *call.continuations]
        self._rng = np.random.default_rng(list(hashlib.sha256(repr(texts).encode()).digest()))
        return super().submit_call(call)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "deeper" / "scores.sqlite"


def test_a_pair_under_way_is_awaited_and_not_computed_again(path: Path) -> None:
    lm = CountingLM(held=True)
    cached = CachingLM(lm, path)
    first = cached.submit(["a", "b"], ["y", "y"])
    second = cached.submit(["b", "c"], ["y", "y"])
    assert lm.calls == [[("a", "y"), ("b", "y")], [("c", "y")]]
    lm.finish(1)
    assert not first.done() and not second.done()
    lm.finish(0)
    assert bits(first.result(60)) == bits(lm.answers[0])
    assert bits(second.result(60)) == bits([lm.answers[0][1], lm.answers[1][0]])
    assert (cached.num_hits, cached.num_misses) == (1, 3)


@pytest.mark.parametrize("last", [0, -1])
def test_a_call_may_wait_for_thousands_of_others(last: int) -> None:
    pending: list[Future[None]] = [Future() for _ in range(2000)]
    others = [future for future in pending if future is not pending[last]]
    for future in others[:1000]:
        future.set_result(None)
    whole = gathered(pending, lambda: "all")
    for future in [*others[1000:], pending[last]]:
        assert not whole.done()
        future.set_result(None)
    assert whole.result(timeout=60) == "all"


def test_an_error_reaches_every_waiter_and_leaves_nothing_behind(path: Path) -> None:
    lm = CountingLM(held=True)
    cached = CachingLM(lm, path)
    first = cached.submit(["a", "b"], ["y", "y"])
    second = cached.submit(["b", "c"], ["y", "y"])
    lm.finish(1)
    lm.futures[0].set_exception(OSError("the scorer is gone"))
    for waiter in (first, second):
        with pytest.raises(OSError, match="the scorer is gone"):
            waiter.result(60)
    lm.held = False
    scores = cached.score(["a", "b", "c"], ["y", "y", "y"])
    assert lm.calls[-1] == [("a", "y"), ("b", "y")]  # c was stored: its own call had succeeded
    assert bits(scores) == bits([*lm.answers[2], lm.answers[1][0]])


@pytest.mark.parametrize("wrong", [[], [-1.5]], ids=["too few", "numbers"])
def test_answers_that_are_no_scores_are_an_error_and_not_a_hang(path: Path, wrong: list[float]) -> None:
    lm = CountingLM(held=True)
    call = CachingLM(lm, path).submit_sums(["a"], ["y"])
    lm.futures[0].set_result(wrong)
    with pytest.raises((ValueError, AttributeError), match=r"0 answers to 1 inputs|sum_logprob"):
        call.result(60)


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


def test_a_sum_is_the_same_number_fresh_from_memory_and_from_the_file(path: Path) -> None:
    texts = [f"{'word ' * length}" for length in range(1, 60)]
    lm = CountingLM()
    cached = CachingLM(lm, path)
    fresh = cached.submit_sums(texts, texts).result().tolist()
    assert fresh == sums_of(lm.answers[0]).tolist()
    assert cached.submit_sums(texts, texts).result().tolist() == fresh
    cached.close()
    assert CachingLM(lm, path).submit_sums(texts, texts).result().tolist() == fresh
    assert len(lm.calls) == 1
    assert all(float(np.float32(total)) == total for total, _ in fresh)


def test_sums_alone_are_stored_without_tokens_and_join_them_when_a_call_needs_them(path: Path) -> None:
    lm = CountingLM()
    cached = CachingLM(lm, path)
    cached.submit_sums(["a", "b"], ["y", "y"]).result()
    assert num_cached(path) == {"scores": 2}
    scores = cached.score(["a", "b", "c"], ["y", "y", "y"])
    assert lm.calls[1] == [("a", "y"), ("b", "y"), ("c", "y")]
    assert num_cached(path) == {"scores": 3, "with tokens": 3}
    again = cached.submit_sums(["a", "b", "c"], ["y", "y", "y"]).result()
    np.testing.assert_array_equal(again, sums_of(scores))
    assert bits(cached.score(["a", "b"], ["y", "y"])) == bits(scores)[:2] == bits(lm.answers[1])[:2]
    assert len(lm.calls) == 2
    assert (cached.num_hits, cached.num_misses) == (5, 5)


@pytest.mark.parametrize("first", [0, 1], ids=["sums first", "tokens first"])
def test_tokens_asked_for_while_sums_are_under_way_are_computed_as_after_them(path: Path, first: int) -> None:
    lm = CountingLM(held=True)
    cached = CachingLM(lm, path)
    calls = [cached.submit_sums(["a", "b"], ["y", "y"]), cached.submit(["b"], ["y"])]
    for number in (first, 1 - first):
        lm.finish(number)
        calls[number].result(60)
    assert calls[0].result().tolist() == sums_of(lm.answers[0]).tolist()
    assert bits(calls[1].result()) == bits(lm.answers[1])
    assert num_cached(path) == {"scores": 2, "with tokens": 1}
    assert bits(cached.submit(["b"], ["y"]).result(60)) == bits(lm.answers[1])
    assert len(lm.calls) == 2


def test_a_sum_asked_for_while_its_tokens_are_under_way_waits_for_them(path: Path) -> None:
    lm = CountingLM()
    cached = CachingLM(lm, path)
    cached.submit_sums(["a"], ["y"]).result()
    lm.held = True
    scores = cached.submit(["a"], ["y"])
    totals = cached.submit_sums(["a"], ["y"])
    assert not totals.done()  # the sum that is stored is about to be another one, in its last bits
    lm.finish(1)
    assert totals.result(60).tolist() == sums_of(scores.result(60)).tolist() == sums_of(lm.answers[1]).tolist()


def test_the_units_of_an_interrupted_call_are_computed_again_in_the_same_company(tmp_path: Path) -> None:
    texts = [f"text {number}" for number in range(23)]
    quiet = CachingLM(CompanyLM(unit_size=4), tmp_path / "quiet.sqlite").score(texts, texts)
    for done in ([], [0], [5], [1, 3], [0, 2, 4], [1, 2, 3, 4, 5]):
        path = tmp_path / f"interrupted after {done}.sqlite"
        killed = CompanyLM(held=True, unit_size=4)
        cached = CachingLM(killed, path)
        cached.submit(texts, texts)
        for unit in done:
            killed.finish(unit)
        cached.close()  # as if killed after the next write
        resumed = CompanyLM(unit_size=4)
        assert bits(CachingLM(resumed, path).score(texts, texts)) == bits(quiet)
        assert resumed.calls == [call for unit, call in enumerate(killed.calls) if unit not in done]


def test_overlapping_calls_are_computed_in_the_same_company_after_an_interruption(tmp_path: Path) -> None:
    first, second = [f"t{number}" for number in range(10)], [f"t{number}" for number in range(5, 16)]

    def both(path: Path) -> list[bytes]:
        cached = CachingLM(CompanyLM(unit_size=3), path)
        return bits(cached.submit(first, first).result()) + bits(cached.submit(second, second).result())

    quiet = both(tmp_path / "quiet.sqlite")
    killed = CompanyLM(held=True, unit_size=3)
    cached = CachingLM(killed, tmp_path / "killed.sqlite")
    cached.submit(first, first)
    cached.submit(second, second)
    for unit in (1, 4):  # one of each call
        killed.finish(unit)
    cached.close()
    assert both(tmp_path / "killed.sqlite") == quiet


def test_a_file_that_cannot_be_written_is_an_error_to_all_who_wait(path: Path) -> None:
    lm = CountingLM(held=True)
    cached = CachingLM(lm, path)
    first, second = cached.submit(["a"], ["y"]), cached.submit_sums(["a"], ["y"])
    with sqlite3.connect(path) as database:
        database.execute("DROP TABLE cached")
    lm.finish(0)
    for call in (first, second):
        with pytest.raises(RunError, match=str(path)):
            call.result(60)


def test_many_threads_compute_a_pair_once_and_agree(path: Path) -> None:
    lm = CountingLM(unit_size=3)
    cached = CachingLM(lm, path)
    answers: list[list[bytes]] = []

    def ask() -> None:
        answers.append(bits(cached.score([f"t{number}" for number in range(50)], ["y"] * 50)))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert answers == [answers[0]] * 8
    assert sorted(pair for call in lm.calls for pair in call) == sorted((f"t{number}", "y") for number in range(50))


PROMPTS, WEIGHTS, OPTIONS = ["the cat sat", "on the mat the cat"], [0.25, 0.75], GenerationOptions(6)


def test_an_equal_call_is_not_asked_twice_nor_after_the_file_was_opened_again(path: Path) -> None:
    lm = CountingLM()
    cached = CachingLM(lm, path)
    first = mixed(cached, PROMPTS, WEIGHTS, OPTIONS)
    assert answer_bits(mixed(cached, PROMPTS, WEIGHTS, replace(OPTIONS, opening="the"))) == answer_bits(first)
    assert cached.metrics()["hits"] == cached.metrics()["misses"] == 1
    cached.close()
    again = CachingLM(lm, path)
    found = again.submit_answer(Mixture(tuple(PROMPTS), np.array(WEIGHTS)), OPTIONS).result()
    assert answer_bits(found) == answer_bits(first) and len(lm.calls) == 1
    for weighting in (Weighting(0.05), Weighting(0.05, prune=0.01), Weighting(0.05, read=2)):
        again.submit_answer(Mixture(PROMPTS, WEIGHTS, weighting), OPTIONS).result()
    again.submit_answer(Mixture(PROMPTS, WEIGHTS, Weighting(0.05)), OPTIONS).result()
    assert len(lm.calls) == 4
    again.close()
    assert num_cached(path) == {"answers": 4}
