"""Answers drawn side by side: by their own draws, whatever else is in the call, by every backend."""

from concurrent.futures import Future
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch

from replug.models.black_box_lm import Call
from replug.models.generation import Generated, GenerationOptions
from replug.models.lm_source import InProcessLM
from replug.models.local.decoding import ANEW, PACKED, PADDED, SHARED
from replug.models.local.hf_lm import HuggingFaceLM
from replug.models.local.mixtures import TokenChooser
from replug.models.local.stand_in_lm import StandInLM
from replug.models.score_cache import CachingLM
from tests.models.conftest import Opened
from tests.support.fault_server import FaultServer
from tests.support.tiny_lms import DEMONSTRATIONS, num_tokens

PROMPTS = [DEMONSTRATIONS + prompt for prompt in ("x\nthe", "a mat and a cat\nthe", "日本語\nthe")]
OPTIONS = GenerationOptions(8, num_samples=4, temperature=1.0, top_p=0.8, seed=3, opening=DEMONSTRATIONS)


def texts(samples: list[list[Generated]]) -> list[list[str]]:
    return [[sample.text for sample in some] for some in samples]


def assert_same(one: list[list[Generated]], other: list[list[Generated]]) -> None:
    assert texts(one) == texts(other)
    for a, b in zip(chain(*one), chain(*other), strict=True):
        np.testing.assert_allclose(a.token_logprobs, b.token_logprobs, atol=1e-4)


def reference(lm: HuggingFaceLM, prompt: str, options: GenerationOptions, number: int) -> tuple[list[int], list[float]]:
    """Tokens and log-probs of one sample: every token by a whole pass."""
    chooser = TokenChooser(options.draws(prompt)[number])
    ids, logprobs = lm.tokenizer(prompt)["input_ids"], []
    start = len(ids)
    while len(logprobs) < options.max_new_tokens and ids[start:][-1:] != [lm.tokenizer.eos_token_id]:
        with torch.no_grad():
            given = lm.model(torch.tensor([ids]), use_cache=False).logits[0, -1].log_softmax(-1)
        ids.append(chooser.choose(given))
        logprobs.append(float(given[ids[-1]]))
    return ids[start:], logprobs


def test_samples_equal_a_naive_loop_over_whole_inputs(lm: HuggingFaceLM) -> None:
    for options in (OPTIONS, replace(OPTIONS, temperature=0.7, seed=4)):
        for prompt, samples in zip(PROMPTS, lm.sample(PROMPTS, options), strict=True):
            for number, sample in enumerate(samples):
                ids, logprobs = reference(lm, prompt, options, number)
                assert sample.text == lm.tokenizer.decode(ids, skip_special_tokens=True)
                np.testing.assert_allclose(sample.token_logprobs, logprobs, atol=1e-4)
                assert sample.token_logprobs.dtype == np.float32


def test_a_draw_does_not_depend_on_what_is_asked_with_it(lm: HuggingFaceLM) -> None:
    whole = lm.sample(PROMPTS, OPTIONS)
    assert_same(whole, [lm.sample([prompt], OPTIONS)[0] for prompt in PROMPTS])
    assert_same(whole, lm.sample(PROMPTS[::-1], OPTIONS)[::-1])
    assert_same([some[:2] for some in whole], lm.sample(PROMPTS, replace(OPTIONS, num_samples=2)))
    assert_same(whole, lm.sample(PROMPTS, replace(OPTIONS, opening="")))
    assert len({text for some in texts(whole) for text in some}) > 6
    assert texts(lm.sample(PROMPTS, replace(OPTIONS, seed=5))) != texts(whole)


def test_every_way_through_a_model_draws_the_same(lm: HuggingFaceLM, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = lm.sample(PROMPTS, OPTIONS)
    for use in (PACKED, SHARED, PADDED, ANEW):
        monkeypatch.setitem(lm.__dict__, "_cache_use", use)
        assert_same(lm.sample(PROMPTS, OPTIONS), whole)
    monkeypatch.undo()
    monkeypatch.setattr(lm, "tokens_per_batch", 50)  # a row for the samples of each prompt
    assert_same(lm.sample(PROMPTS, OPTIONS), whole)


def test_an_opening_is_read_once_and_each_prompt_once_for_all_its_samples(lm: HuggingFaceLM) -> None:
    lm.sample(PROMPTS[:1], OPTIONS)
    before, samples = lm.counts["tokens"], lm.sample(PROMPTS, OPTIONS)
    new = sum(len(sample.token_logprobs) - 1 for some in samples for sample in some)
    own = sum(num_tokens(lm, prompt) - num_tokens(lm, DEMONSTRATIONS) for prompt in PROMPTS)
    assert new + own <= lm.counts["tokens"] - before <= new + own + 3 * 33  # a prefix ends at a multiple of 32


def test_a_server_draws_n_answers_by_one_request(opened: Opened) -> None:
    options = GenerationOptions(2, "\n", num_samples=3, temperature=0.9, top_p=0.8, seed=7)
    with FaultServer(first_faults=1, kinds=["throttled"]) as server:
        lm = opened(server)
        found = lm.sample(["red red blue", "boat the", "new"], options)
        assert texts(found) == [
            [" blue fin", " red fin", " blue fin"],
            [" the fin", " boat fin", " the fin"],
            [" new fin"] * 3,
        ]
        assert all(len(sample.token_logprobs) == 2 for some in found for sample in some)
        asked = {"n": 3, "temperature": 0.9, "top_p": 0.8, "seed": 7, "max_tokens": 2, "logprobs": 1, "stop": ["\n"]}
        assert asked.items() <= server.payloads[-1].items()
        assert server.requests - server.faults["throttled"] == 3
        assert lm.metrics()["tokens_sent"] == server.tokens
        assert texts(lm.sample(["red"], replace(options, temperature=0.0))) == [[" red fin"] * 3]
        assert "n" not in server.payloads[-1]


class AskedLM(InProcessLM):
    """Keeps its calls, each a unit of its own."""

    def __init__(self) -> None:
        super().__init__(StandInLM(), unit_tokens=1)
        self.calls: list[Call] = []

    def submit_call(self, call: Call) -> Future:
        self.calls.append(call)
        return super().submit_call(call)


def test_prompts_that_were_sampled_are_not_asked_again_by_anybody(tmp_path: Path) -> None:
    lm, path = AskedLM(), tmp_path / "scores.sqlite"
    cached = CachingLM(lm, path)
    first = cached.sample(["a b c", "d e", "a b c"], OPTIONS)
    assert_same(
        cached.sample(["d e", "f g"], replace(OPTIONS, opening="d")), [first[1], *StandInLM().sample(["f g"], OPTIONS)]
    )
    assert [list(call.prompts) for call in lm.calls] == [["a b c", "d e"], ["f g"]]
    assert (cached.num_hits, cached.num_misses) == (2, 3)
    cached.close()
    again = CachingLM(lm, path)
    found = again.sample(["f g", "a b c"], OPTIONS)
    assert [s.token_logprobs.tobytes() for s in found[1]] == [s.token_logprobs.tobytes() for s in first[0]]
    assert len(lm.calls) == 2
    again.sample(["a b c"], replace(OPTIONS, num_samples=5))
    again.sample(["a b c"], replace(OPTIONS, seed=4))
    assert len(lm.calls) == 4
    again.close()


def test_what_is_missing_of_a_call_with_an_opening_is_one_unit(tmp_path: Path) -> None:
    lm = AskedLM()
    cached = CachingLM(lm, tmp_path / "scores.sqlite")
    cached.score(["a b", "a c"], [" b", " c"], opening="a")
    cached.score(["a b", "a c", "a d"], [" b", " c", " d"], opening="a")
    cached.score(["b b", "b c"], [" b", " c"])
    assert [(len(call), call.opening) for call in lm.calls] == [(2, "a"), (1, "a"), (1, None), (1, None)]
    cached.close()
