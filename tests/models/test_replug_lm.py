"""REPLUG as a library, against mixtures computed by hand from the LM's own scores; and mistakes of who uses it."""

import math
import os
import stat
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from replug.config.errors import UserError
from replug.models.black_box_lm import ContinuationScore, Mixture, UnscorableText
from replug.models.encoder import Encoder
from replug.models.encoder_retriever import EncoderRetriever
from replug.models.ensemble import (
    REPLUG_WEIGHTS,
    Retrieved,
    Weighting,
    document_weights,
    mix,
    mix_and_weigh,
    prior_log_weights,
)
from replug.models.generation import GenerationOptions, elected
from replug.models.lm_source import InProcessLM
from replug.models.local.hf_lm import HuggingFaceLM
from replug.models.local.stand_in_lm import StandInLM
from replug.models.packaged import resolve_encoder_path
from replug.models.prompt import PromptTemplate
from replug.models.replug_lm import ReplugLM
from tests.support.lm_answers import texts_of
from tests.support.real_models import real_encoder
from tests.support.tiny_lms import naive_logprobs, reference

TEXTS = ["red sky over the sea", "the mat of the cat", "blue", "日本 の 海"]
SIMILARITIES = [0.9, 0.2, -0.4, 0.6]
CONTEXTS = ["the cat sat", "red sky", "the cat sat"]
CONTINUATIONS = [" on the mat", " blue", " on"]
GREEDY = GenerationOptions(8)


class Shelf:
    """Finds the same documents for every query, and counts the queries."""

    def __init__(self, documents: Sequence[Retrieved]) -> None:
        self.documents = list(documents)
        self.queries: list[str] = []

    def retrieve(self, queries: Sequence[str], k: int) -> list[list[Retrieved]]:
        self.queries += queries
        return [self.documents[:k] for _ in queries]


def found(number: int = len(TEXTS)) -> list[Retrieved]:
    return [Retrieved(TEXTS[row], SIMILARITIES[row], f"d{row}") for row in range(number)]


def mixed_by_hand(given: Sequence[np.ndarray], similarities: Sequence[float]) -> np.ndarray:
    """Logs of the sums over documents of weight times probability."""
    weights = [math.exp(similarity) for similarity in similarities]
    return np.log(sum(w * np.exp(row.astype(np.float64)) for w, row in zip(weights, given, strict=True)) / sum(weights))


def assert_same_scores(ours: list[ContinuationScore], theirs: list[ContinuationScore], atol: float = 2e-5) -> None:
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a.token_logprobs, b.token_logprobs, atol=atol)


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return Encoder("stand_in")


def test_scores_are_the_mixture_computed_by_hand(lm: HuggingFaceLM) -> None:
    scores = ReplugLM(lm, Shelf(found()), weighting=REPLUG_WEIGHTS).score(CONTEXTS, CONTINUATIONS)
    for score, context, continuation in zip(scores, CONTEXTS, CONTINUATIONS, strict=True):
        given = [naive_logprobs(lm, f"{text}\n{context}", continuation) for text in TEXTS]
        np.testing.assert_allclose(score.token_logprobs, mixed_by_hand(given, SIMILARITIES), atol=1e-4)
        assert score.token_logprobs.dtype == np.float32


@pytest.mark.parametrize("shelf", [Shelf([]), Shelf(found())])
def test_without_documents_it_is_the_plain_lm(lm: HuggingFaceLM, shelf: Shelf) -> None:
    replug = ReplugLM(lm, shelf, k=0 if shelf.documents else 10)
    assert_same_scores(replug.score(CONTEXTS, CONTINUATIONS), lm.score(CONTEXTS, CONTINUATIONS))
    assert texts_of(replug, CONTEXTS, 8) == texts_of(lm, CONTEXTS, 8)


def test_texts_that_do_not_fit_are_cut_by_the_template(lm: HuggingFaceLM) -> None:
    long = [Retrieved("the mat " * 200, 0.5, "long"), *found(1)]
    with pytest.raises(UnscorableText, match="but the LM holds"):
        ReplugLM(lm, Shelf(long)).score(CONTEXTS, CONTINUATIONS)
    template = PromptTemplate(lm.tokenizer, lm.max_tokens)
    assert len(ReplugLM(lm, Shelf(long), template=template).score(CONTEXTS, CONTINUATIONS)) == 3
    assert template.num_truncated == 3
    room = PromptTemplate(lm.tokenizer, lm.max_tokens - 8)
    assert len(ReplugLM(lm, Shelf(long), template=room).generate(CONTEXTS, GREEDY)) == 3


def test_the_ensemble_takes_one_text_as_one_and_a_list_as_a_list(encoder: Encoder) -> None:
    lm = ReplugLM(StandInLM(), EncoderRetriever(encoder, ["a text", "b text"]), k=2)
    one, many = lm.score("a b", " text"), lm.score(["a b", "b"], [" text", " c"])
    assert one.sum_logprob == many[0].sum_logprob
    assert len(many) == 2
    assert lm.generate("a b", GenerationOptions(2)).text == texts_of(lm, ["a b"], 2)[0]
    [found] = lm.retrieve(["a b"])
    assert lm.score("a b", " text", found[:1]).sum_logprob == lm.score(["a b"], [" text"], [found[:1]])[0].sum_logprob
    for contexts, continuations in ((["a b"], " text"), ("a b", [" text"])):
        with pytest.raises(UserError, match=r"expected a list of .*; write \[text\]"):
            lm.score(contexts, continuations)


def test_answers_are_the_mixtures(lm: HuggingFaceLM) -> None:
    answers = ReplugLM(lm, Shelf(found()), weighting=REPLUG_WEIGHTS).generate(CONTEXTS[:2], GREEDY)
    weights = [math.exp(s) / sum(map(math.exp, SIMILARITIES)) for s in SIMILARITIES]
    for answer, context in zip(answers, CONTEXTS[:2], strict=True):
        ids, logprobs, _ = reference(lm, [f"{text}\n{context}" for text in TEXTS], weights, 8)
        assert answer.text == lm.tokenizer.decode(ids, skip_special_tokens=True)
        np.testing.assert_allclose(answer.token_logprobs, logprobs, atol=1e-4)


def test_a_stream_is_the_answer_in_pieces(lm: HuggingFaceLM) -> None:
    options = GenerationOptions(12, ["the", "no such"])
    replug = ReplugLM(lm, Shelf(found()), k=3)
    for documents in (None, []):
        pieces = list(replug.stream(CONTEXTS[0], options, documents))
        assert "".join(pieces) == replug.generate(CONTEXTS[0], options, documents).text
        assert len(pieces) > 1
    left = replug.stream(CONTEXTS[0], options)
    next(left)
    left.close()
    with pytest.raises(UnscorableText):
        list(replug.stream("long " * 10_000, options, []))


WEIGHTINGS = [Weighting(), Weighting(0.1), Weighting(0.0, prune=0.2)]


@pytest.mark.parametrize("read", [0, 2, 8])
@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_log_probs_and_weights_of_an_answer_are_those_of_its_scores(weighting: Weighting, read: int) -> None:
    """The last words of the context, `read` of them, move the weights before the answer."""
    lm, context = StandInLM(), "the sea sat by the cat by the sea"
    replug = ReplugLM(lm, Shelf(found(3)), weighting=replace(weighting, read=read))
    answer = replug.generate(context, GREEDY)
    before = context.rsplit(" ", read)[0] if read else context
    tail, text = context.removeprefix(before), f" {answer.text}"
    prefixes = [f"{document}\n{before}" for document in TEXTS[:3]]
    ends = np.array([lm.score([prefix], [tail])[0].token_logprobs for prefix in prefixes]) if read else np.zeros((3, 0))
    given = np.array([lm.score([prefix + tail], [text])[0].token_logprobs for prefix in prefixes])
    prior = prior_log_weights(SIMILARITIES[:3])
    expected = mix(given, prior, weighting, ends)
    np.testing.assert_allclose(answer.token_logprobs, expected, atol=1e-5)
    np.testing.assert_allclose(replug.score(context, text).token_logprobs, expected, atol=1e-5)
    assert (abs(expected - mix(given, prior, weighting)).max() > 1e-3) == (read > 0)
    assert len(answer.weights) == 3
    if not weighting.prune:
        after = mix_and_weigh(given, prior, weighting, ends)[1][:, -1]
        np.testing.assert_allclose(answer.weights, after, atol=1e-5)
    elif not read:
        assert (answer.weights == 0).any()


def test_answers_of_documents_vote_and_votes_score_no_text() -> None:
    replug = ReplugLM(StandInLM(), Shelf(found(3)), weighting=Weighting(1.0, votes=True))
    own = [StandInLM().generate([f"{text}\na b"], GREEDY)[0] for text in TEXTS[:3]]
    expected = elected(own, document_weights(SIMILARITIES[:3]))
    answer = replug.generate("a b", GREEDY)
    assert answer.text == expected.text
    np.testing.assert_allclose(answer.weights, expected.weights)
    with pytest.raises(ValueError, match="votes"):
        replug.score("a b", " c")


def test_equal_queries_are_retrieved_once_and_sources_can_be_shown() -> None:
    shelf = Shelf(found())
    replug = ReplugLM(StandInLM(), shelf, k=2)
    documents = replug.retrieve(CONTEXTS)
    assert documents == [found(2)] * 3
    assert shelf.queries == ["the cat sat", "red sky"]
    expected = replug.score(CONTEXTS, CONTINUATIONS)
    shelf.queries.clear()
    assert_same_scores(replug.score(CONTEXTS, CONTINUATIONS, documents), expected, atol=0)
    assert replug.generate(CONTEXTS, GREEDY, documents=documents)[0].text == replug.generate(CONTEXTS, GREEDY)[0].text
    assert shelf.queries == ["the cat sat", "red sky"]  # of the last call alone
    with pytest.raises(ValueError, match="documents of 1 texts, but 3 texts"):
        replug.score(CONTEXTS, CONTINUATIONS, documents[:1])


def test_the_encoder_finds_the_most_similar_texts(encoder: Encoder) -> None:
    words = [word for word in encoder.model.tokenizer.get_vocab() if word.isalpha()][:30]
    texts = [" ".join(words[i : i + 5]) for i in range(0, 30, 2)]
    vectors = torch.nn.functional.normalize(encoder.encode(texts), dim=-1).numpy()
    for query, documents in zip(texts, EncoderRetriever(encoder, texts).retrieve(texts, 4), strict=True):
        cosines = vectors @ vectors[texts.index(query)]
        assert [document.text for document in documents] == [texts[row] for row in np.argsort(-cosines)[:4]]
        np.testing.assert_allclose([document.similarity for document in documents], -np.sort(-cosines)[:4], atol=1e-5)
        assert (documents[0].text, documents[0].id) == (query, str(texts.index(query)))


def test_equal_texts_come_in_their_order_and_no_more_than_there_are(encoder: Encoder) -> None:
    retriever = EncoderRetriever(encoder, ["sea", "sky", "sea"], ["first", "other", "second"])
    (documents,) = retriever.retrieve(["sea"], 10)
    assert [document.id for document in documents if document.text == "sea"] == ["first", "second"]
    assert len(documents) == 3
    assert retriever.retrieve([], 2) == []


# Mistakes of who uses the library: each is refused by name, none gives an answer to another question -------------

MISTAKES: dict[str, tuple[Callable[[Any], object], str]] = {
    "max_tokens too large": (lambda have: Encoder("stand_in", max_tokens=999), "max_tokens is 999, but"),
    "an unknown similarity": (lambda have: Encoder("stand_in", "euclid"), "expected cosine or dot"),
    "a folder that is not there": (lambda have: Encoder("./nowhere"), "./nowhere does not exist"),
    "an LM's package as encoder": (lambda have: Encoder("package:smollm2"), "package:smollm2 does not exist"),
    "an encoder as LM": (lambda have: HuggingFaceLM(resolve_encoder_path("stand_in")), "expected a causal LM"),
    "ids twice": (lambda have: EncoderRetriever(have.encoder, ["a", "b"], ["x", "x"]), "2 texts have 1 different ids"),
    "one text to encode": (lambda have: have.encoder.encode("a b"), "expected a list of"),
    "one text as ids": (lambda have: EncoderRetriever(have.encoder, ["a", "b"], "xy"), "expected a list of ids"),
    "one text to score": (lambda have: InProcessLM(have.lm).score("ab", "cd"), "expected a list of prefixes"),
    "one text to draw from": (lambda have: have.lm.sample("ab", GREEDY), "a list of prompts"),
    "one prompt": (lambda have: texts_of(have.lm, "a b", 3), r"expected a list of prompts, .*; write \[text\]"),
    "a similarity of nan": (lambda have: Retrieved("text", math.nan, "d7"), "document d7 has the similarity nan"),
    "more prefixes": (lambda have: have.lm.score(["a", "b"], ["c"]), "2 prefixes but 1 continuations"),
    "nothing to score": (lambda have: have.lm.score(["a"], [""]), "expected a text to score"),
    "no new tokens": (lambda have: texts_of(have.lm, ["a"], 0), "max_new_tokens is 0"),
    "a number as stop": (lambda have: GenerationOptions(3, stop=["a", 7]), r"stop is \['a', 7\]; expected a text"),
    "temperature of nan": (lambda have: GenerationOptions(3, temperature=math.nan), "temperature is nan"),
    "weights of half": (lambda have: Mixture(["a"], [0.5]), "sum to 0.5"),
    "weights below 0": (lambda have: Mixture(["a", "b"], [1.5, -0.5]), "weights"),
    "too few weights": (lambda have: Mixture(["a", "b"], [1.0]), "2 prompts but 1 weights"),
    "top_p in percent": (lambda have: GenerationOptions(3, top_p=90), "top_p is 90; expected above 0 and at most 1"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_refused(name: str, encoder: Encoder) -> None:
    act, says = MISTAKES[name]
    have = SimpleNamespace(encoder=encoder, retriever=EncoderRetriever(encoder, ["a b", "c d"]), lm=StandInLM())
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
