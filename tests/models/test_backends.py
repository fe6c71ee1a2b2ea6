"""LM backends, and teachers on top of them: one protocol, one list, which a new backend adds its line to."""

import json
import math
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerBase

from replug.config.choices import Teacher
from replug.config.errors import RunError, UserError
from replug.config.load import load_ask_config, load_config
from replug.config.schema import LMConfig
from replug.library import LSRTrainer
from replug.models import build
from replug.models.black_box_lm import AsyncLM, Call
from replug.models.build import lm_source, lm_tokenizer_json, opened_lm
from replug.models.encoder_retriever import EncoderRetriever
from replug.models.ensemble import Retrieved
from replug.models.generation import Generated, GenerationOptions, by_text
from replug.models.http.server_source import ServerLM
from replug.models.lm_source import InProcessLM, TeacherLM, yes_logprob
from replug.models.local.hf_lm import HuggingFaceLM, HuggingFaceSource
from replug.models.local.stand_in_lm import StandInLM
from replug.models.replug_lm import ReplugLM
from tests.support.fault_server import MODEL, FaultServer, word_tokenizer
from tests.support.lm_answers import bits, mixed, texts_of
from tests.support.tokenizers import write_family

PREFIXES, CONTINUATIONS = ["a b c", "c d", "a b c"], [" a b", " e", " c"]


class ToyLM(StandInLM):
    identity = "toy"


class ToySource:
    """A backend as somebody else would add it: `lm.path=toy:lm`, in the process that asks, without actors."""

    identity = ToyLM.identity
    max_tokens: int | None = None
    roles = ()

    def tokenizer(self) -> PreTrainedTokenizerBase:
        return StandInLM().tokenizer

    def connect(self, budget_file=None, cache=None) -> None:
        """Nothing is elsewhere."""

    def open(self, lm: LMConfig) -> AsyncLM:
        return InProcessLM(ToyLM(), lm.tokens_per_batch)

    def open_here(self) -> AsyncLM:
        return InProcessLM(ToyLM())


@pytest.fixture
def with_toy(monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = build.named_source
    monkeypatch.setattr(build, "named_source", lambda lm: ToySource() if lm.path == "toy:lm" else shipped(lm))


def lm_section(*overrides: str) -> LMConfig:
    return load_ask_config(list(overrides)).lm


def scored(lm: AsyncLM) -> list[bytes]:
    return bits(lm.score(PREFIXES, CONTINUATIONS))


def test_the_path_names_the_backend(with_toy: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HuggingFaceSource, "connect", lambda *_: None)  # there is no such name on the hub

    def source(path: str) -> Any:
        return lm_source(lm_section(f"lm.path={path}"), tmp_path / "budget.json", tmp_path / "scores.sqlite")

    assert source("stand_in").load().delay_seconds == 0
    assert source("stand_in:0.25").load().delay_seconds == 0.25
    assert isinstance(source("toy:lm"), ToySource)
    assert isinstance(source("somebody/lm"), HuggingFaceSource)
    with pytest.raises(UserError, match=r"lm\.path: \./nothing does not exist"):
        source("./nothing")


def test_a_server_is_asked_and_probed_before_anything_heavy_and_is_the_lm_that_is_opened(tmp_path: Path) -> None:
    with FaultServer() as server:
        lm = lm_section(f"lm.url={server.url}", f"lm.model={MODEL}", f"lm.tokenizer={word_tokenizer()}")
        source = lm_source(lm, tmp_path / "budget.json", tmp_path / "scores.sqlite")
        assert json.loads((tmp_path / "budget.json").read_text())["requests"] > 0
        assert source.identity.startswith(f"{MODEL}#")
        assert source.roles == ()
        with opened_lm(lm, source, tmp_path / "scores.sqlite") as opened:
            assert scored(opened) == scored(source.open_here())
        again = lm_source(lm, tmp_path / "budget.json", tmp_path / "scores.sqlite")
        assert again.identity == source.identity
        again.open_here().close()


def test_a_server_is_an_lm_of_the_library_that_documents_are_mixed_for_and_that_a_run_asks(tmp_path: Path) -> None:
    with FaultServer() as server:
        with closing(ServerLM(server.url, MODEL, tokenizer=word_tokenizer(), max_concurrency=2)) as lm:
            documents = [Retrieved("a b c", 1.0, "first"), Retrieved("c d", 0.0, "second")]
            [mixed_score] = ReplugLM(lm, EncoderRetriever(Letters(), ["a"]), k=2).score(["a"], [" b"], [documents])
            alone = [lm.score([f"{document.text}\na"], [" b"])[0].sum_logprob for document in documents]
            assert min(alone) < mixed_score.sum_logprob < max(alone)
            rows = {"corpus": ["a b"], "train": [{"context": "a", "continuation": " b"}], "run_dir": tmp_path}
            trainer = LSRTrainer("stand_in", lm, **rows, heldout=rows["train"], config="own_data_online")
            assert (trainer.config.lm.url, trainer.config.lm.max_concurrency) == (server.url, 2)
        with pytest.raises(UserError, match=r"lm\.modle: unknown key; did you mean lm\.model"):
            ServerLM(server.url, MODEL, modle="words")


class Letters:
    def encode(self, texts: list[str]) -> list[list[int]]:
        return [[text.count(letter) for letter in "abc"] for text in texts]


def test_a_server_that_is_not_there_is_told_at_once_and_its_tokenizer_needs_no_server(tmp_path: Path) -> None:
    write_family("Llama 2", tmp_path / "tokenizer")
    (tmp_path / "tokenizer/config.json").write_text("{}")
    keys = ["lm.url=http://127.0.0.1:1/v1", "lm.model=words", "lm.patience_minutes=0.001"]
    with pytest.raises(UserError, match=r"lm\.tokenizer is missing"):
        lm_section(*keys)
    lm = lm_section(*keys, f"lm.tokenizer={tmp_path / 'tokenizer'}")
    with pytest.raises(UserError, match=r"lm\.url: http://127.0.0.1:1/v1 cannot be reached"):
        lm_source(lm, tmp_path / "budget.json", tmp_path / "scores.sqlite")
    assert "Prepend" not in lm_tokenizer_json(lm), "it counts the tokens of what stands inside a text"


def test_a_toy_is_scored_and_cached_without_ray(with_toy: None, tmp_path: Path) -> None:
    lm, cache = lm_section("lm.path=toy:lm"), tmp_path / "scores.sqlite"
    source = lm_source(lm, tmp_path / "budget.json", cache)
    for hits in (0, 3):
        with opened_lm(lm, source, cache) as opened:
            expected = StandInLM().score(PREFIXES, CONTINUATIONS)
            assert scored(opened) == bits(expected)
            assert opened.num_hits == hits


# The stand-in LM's scores, worked out by hand.

LM = StandInLM()


def test_a_continuation_of_two_words_has_the_score_computed_by_hand() -> None:
    score = LM.score(["red blue red"], [" red blue"])[0]
    red = 0.5 * 2 / 3 + 0.5 / 256**4  # two of three words; four bytes with its space
    blue = 0.5 * 1 / 4 + 0.5 / 256**5  # one of four words by now
    np.testing.assert_allclose(score.token_logprobs, [math.log(red), math.log(blue)], rtol=1e-6)
    assert score.num_tokens == 2
    assert score.sum_logprob == pytest.approx(math.log(red) + math.log(blue))


def test_a_word_that_was_not_seen_is_as_likely_as_its_bytes() -> None:
    for prefix, word, num_bytes in (("", "日", 3), ("a prefix", " " + "long" * 100, 401)):  # such as a URL
        score = LM.score([prefix], [word])[0]
        assert score.sum_logprob == pytest.approx(math.log(0.5) - num_bytes * math.log(256))


def test_generation_repeats_the_most_frequent_word_until_the_stop() -> None:
    assert texts_of(LM, ["b a b", ""], 3) == ["b b b", ""]
    assert texts_of(LM, ["b a b"], 3, stop=" ") == ["b"]
    assert texts_of(LM, ["b a b"], 3, stop="b b") == [""]
    assert texts_of(LM, ["b a b"], 3, stop=["x", " "]) == ["b"]


def test_the_answer_of_several_prompts_is_the_mixtures() -> None:
    # A word of three bytes with its space: 0.5 * its share + 0.5 / 256**3.
    prompts = ["aa aa bb", "bb bb bb"]
    tiny = 0.5 / 256**3
    heavy = mixed(LM, prompts, [0.9, 0.1], GenerationOptions(1))
    assert heavy.text == "aa"
    assert heavy.sum_logprob == pytest.approx(math.log(0.9 * (0.5 * 2 / 3 + tiny) + 0.1 * tiny))
    light = mixed(LM, prompts, [0.5, 0.5], GenerationOptions(2))
    assert light.text == "bb bb"
    first = 0.5 * (0.5 / 3 + tiny) + 0.5 * (0.5 + tiny)
    second = 0.5 * (0.5 * 2 / 4 + tiny) + 0.5 * (0.5 + tiny)  # both prompts have been given the first word
    np.testing.assert_allclose(light.token_logprobs, np.log([first, second]), rtol=1e-6)


# Teachers without log-probs of the prompt -----------------------------------------------------------------------

KEYS = ("data.corpus=c", "data.train=q", "data.heldout=h", "retriever.path=stand_in", "lm.path=stand_in")
ASKS = ("lm.score=yes", 'lm.prompt="{document}\\nDoes that help?\\n{context}"')
WITHOUT = ("evaluate.heldout=false", *ASKS)
CHAT = ("lm.path=null", "lm.url=http://127.0.0.1:1/v1", "lm.model=m", "lm.api=chat")


class SayingLM(InProcessLM):
    """Says what it is given, in order."""

    def __init__(self, said: Sequence[str]) -> None:
        super().__init__(StandInLM())
        self.said, self.calls = said, []

    def submit_call(self, call: Call) -> "Future[list[Any]]":
        self.calls.append(call)
        future: Future[list[Any]] = Future()
        future.set_result([Generated(text, np.empty(0, np.float32), tops={}) for text in self.said])
        return future


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
    lm = SayingLM(["Yes"])
    with pytest.raises(RunError, match=r"no likeliest tokens .* set lm\.score=answer"):
        TeacherLM(lm, "teacher", Teacher.yes).submit(["a"], [" b"]).result(10)


def test_answers_are_compared_with_the_continuation() -> None:
    lm = SayingLM(["The Rhine.", "on Rhine", ""])
    scores = TeacherLM(lm, "teacher", Teacher.answer).score(["a", "b", "c"], [" Rhine"] * 3)
    assert [one.sum_logprob for one in scores] == pytest.approx([1, 2 / 3, 0])
    assert [one.num_tokens for one in scores] == [1, 1, 1]
    assert [(call.draws, call.options.temperature) for call in lm.calls] == [(False, 0)]


def test_local_tops_are_the_likeliest_of_a_naive_softmax(lm: HuggingFaceLM) -> None:
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
        in_process = SimpleNamespace(open=lambda lm, source=source: source.open_here())
        with opened_lm(lm, in_process, tmp_path / "scores.sqlite") as cached:
            first = cached.submit_sums(prefixes, continuations).result()
            again = cached.submit_sums(prefixes, continuations).result()
            assert cached.num_misses == 2
        np.testing.assert_array_equal(first, again)
        assert first[:, 0].tolist() == [one.sum_logprob for one in found[source.identity]]
    assert list(found) == ["stand_in", "stand_in yes", "stand_in answer"]


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (("lm.score=yes",), r"lm.prompt is missing; expected a question .*'lm.prompt=\"Passage: \{document\}"),
        (ASKS, r"lm.score=yes gives no log-probs.*set evaluate.heldout=false, and measure"),
        ((*CHAT, "lm.chat=true"), r"lm.chat is true with lm.api=chat.*expected lm.chat=false"),
        (CHAT, r"lm.api is chat, which gives no log-probs"),
        ((*WITHOUT, "data.dev=d", "train.labels=auto", "train.patience=2"), r"train.patience=null data.dev=null"),
        (("evaluate.heldout=false", "lm.score=answer", "loss.lm_score=probability"), "lm.score=answer is not a log-p"),
        (("lm.api=chat",), r"lm.api is chat, but lm.path"),
    ],
)
def test_keys_that_do_not_go_with_a_teacher_are_refused(tmp_path: Path, overrides: Sequence[str], says: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"run_dir: {tmp_path}\n")
    with pytest.raises(UserError, match=says):
        load_config(file, [*KEYS, "train.epochs=1" if "train.labels=auto" in overrides else "seed=1", *overrides])
