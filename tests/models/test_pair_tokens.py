"""Token ids of many pairs in one call, against one pair at a time; and a replica that tokenizes beside its device."""

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast, masking_utils

from replug.models.black_box_lm import ContinuationScore, LaunchingLM, Pending, ScoreCall, UnscorableText
from replug.models.local import hf_lm
from replug.models.local.hf_lm import HuggingFaceLM
from replug.models.local.output_layer import continuation_positions
from replug.models.local.stand_in_lm import StandInLM, StandInSource
from replug.models.pair_tokens import PairIds, TokenizedCall, pairs_token_ids
from replug.models.scorer_pool import Scorer
from tests.support.tiny_lms import PAIRS, load, random_lms_need_make_no_sense, write_gpt2, write_tokenizer

__all__ = ["random_lms_need_make_no_sense"]

HARD = [
    *PAIRS,
    ("the c", "at sat"),  # a word over the border
    ("the cat ", " sat"),
    ("the cat</s>", " sat</s>"),
    ("<s>", "<s>"),
    ("</s>", " sat"),
    ("the cat\r\n\n", "\n\n sat"),
    (" ", " "),
    ("", "</s>"),
    ("e\u0301", "\u0301a"),
    *PAIRS[:2],  # again
]


def one_pair(tokenizer, prefix: str, continuation: str) -> PairIds:
    before = tokenizer(prefix)["input_ids"] if prefix else []
    end = tokenizer.eos_token_id
    if before and before[-1] == end:
        before = before[:-1]
    if not before:
        start = tokenizer.bos_token_id
        before = [start if start is not None else end]
    return before, tokenizer(continuation, add_special_tokens=False)["input_ids"]


def pair_by_pair(tokenizer, prefixes: Sequence[str], continuations: Sequence[str]) -> list[PairIds]:
    return [one_pair(tokenizer, p, c) for p, c in zip(prefixes, continuations, strict=True)]


@pytest.mark.parametrize("template", [None, "<s> $A", "<s> $A </s>", "$A </s>"])
def test_pairs_together_have_the_ids_of_one_pair_at_a_time(tmp_path: Path, template: str | None) -> None:
    write_tokenizer(tmp_path, template=template)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    prefixes, continuations = zip(*HARD, strict=True)
    assert pairs_token_ids(tokenizer, prefixes, continuations) == pair_by_pair(tokenizer, prefixes, continuations)


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory) -> HuggingFaceLM:
    return load(write_gpt2, tmp_path_factory.mktemp("lm"))


def bits(scores: Sequence[ContinuationScore]) -> list[bytes]:
    return [score.token_logprobs.tobytes() for score in scores]


@pytest.mark.parametrize("opening", [None, "", "the cat"])
def test_scores_are_those_of_pairs_that_were_tokenized_one_by_one(lm, monkeypatch, opening: str | None) -> None:
    prefixes, continuations = zip(*HARD, strict=True)
    prefixes = [f"the cat{prefix}" for prefix in prefixes] if opening else list(prefixes)
    together = bits(lm.score(prefixes, continuations, opening=opening))
    apart = lm.tokenize(prefixes, continuations, opening=opening)
    assert isinstance(lm, LaunchingLM) and bits(lm.launch(apart).result()) == together
    monkeypatch.setattr(hf_lm, "pairs_token_ids", pair_by_pair)
    assert bits(lm.score(prefixes, continuations, opening=opening)) == together


def test_empty_texts_are_refused_before_the_device_is_asked(lm) -> None:
    with pytest.raises(UnscorableText, match="continuation 1 is empty"):
        lm.tokenize(["a", "b"], [" c", ""])


def test_positions_are_those_before_each_token_of_a_continuation() -> None:
    row, position, target = continuation_positions([([7], [1, 2]), ([7, 8, 9], [3]), ([5, 6], [4, 4, 4])])
    assert row.tolist() == [0, 0, 1, 2, 2, 2]
    assert position.tolist() == [0, 1, 2, 1, 2, 3]
    assert target.tolist() == [1, 2, 3, 4, 4, 4]


# A replica --------------------------------------------------------------------------------------------------------


class SlowLM(StandInLM):
    """Says what happens to it, and stays at its first call until the second is tokenized."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[str, str]] = []
        self.second_is_tokenized = threading.Event()
        self.computes_in: set[str] = set()

    def tokenize(self, prefixes, continuations, *, opening=None) -> TokenizedCall:
        self.events.append(("tokenized", prefixes[0]))
        if len(self.events) > 1:
            self.second_is_tokenized.set()
        pairs = zip(prefixes, continuations, strict=True)
        return TokenizedCall([(list(p.encode()), list(c.encode())) for p, c in pairs], [])

    def launch(self, call: TokenizedCall) -> Pending:
        assert self.second_is_tokenized.wait(60), "the next call was not tokenized while the device was at this one"
        self.computes_in.add(threading.current_thread().name)
        texts = [(bytes(p).decode(), bytes(c).decode()) for p, c in call.pairs]
        return self.pending(self.score([p for p, _ in texts], [c for _, c in texts]))

    def pending(self, scores: list[ContinuationScore]) -> Pending:
        done: Future[list[ContinuationScore]] = Future()
        done.set_result(scores)
        return done


def test_a_replica_tokenizes_the_next_call_while_its_device_is_at_one() -> None:
    replica, slow = Scorer(StandInSource(), threads=1), SlowLM()
    replica._lm = slow
    with ThreadPoolExecutor(2) as calls:  # as many as a pool gives it at once
        answers = list(calls.map(replica.score, [ScoreCall(["a b"], [" b"]), ScoreCall(["c d"], [" d"])]))
    plain = StandInLM()
    assert [bits(answer.scores) for answer in answers] == [
        bits(plain.score(["a b"], [" b"])),
        bits(plain.score(["c d"], [" d"])),
    ]
    assert {name.rpartition("_")[0] for name in slow.computes_in} == {"device"} and len(slow.computes_in) == 1
    assert all(answer.tokens == 3 for answer in answers)


def test_what_tokenizing_refuses_reaches_the_caller_and_the_next_call_is_answered(lm) -> None:
    replica = Scorer(StandInSource(), threads=1)
    replica._lm = lm
    with pytest.raises(UnscorableText, match="continuation 0 is empty"):
        replica.score(ScoreCall(["a"], [""]))
    assert bits(replica.score(ScoreCall(["a"], [" b"])).scores) == bits(lm.score(["a"], [" b"]))


class BehindLM(SlowLM):
    """A device whose first call ends when the second has been launched."""

    def __init__(self) -> None:
        super().__init__()
        self.second_is_tokenized.set()
        self.launched: list[Future] = []

    def pending(self, scores: list[ContinuationScore]) -> Pending:
        under_way: Future[list[ContinuationScore]] = Future()
        self.launched.append(under_way)
        if len(self.launched) == 2:
            for call in self.launched:
                threading.Timer(0.2 if call is under_way else 0.1, call.set_result, [scores]).start()
        return under_way


def test_a_replica_launches_the_next_call_behind_the_one_that_its_device_is_at() -> None:
    replica, behind = Scorer(StandInSource(), threads=1), BehindLM()
    replica._lm = behind
    with ThreadPoolExecutor(2) as calls:
        first, second = sorted(
            calls.map(replica.score, [ScoreCall(["a b"], [" b"]), ScoreCall(["c d"], [" d"])]),
            key=lambda answer: answer.began,
        )
    assert len(behind.launched) == 2
    assert second.began == pytest.approx(first.began + first.seconds)  # not when it was launched
    assert 0.05 < second.seconds < 60
    assert first.tokens == second.tokens == 3


# Scores on their way to the host ----------------------------------------------------------------------------------


def test_launching_fetches_nothing_from_the_device(lm, monkeypatch) -> None:
    fetched: list[str] = []
    prefixes, continuations = [p for p, _ in HARD], [c for _, c in HARD]
    expected = bits(lm.score(prefixes, continuations))
    call = lm.tokenize(prefixes, continuations)
    for name in ("cpu", "numpy", "item", "tolist", "__bool__", "__float__", "__int__"):
        plain = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda self, *a, _f=plain, _n=name: fetched.append(_n) or _f(self, *a))
    # transformers looks at positions itself, before a padded pass
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda positions: None)
    pending = lm.launch(call)
    assert fetched == []
    assert pending.done() and bits(pending.result()) == expected
    assert set(fetched) == {"numpy"}
