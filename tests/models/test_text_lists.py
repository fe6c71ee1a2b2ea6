"""One text where a list is expected is refused: Python would take it letter by letter, and answer each."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from replug.config.errors import UserError
from replug.models.black_box_lm import require_texts
from replug.models.caching_lm import CachingLM
from replug.models.encoder import Encoder
from replug.models.encoder_retriever import EncoderRetriever
from replug.models.lm_source import InProcessLM
from replug.models.local.hf_lm import HuggingFaceLM
from replug.models.local.stand_in_lm import StandInLM
from replug.models.packaged import resolve_encoder_path
from replug.models.replug_lm import ReplugLM
from tests.support.tiny_lms import load, write_gpt2


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return Encoder(resolve_encoder_path("stand_in"))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> HuggingFaceLM:
    return load(write_gpt2, tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize("texts", ["ab", b"ab", [1], ["a", None], [["a"]], {"a"}, {"a": 1}, iter(["a"])])
def test_what_is_no_list_of_texts_is_refused(texts: Sequence[str]) -> None:
    with pytest.raises(UserError, match="expected a"):
        require_texts(texts, "prompts")


LMS: list[Callable[..., object]] = [
    lambda lm: lm.generate("a prompt", 3),
    lambda lm: lm.score("ab", "cd"),
    lambda lm: lm.score(["a", "b"], "cd"),
]


@pytest.mark.parametrize("call", LMS)
def test_every_lm_refuses_one_text(call: Callable[..., object], tiny: HuggingFaceLM, encoder: Encoder, tmp_path: Path):
    stand_in = StandInLM()
    cached = CachingLM(InProcessLM(stand_in), tmp_path / "scores.sqlite")
    for lm in (tiny, stand_in, cached):
        with pytest.raises(UserError, match=r"expected a list of .*; write \[text\]"):
            call(lm)
    cached.close()


def test_the_ensemble_takes_one_text_as_one_and_a_list_as_a_list(encoder: Encoder) -> None:
    lm = ReplugLM(StandInLM(), EncoderRetriever(encoder, ["a text", "b text"]), k=2)
    one, many = lm.score("a b", " text"), lm.score(["a b", "b"], [" text", " c"])
    assert one.sum_logprob == many[0].sum_logprob
    assert len(many) == 2
    assert lm.generate("a b", 2) == lm.generate(["a b"], 2)[0]
    [found] = lm.retrieve(["a b"])
    assert lm.score("a b", " text", found[:1]).sum_logprob == lm.score(["a b"], [" text"], [found[:1]])[0].sum_logprob
    for contexts, continuations in ((["a b"], " text"), ("a b", [" text"])):
        with pytest.raises(UserError, match=r"expected a list of .*; write \[text\]"):
            lm.score(contexts, continuations)


def test_encoders_and_retrievers_refuse_one_text(encoder: Encoder) -> None:
    retriever = EncoderRetriever(encoder, ["a text"])
    for call in (
        lambda: encoder.encode("a text"),
        lambda: EncoderRetriever(encoder, "a text"),
        lambda: retriever.retrieve("a text", 1),
        lambda: ReplugLM(StandInLM(), retriever).retrieve("a text"),
        lambda: StandInLM().generate_ensemble("ab", [0.5, 0.5], None),
    ):
        with pytest.raises(UserError, match="expected a list of"):
            call()
