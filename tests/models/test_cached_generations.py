"""Answers behind the cache: the LM is asked once for each, whoever comes, and whatever is killed."""

from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from replug.config.errors import UserError
from replug.models.black_box_lm import Call, GenerateCall, Mixture
from replug.models.caching_lm import CachingLM
from replug.models.generation import Generated, GenerationOptions
from replug.models.http.http_lm import HttpLM
from replug.models.http.request_budget import RequestBudget
from replug.models.lm_source import InProcessLM
from replug.models.local.hf_lm import HuggingFaceLM
from replug.models.local.stand_in_lm import StandInLM
from replug.models.score_cache import ScoreCache
from tests.support.fault_server import FaultServer, server_spec
from tests.support.lm_answers import mixed
from tests.support.tiny_lms import load, write_llama

PROMPTS, WEIGHTS, OPTIONS = ["the cat sat", "on the mat the cat"], [0.25, 0.75], GenerationOptions(6)
SAMPLED = replace(OPTIONS, temperature=1.0, seed=5)


class AskedLM(InProcessLM):
    """Records what it is asked. No two answers are the same."""

    def __init__(self) -> None:
        super().__init__(StandInLM())
        self.calls: list[tuple] = []

    def submit_call(self, call: Call) -> "Future[list[Generated]]":
        assert isinstance(call, GenerateCall)
        self.calls.append((*call.prompts[0].prompts, call.options))
        answer: Future[list[Generated]] = Future()
        answer.set_result([answer_of(len(self.calls) - 1)])
        return answer


def answer_of(number: int) -> Generated:
    return Generated(f"answer {number}", *np.full((2, 3), -number, np.float32), prompt_tokens=number)


def bits(answer: Generated) -> tuple:
    entropies = None if answer.token_entropies is None else answer.token_entropies.tobytes()
    counts = answer.weights.tobytes(), answer.prompt_tokens, answer.answer_tokens
    return answer.text, answer.token_logprobs.tobytes(), entropies, *counts


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "scores.sqlite"


# Asked once ---------------------------------------------------------------------------------------------


def test_an_equal_call_is_not_asked_twice_nor_after_the_file_was_opened_again(path: Path) -> None:
    lm = AskedLM()
    cached = CachingLM(lm, path)
    first = mixed(cached, PROMPTS, WEIGHTS, OPTIONS)
    assert bits(mixed(cached, PROMPTS, WEIGHTS, replace(OPTIONS, opening="the"))) == bits(first)
    assert cached.metrics()["hits"] == cached.metrics()["misses"] == 1
    cached.close()
    again = CachingLM(lm, path)
    assert bits(again.submit_answer(Mixture(tuple(PROMPTS), np.array(WEIGHTS)), OPTIONS).result()) == bits(first)
    assert len(lm.calls) == 1
    for changes in ({"share": 0.05}, {"share": 0.05, "prune": 0.01}, {"share": 0.05, "read": 2}):
        again.submit_answer(Mixture(PROMPTS, WEIGHTS, **changes), OPTIONS).result()
    again.submit_answer(Mixture(PROMPTS, WEIGHTS, share=0.05), OPTIONS).result()
    assert len(lm.calls) == 4
    again.close()
    scores = ScoreCache(path)
    assert [(use.rows, use.generations) for use in scores.models()] == [(0, 4)]
    scores.close()


# Killed -------------------------------------------------------------------------------------------------


# Behind real backends -----------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [OPTIONS, SAMPLED], ids=["greedy", "sampled"])
def test_local_weights_and_the_file_give_the_same_bits(path: Path, tmp_path: Path, options: GenerationOptions) -> None:
    lm: HuggingFaceLM = load(write_llama, tmp_path / "llama")
    cached = CachingLM(InProcessLM(lm), path)
    fresh = mixed(cached, PROMPTS, WEIGHTS, options)
    assert bits(fresh) == bits(mixed(lm, PROMPTS, WEIGHTS, options))
    passes = lm.counts.tokens
    assert bits(mixed(cached, PROMPTS, WEIGHTS, options)) == bits(fresh)
    assert lm.counts.tokens == passes
    assert fresh.mean_entropy is not None


def test_a_servers_answer_has_no_entropies_and_costs_one_request(path: Path) -> None:
    with FaultServer() as server:
        cached = CachingLM(HttpLM(server_spec(server.url), RequestBudget(None)), path)
        fresh = mixed(cached, ["red red blue", "red"], [0.5, 0.5], OPTIONS)
        requests = server.requests
        assert bits(mixed(cached, ["red red blue", "red"], [0.5, 0.5], OPTIONS)) == bits(fresh)
        assert (fresh.token_entropies, fresh.mean_entropy, fresh.prompt_tokens) == (None, None, 4)
        assert fresh.num_tokens == OPTIONS.max_new_tokens
        assert server.requests == requests
        with pytest.raises(UserError, match="set temperature to 0"):
            mixed(cached, ["red"], [1.0], SAMPLED)
        cached.close()
