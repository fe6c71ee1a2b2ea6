"""Search: keys beside an index, the temperature of each retriever (given, saved or fitted), and GenRead."""

import random
import re
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from replug.config.choices import Similarity
from replug.config.errors import UserError
from replug.config.evaluation_schema import EvaluationConfig
from replug.config.load import load_evaluation_config
from replug.config.methods import parse_methods
from replug.config.rules import evaluation_methods
from replug.data.store import PreparedSet
from replug.evals import ensemble_temperatures, search
from replug.evals.ensemble_temperatures import DocumentScores, ensemble_bits, fit_temperature, with_temperatures
from replug.evals.evidence import EvidenceBook, RetrievedDocuments, WrittenDocument
from replug.evals.loop import PromptedLM
from replug.evals.search import find_all, warn_of_similarity, write_documents
from replug.models import ensemble
from replug.models.encoder import Encoder
from replug.models.ensemble import document_weights
from replug.models.ensemble_temperature import PAPER, EnsembleTemperature
from replug.models.generation import Generated
from replug.models.packaged import write_stand_in_encoder
from replug.models.prompt import PromptTemplate
from tests.support.command_line import ROOT
from tests.support.evaluating import on_run
from tests.support.known_lm import ImmediateLM
from tests.support.preparing import prepare, write_jsonl
from tests.support.small_index import write_small_index


@pytest.mark.parametrize("key", ["similarity=dot", "query_path=stand_in"])
def test_a_key_that_says_otherwise_than_the_index_is_refused(tmp_path: Path, key: str) -> None:
    index = write_small_index(tmp_path, ["mida", "furo"])
    keys = [f"retriever.path={index}", f"retriever.{key}", "methods=[replug]", f"out={tmp_path}/out"]
    keys += ["lm.path=stand_in", f"data.corpus={index}", "texts.path=stand_in"]
    config = load_evaluation_config(ROOT / "configs/eval_lm.yaml", keys)
    name, corpus = key.partition("=")[0], cast(Any, SimpleNamespace(corpus=[0, 1]))
    with pytest.raises(UserError, match=rf"retriever.{name} is .*, but the index in .* leave the key out"):
        find_all(config, corpus, ["mida"], evaluation_methods(config), tmp_path / "found")


@pytest.mark.parametrize(
    ("said", "asked", "warns"),
    [
        (None, None, "retriever.similarity is not given, and .* cosine is used"),  # Contriever, DPR
        (None, Similarity.cosine, None),  # as REPLUG has Contriever
        ("dot", None, None),
        ("dot", Similarity.cosine, "retriever.similarity: cosine is used, but .* says dot"),
        ("cosine", Similarity.cosine, None),
    ],
)
def test_a_similarity_that_nobody_said_or_that_the_folder_denies_is_named(said, asked, warns, tmp_path, caplog) -> None:
    path = str(tmp_path)
    if said is None:
        write_stand_in_encoder(tmp_path)
    else:
        Encoder("stand_in", said).save(tmp_path)
    warn_of_similarity(Encoder(path, asked.value if asked else None), path, asked)
    lines = [record.getMessage() for record in caplog.records if record.name == "replug.evals.search"]
    assert len(lines) == (warns is not None)
    assert warns is None or re.match(warns, lines[0])


# Documents that the LM writes -----------------------------------------------------------------------------------------


class Writer:
    """An LM that writes of what it is asked."""

    def __init__(self):
        self.asked = []

    def submit_answer(self, prompt, options):
        self.asked.append(prompt)
        done = Future()
        name = prompt.rpartition(" ")[2].removesuffix("?")
        text = "" if name == "q9" else f"\n\nAll about {name}.\nMore"
        done.set_result(Generated(text, np.zeros(3), np.zeros(3), prompt_tokens=11))
        return done


def test_a_document_is_the_first_line_of_what_the_prompt_brings():
    lm = Writer()
    written = write_documents(PromptedLM(lm, PromptTemplate()), [f"who is q{number}?" for number in range(20)])
    assert lm.asked[3] == "Generate a background document from Wikipedia to answer the given question. who is q3?"
    assert written[3] == WrittenDocument("All about q3.", 11, 3)
    assert written[9] == WrittenDocument(None, 11, 3), "the LM wrote nothing"
    assert len(written) == len(lm.asked) == 20


WORDS = [f"word{number}" for number in range(40)]
NAMES = ["none", "random", "replug@2", "lsr@4", "lsr@2", "lsr/concat"]


# The temperature of each retriever ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def with_dev(tmp_path_factory: pytest.TempPathFactory) -> PreparedSet:
    """A set of texts that share their words, so that documents help the stand-in LM."""
    rng = random.Random(0)
    texts = [{"id": str(i), "text": " ".join(rng.choices(WORDS, k=60))} for i in range(120)]
    source = write_jsonl(tmp_path_factory.mktemp("source") / "texts.jsonl", texts)
    return prepare(tmp_path_factory.mktemp("set"), source, num_dev=12, num_queries=20, num_heldout=10)


def config_of(tmp_path: Path, *overrides: str) -> EvaluationConfig:
    named = ["retrievers.lsr=stand_in", f"methods=[{','.join(NAMES)}]", "k=3", f"out={tmp_path / 'out'}"]
    return load_evaluation_config(ROOT / "configs/eval_lm.yaml", [*on_run(tmp_path), *named, *overrides])


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
        num = len(queries), len(corpus.corpus)
        return {method.source: found_at_random(*num, seed) for seed, method in enumerate(methods)}

    monkeypatch.setattr(ensemble_temperatures, "find_all", find_all)
    monkeypatch.setattr(ensemble, "MIN_TEXTS", 12)
    return asked


def temperatures(config: EvaluationConfig, corpus: PreparedSet | None, tmp_path: Path):
    found = {source: RetrievedDocuments(np.zeros((1, 1)), np.zeros((1, 1))) for source in ("random", "replug", "lsr")}
    methods = parse_methods(config.methods, config.k, {"replug": "stand_in", "lsr": "stand_in"})
    settled = with_temperatures(config, corpus, methods, PromptedLM(ImmediateLM(), PromptTemplate()), tmp_path, found)
    return {source: of.temperature for source, of in settled.items()}


def test_each_retriever_is_fitted_by_its_largest_ensemble_on_development_texts_alone(
    with_dev, searched, tmp_path
) -> None:
    fitted = temperatures(config_of(tmp_path, "ensemble.temperature=fit"), with_dev, tmp_path)
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
        temperatures(config, bare, tmp_path)


def test_by_default_each_has_what_was_saved_with_it_and_a_number_is_everybodys(with_dev, tmp_path, monkeypatch) -> None:
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
    assert {one.value for one in temperatures(given, None, tmp_path).values()} == {0.1}


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


@pytest.mark.parametrize("spread", [0.01, 20.0])
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
