"""Mistakes of who uses the library: each is refused by name, none gives an answer to another question."""

import math
import os
import stat
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from replug import Encoder, EncoderRetriever, HuggingFaceLM, Mixture, Retrieved
from replug.models.generation import GenerationOptions
from replug.models.lm_source import InProcessLM
from replug.models.local.stand_in_lm import StandInLM
from replug.models.packaged import resolve_encoder_path
from tests.support.lm_answers import texts_of
from tests.support.real_models import real_encoder


@pytest.fixture(scope="module")
def have() -> SimpleNamespace:
    encoder = Encoder("stand_in")
    return SimpleNamespace(encoder=encoder, retriever=EncoderRetriever(encoder, ["a b", "c d"]), lm=StandInLM())


MISTAKES: dict[str, tuple[Callable[[Any], object], str]] = {
    "max_tokens=0": (lambda have: Encoder("stand_in", max_tokens=0), "max_tokens is 0, but"),
    "max_tokens too large": (lambda have: Encoder("stand_in", max_tokens=999), "max_tokens is 999, but"),
    "an unknown similarity": (lambda have: Encoder("stand_in", "euclid"), "expected cosine or dot"),
    "a folder that is not there": (lambda have: Encoder("./nowhere"), "./nowhere does not exist"),
    "an LM's package as encoder": (lambda have: Encoder("package:smollm2"), "package:smollm2 does not exist"),
    "an encoder as LM": (lambda have: HuggingFaceLM(resolve_encoder_path("stand_in")), "expected a causal LM"),
    "ids twice": (lambda have: EncoderRetriever(have.encoder, ["a", "b"], ["x", "x"]), "2 texts have 1 different ids"),
    "one text to encode": (lambda have: have.encoder.encode("a b"), "expected a list of"),
    "one text as ids": (lambda have: EncoderRetriever(have.encoder, ["a", "b"], "xy"), "expected a list of ids"),
    "one text to a server or pool": (
        lambda have: InProcessLM(have.lm).score("ab", "cd"),
        "expected a list of prefixes",
    ),
    "one text to draw from": (
        lambda have: InProcessLM(have.lm).sample("ab", GenerationOptions(1)),
        "a list of prompts",
    ),
    "one prompt": (lambda have: texts_of(have.lm, "a b", 3), r"expected a list of prompts, .*; write \[text\]"),
    "a similarity of nan": (lambda have: Retrieved("text", math.nan, "d7"), "document d7 has the similarity nan"),
    "more prefixes": (lambda have: have.lm.score(["a", "b"], ["c"]), "2 prefixes but 1 continuations"),
    "nothing to score": (lambda have: have.lm.score(["a"], [""]), "expected a text to score"),
    "no new tokens": (lambda have: texts_of(have.lm, ["a"], 0), "max_new_tokens is 0"),
    "an empty stop": (lambda have: GenerationOptions(3, stop=""), "stop is ''; expected a text"),
    "a number as stop": (
        lambda have: GenerationOptions(3, stop=["a", 7]),
        r"stop is \['a', 7\]; expected a text",
    ),
    "temperature of nan": (lambda have: GenerationOptions(3, temperature=math.nan), "temperature is nan"),
    "no nucleus": (lambda have: GenerationOptions(3, top_p=0.0), "top_p is 0.0; expected above 0 and at most 1"),
    "weights of half": (lambda have: Mixture(["a"], [0.5]), "sum to 0.5"),
    "weights below 0": (lambda have: Mixture(["a", "b"], [1.5, -0.5]), "weights"),
    "too few weights": (lambda have: Mixture(["a", "b"], [1.0]), "2 prompts but 1 weights"),
    "top_p in percent": (lambda have: GenerationOptions(3, top_p=90), "top_p is 90; expected above 0 and at most 1"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_refused(name: str, have: SimpleNamespace) -> None:
    act, says = MISTAKES[name]
    with pytest.raises(ValueError, match=says) as caught:
        act(have)
    assert len(str(caught.value).splitlines()) == 1


def test_names_in_python_are_those_of_configurations(tmp_path: Path) -> None:
    run = tmp_path / "run"
    Encoder("stand_in").save(run / "retriever")
    (run / "config.yaml").write_text("run_dir: run\n")
    vectors = [Encoder(path).encode(["some words"]).tolist() for path in ("stand_in", str(run), run / "retriever")]
    assert vectors[0] == vectors[1] == vectors[2]
    assert Encoder("stand_in", device="cpu").backbones[0].device.type == "cpu"


def test_a_saved_encoder_can_be_read_by_whom_the_umask_lets_read(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        Encoder("stand_in").save(tmp_path / "encoder")
    finally:
        os.umask(before)
    for path in (tmp_path / "encoder").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) & 0o044 == 0o044, path


def test_a_sentence_transformer_is_an_encoder() -> None:
    sentence_transformers = pytest.importorskip("sentence_transformers")
    path, texts = real_encoder(), ["The Loire flows through Nantes.", "The Rhine flows through Basel."]
    found = [
        EncoderRetriever(encoder, texts).retrieve(["Which river flows through Basel?"], 2)[0]
        for encoder in (Encoder(path), sentence_transformers.SentenceTransformer(path, device="cpu"))
    ]
    assert [document.text for document in found[0]] == [document.text for document in found[1]] == texts[::-1]
    for ours, theirs in zip(*found, strict=True):
        assert ours.similarity == pytest.approx(theirs.similarity, abs=1e-4)
