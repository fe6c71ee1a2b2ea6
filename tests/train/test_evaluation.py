"""The evaluation that training ends with, on a small corpus and the stand-in LM, without Ray."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from replug.config.choices import TooLong
from replug.config.schema import Config
from replug.data.records import Document, Example
from replug.data.shards import corpus_sha256, write_documents, write_examples
from replug.data.store import CorpusStore, ExampleStore
from replug.evals.evidence import RetrievedDocuments
from replug.evals.loop import Item
from replug.evals.questions import OpenQuestion
from replug.evals.tables import to_markdown
from replug.models.ensemble_temperature import EnsembleTemperature
from replug.models.prompt import PromptTemplate
from replug.train.evaluation import NUM_EXAMPLES, PICTURE, evaluate_answers, evaluate_heldout, first_documents
from replug.train.report import run_blocks
from replug.train.workers import Workers
from tests.support.labels import LabellingLM

COUNT, NUM_DOCUMENTS = 20, 30


@pytest.fixture
def data(tmp_path: Path) -> SimpleNamespace:
    """Read a prepared set as the evaluation does."""
    documents = [Document(f"d{i}", f"thing{i} is red{i % 3} red{i % 3}", "x", f"s{i}") for i in range(NUM_DOCUMENTS)]
    examples = [
        Example(f"w{i}", f"look at thing{i}", f" red{i % 3} sea", "ab"[i % 2], gold=(f"d{i}",) if i % 2 else ())
        for i in range(COUNT)
    ]
    write_documents(tmp_path / "documents", documents)
    write_examples(tmp_path / "heldout.arrow", examples)
    corpus, heldout = CorpusStore(tmp_path / "documents"), ExampleStore(tmp_path / "heldout.arrow")
    return SimpleNamespace(corpus=corpus, heldout=heldout, corpus_sha256=corpus_sha256(tmp_path / "documents"))


@pytest.fixture
def config() -> Config:
    config = Config(run_dir="x")
    config.lm.path, config.evaluate.k = "stand_in", 3
    return config


def found(shift: int) -> RetrievedDocuments:
    """Documents from `shift` before a text's gold one on."""
    rows = np.array([(text - shift + np.arange(25)) % NUM_DOCUMENTS for text in range(COUNT)])
    return RetrievedDocuments(rows, np.tile(np.linspace(1, 0, 25), (COUNT, 1)))


def evaluate(config: Config, data: Any, lm: LabellingLM, folder: Path, shift: int = 7) -> dict:
    workers = Workers(lm=lm, index=None, template=PromptTemplate())
    return evaluate_heldout(config, data, workers, {"replug": found(shift), "lsr": found(0)}, folder)


def success(results: dict) -> dict[str, list[float]]:
    """Success@1, @5 and @20 by retriever."""
    of = results["retrieval"]
    return {name: [of[name][f"Success@{k}"]["value"] for k in (1, 5, 20)] for name in of}


def test_results_have_the_table_and_the_recall_and_the_picture_a_text_in_which_moving_weights_gain_most(
    config, data, tmp_path
):
    results = evaluate(config, data, LabellingLM(), tmp_path / "out")
    assert list(results) == ["language_modelling", "retrieval"]
    heldout = results["language_modelling"]
    assert list(heldout) == ["none", "replug", "lsr", "replug/posterior", "lsr/posterior"]
    assert {"bpb", "bpb/a", "bpb/b", "bpb - replug", "bpb - none"} <= heldout["lsr"].keys()
    assert heldout["lsr"]["bpb"]["n"] == COUNT and "temperature" not in heldout["lsr"]
    assert success(results) == {"replug": [0.0, 0.0, 1.0], "lsr": [1.0, 1.0, 1.0]}

    folder = tmp_path / "out/language_modelling"
    picture = json.loads((folder / PICTURE).read_text())
    rows = [json.loads(line) for line in (folder / "outcomes.jsonl").read_text().splitlines()]
    numbers = {row["id"]: {name: of["numbers"] for name, of in row["methods"].items()} for row in rows}
    gains = {name: (of["lsr"]["bits"] - of["lsr/posterior"]["bits"]) / 9 for name, of in numbers.items()}
    assert (picture["id"], picture["method"]) == (max(gains, key=gains.get), "lsr/posterior")
    assert sum(picture["gain_bits"]) / 9 == pytest.approx(max(gains.values()), abs=1e-3)
    assert "".join(picture["tokens"]) == data.heldout.examples()[int(picture["id"][1:])].continuation
    weights, num = np.array(picture["weights"]), int(picture["id"][1:])
    assert picture["documents"] == [f"d{num + place}" for place in range(3)]
    assert weights.shape == (3, 2) and np.allclose(weights.sum(axis=0), 1, atol=1e-3)
    config.lm = replace(config.lm, path=None, url="http://localhost", model="m")  # what its tokens are is not known
    evaluate(config, data, LabellingLM(), tmp_path / "out")
    assert json.loads((folder / PICTURE).read_text())["tokens"] == ["", ""]


def test_each_retrievers_ensemble_has_its_own_temperature_and_its_headroom(config, data, tmp_path):
    warm = replace(found(0), temperature=EnsembleTemperature(0.05, "lm", 3, 20))
    workers = Workers(lm=LabellingLM(), index=None, template=PromptTemplate())
    results = evaluate_heldout(config, data, workers, {"replug": found(0), "lsr": warm}, tmp_path / "out")
    of = results["language_modelling"]
    replug, lsr = ({name: entry["value"] for name, entry in of[method].items()} for method in ("replug", "lsr"))
    assert (replug["temperature"], lsr["temperature"]) == (1.0, 0.05)
    assert lsr["bpb"] < replug["bpb"], "the gold document comes first"
    for oracle in ("bpb_q_weighted", "bpb_best_document"):
        assert lsr[oracle] == replug[oracle] < replug["bpb"], "with the same documents"
    assert lsr["bpb_half_weighted"] == replug["bpb_half_weighted"] > replug["bpb_q_weighted"]
    text = to_markdown(run_blocks(results))
    assert text.count("- Headroom of ") == 2


def test_other_documents_another_lm_or_another_prompt_are_measured_anew(config, data, tmp_path):
    evaluate(config, data, first := LabellingLM(), tmp_path / "out")
    lm = LabellingLM()
    evaluate(config, data, lm, tmp_path / "out", shift=3)
    assert lm.num_pairs == first.num_pairs
    lm.identity = "another"
    evaluate(config, data, lm, tmp_path / "out", shift=3)
    assert lm.num_pairs == 2 * first.num_pairs
    config.lm = replace(config.lm, too_long=TooLong.truncate)
    evaluate(config, data, lm, tmp_path / "out", shift=3)
    assert lm.num_pairs == 3 * first.num_pairs


def test_the_lm_predicts_the_first_answer_of_each_question_that_has_one_after_its_own_documents(config, data, tmp_path):
    workers = Workers(lm=LabellingLM(), index=None, template=PromptTemplate())
    retrieved = {"replug": found(7), "lsr": found(0)}
    items = [Item(f"q{i}", f"what is thing{i}?", "all") for i in range(COUNT)]
    questions = [OpenQuestion(item, (f"red{i % 3}", "x") if i % 2 else ()) for i, item in enumerate(items)]
    results = evaluate_answers(config, data, workers, questions, retrieved, tmp_path)
    before, after = (results[name]["bpb"] for name in ("replug", "lsr"))
    assert after["n"] == COUNT / 2 and after["value"] < before["value"]
    rows = [json.loads(line) for line in (tmp_path / "outcomes.jsonl").read_text().splitlines()]
    assert [row["id"] for row in rows] == [f"q{i}" for i in range(1, COUNT, 2)]
    assert "answers to held-out questions, n = 10" in to_markdown(run_blocks({"answers": results}))


def test_the_reports_examples_begin_with_texts_whose_first_document_changed(data):
    before, after = found(0), found(0)
    after.doc_rows[[7, 12]] = found(7).doc_rows[[7, 12]]
    examples = first_documents(data, {"replug": before, "lsr": after}, [{"id": f"w{i}"} for i in range(COUNT)])
    assert [one["id"] for one in examples[:3]] == ["w7", "w12", "w0"] and len(examples) == NUM_EXAMPLES
    sides = [[document["id"] for document in examples[1][side]] for side in ("before", "after")]
    assert sides == [["d12", "d13", "d14"], ["d5", "d6", "d7"]]
    assert examples[1]["after"][0] == {"id": "d5", "text": "thing5 is red2 red2", "similarity": 1.0}
