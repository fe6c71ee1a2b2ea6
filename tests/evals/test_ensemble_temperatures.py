"""Each retriever of an evaluation has its own temperature: given, saved, or fitted on development texts alone."""

import math
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from replug.config.errors import UserError
from replug.config.evaluation_schema import EvaluationConfig
from replug.config.load import load_evaluation_config
from replug.config.methods import parse_methods
from replug.data.store import PreparedSet
from replug.evals import ensemble_temperatures, search
from replug.evals.ensemble_temperatures import (
    DocumentScores,
    ensemble_bits,
    fit_temperature,
    with_temperatures,
)
from replug.evals.evidence import EvidenceBook, RetrievedDocuments
from replug.evals.loop import PromptedLM
from replug.models import ensemble
from replug.models.encoder import Encoder
from replug.models.ensemble import document_weights
from replug.models.ensemble_temperature import PAPER, EnsembleTemperature
from replug.models.packaged import write_stand_in_encoder
from replug.models.prompt import PromptTemplate
from tests.support.command_line import ROOT
from tests.support.known_lm import ImmediateLM
from tests.support.preparing import prepare, write_jsonl

WORDS = [f"word{number}" for number in range(40)]
NAMES = ["none", "random", "replug@2", "lsr@4", "lsr@2", "lsr/concat"]


@pytest.fixture(scope="module")
def with_dev(tmp_path_factory: pytest.TempPathFactory) -> PreparedSet:
    """Of texts that share their words, so that documents help the stand-in LM."""
    rng = random.Random(0)
    texts = [{"id": str(i), "text": " ".join(rng.choices(WORDS, k=60))} for i in range(120)]
    source = write_jsonl(tmp_path_factory.mktemp("source") / "texts.jsonl", texts)
    return prepare(tmp_path_factory.mktemp("set"), source, num_dev=12, num_queries=20, num_heldout=10)


def config_of(tmp_path: Path, *overrides: str) -> EvaluationConfig:
    given = [f"out={tmp_path / 'out'}", "lm.path=stand_in", "retriever.path=stand_in", "data.source=null"]
    named = ["data.prepared=set", "retrievers.lsr=stand_in", f"methods=[{','.join(NAMES)}]", "k=3"]
    return load_evaluation_config(ROOT / "configs/eval_lm.yaml", [*given, *named, *overrides])


def found_at_random(count: int, num_documents: int, seed: int) -> RetrievedDocuments:
    rng = np.random.default_rng(seed)
    rows = np.stack([rng.permutation(num_documents)[:5] for _ in range(count)])
    return RetrievedDocuments(rows, -np.sort(-0.05 * rng.normal(size=rows.shape)))


@pytest.fixture
def searched(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The queries of every search, which finds documents at random instead."""
    asked: list[list[str]] = []

    def find_all(config, corpus, queries, methods, out, *, texts):
        asked.append([*queries, texts])
        return {
            method.source: found_at_random(len(queries), len(corpus.corpus), seed)
            for seed, method in enumerate(methods)
        }

    monkeypatch.setattr(ensemble_temperatures, "find_all", find_all)
    monkeypatch.setattr(ensemble, "MIN_TEXTS", 12)
    return asked


def temperatures(
    config: EvaluationConfig, corpus: PreparedSet | None, tmp_path: Path, lm: ImmediateLM
) -> dict[str, EnsembleTemperature]:
    found = {source: RetrievedDocuments(np.zeros((1, 1)), np.zeros((1, 1))) for source in ("random", "replug", "lsr")}
    methods = parse_methods(config.methods, config.k, {"replug": "stand_in", "lsr": "stand_in"})
    settled = with_temperatures(config, corpus, methods, PromptedLM(lm, PromptTemplate()), tmp_path, found)
    return {source: of.temperature for source, of in settled.items()}


def test_each_retriever_is_fitted_by_its_largest_ensemble_on_development_texts_alone(
    with_dev: PreparedSet, searched: list, tmp_path: Path
) -> None:
    config, lm = config_of(tmp_path, "ensemble.temperature=fit"), ImmediateLM()
    fitted = temperatures(config, with_dev, tmp_path, lm)
    examples = with_dev.require_dev().examples()
    assert searched == [[*(example.context for example in examples), "development"]]
    assert fitted["replug"].origin == "fitted on 12 development texts, 2 documents"
    assert fitted["lsr"].origin == "as the paper"  # even weights would predict best, so it stays 1
    for seed, (source, k) in enumerate((("replug", 2), ("lsr", 4))):
        found = found_at_random(12, len(with_dev.corpus), seed)
        assert fitted[source].value == fit_temperature(naive_scores(with_dev, found, k))[0]
    assert fitted["replug"].value != fitted["lsr"].value
    assert fitted["random"] == PAPER


def naive_scores(data: PreparedSet, found: RetrievedDocuments, k: int) -> list[DocumentScores]:
    lm, scores = ImmediateLM(), []
    for row, example in enumerate(data.require_dev().examples()):
        texts = data.corpus.texts(found.doc_rows[row, :k])
        given = [lm.score([f"{text}\n{example.context}"], [example.continuation])[0].token_logprobs for text in texts]
        scores.append(DocumentScores(np.stack(given), found.similarities[row, :k]))
    return scores


def test_without_development_texts_a_fit_is_refused_by_name(with_dev: PreparedSet, tmp_path: Path) -> None:
    config, bare = config_of(tmp_path, "ensemble.temperature=fit"), PreparedSet(with_dev.folder)
    bare.dev = None
    with pytest.raises(UserError, match=r"no development texts; prepare a set with data\.num_dev"):
        temperatures(config, bare, tmp_path, ImmediateLM())


def test_by_default_each_has_what_was_saved_with_it_and_a_number_is_everybodys(
    with_dev: PreparedSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "_find", lambda *_: RetrievedDocuments(np.zeros((1, 1), int), np.zeros((1, 1))))
    write_stand_in_encoder(tmp_path / "untuned")
    encoder = Encoder(str(tmp_path / "untuned"))
    encoder.temperature = EnsembleTemperature(0.03, "lm", 10, 100)
    encoder.save(tmp_path / "tuned")
    config = config_of(tmp_path, f"retrievers.lsr={tmp_path / 'tuned'}")
    methods = parse_methods(["bm25/softmax", "replug", "lsr"], 2, {"replug": "stand_in", "lsr": "tuned"})
    for _ in range(2):  # a resumed evaluation reads the file
        found = search.find_all(config, with_dev, ["word1 word2"], methods, tmp_path / "found")
        saved = {source: of.temperature for source, of in found.items()}
        assert saved == {"bm25": PAPER, "replug": PAPER, "lsr": encoder.temperature}
    given = replace(config, ensemble=replace(config.ensemble, temperature=0.1))
    assert {one.value for one in temperatures(given, None, tmp_path, ImmediateLM()).values()} == {0.1}


def test_evidence_is_weighed_by_its_retrievers_temperature(with_dev: PreparedSet) -> None:
    found = {name: found_at_random(3, len(with_dev.corpus), 0) for name in ("random", "replug", "lsr")}
    warm = {**found, "lsr": replace(found["lsr"], temperature=EnsembleTemperature(0.1))}
    methods = parse_methods(NAMES, 3, {"replug": "", "lsr": ""})
    cold, book = (EvidenceBook(methods, with_dev.corpus, of, [True] * 3) for of in (found, warm))
    evidence, before = book.of(1), cold.of(1)
    assert np.array_equal(evidence["lsr@4"].weights, document_weights(found["lsr"].similarities[1, :4], 0.1))
    for name in ("none", "random", "replug@2", "lsr/concat"):
        assert np.array_equal(evidence[name].log_prior, before[name].log_prior), name
    assert book.digest() != cold.digest()


# Fitting ------------------------------------------------------------------------------------------------------------


def texts_with_noise(count: int, spread: float, seed: int = 0) -> list[DocumentScores]:
    """Documents whose similarity says something of how well they predict, and not all."""
    rng = np.random.default_rng(seed)
    quality = rng.normal(size=(count, 6))
    similarities = spread * (quality + 4 * rng.normal(size=quality.shape))
    logprobs = [-np.exp(1 - 0.4 * q[:, None] + 0.1 * rng.normal(size=(6, 12))) for q in quality]
    return [DocumentScores(given, of) for given, of in zip(logprobs, similarities, strict=True)]


def test_bits_are_those_of_the_mixture_at_each_token() -> None:
    logprobs, similarities = np.log([[0.5, 0.2], [0.1, 0.4]]), np.array([0.3, 0.1])
    first = math.exp(3) / (math.exp(3) + math.exp(1))  # at a temperature of 0.1
    expected = -sum(math.log2(first * a + (1 - first) * b) for a, b in ((0.5, 0.1), (0.2, 0.4)))
    assert ensemble_bits([DocumentScores(logprobs, similarities)], 0.1) == pytest.approx(expected)


@pytest.mark.parametrize("spread", [0.01, 1.0, 20.0])
def test_no_temperature_of_a_fine_grid_predicts_better(spread: float) -> None:
    texts = texts_with_noise(60, spread)
    bits = ensemble_bits(texts, fit_temperature(texts)[0])
    finest = min(ensemble_bits(texts, spread * 2.0**power) for power in np.arange(-6, 10, 0.1))
    assert bits <= finest + 1e-6 * finest and bits <= ensemble_bits(texts, 1.0)


def test_it_stays_1_for_few_texts_and_where_similarities_say_nothing() -> None:
    equal = [DocumentScores(np.log([[0.5], [0.1]]), np.zeros(2))] * 50
    assert fit_temperature(equal) == (1, "")
    assert fit_temperature(texts_with_noise(49, 0.01)) == (1, "a fit needs 50 development texts or more")
    wrong = [DocumentScores(np.log([[0.1], [0.5]]), np.array([0.5, 0.4 - n / 100])) for n in range(60)]
    assert fit_temperature(wrong) == (1, "even weights would predict the development texts best")
    right = [DocumentScores(np.log([[0.5], [0.1]]), one.similarities) for one in wrong]
    assert fit_temperature(right) == (1, "the first document alone would predict the development texts best")
