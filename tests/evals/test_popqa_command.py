"""`replug evaluate` of PopQA on stand-ins: every way to answer, without a corpus, and killed in the middle."""

from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.support.command_line import ROOT, CommandLine
from tests.support.evaluating import evaluated
from tests.support.preparing import write_jsonl

pytestmark = pytest.mark.slow

METHODS = ["none", "random@1", "bm25@1", "replug@1", "replug", "replug@2/concat", "genread"]
WORK = ["writer", "baker", "singer"]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Twelve people, of whom half have a document that says their work once and their town often."""
    folder = tmp_path_factory.mktemp("popqa")
    people = [f"Person{number}" for number in range(12)]
    questions = [
        {"id": f"{name} {prop}", "subj": name, "prop": prop, "obj": obj, "s_pop": 3**number, "possible_answers": [obj]}
        for number, name in enumerate(people)
        for prop, obj in (("occupation", WORK[number % 3]), ("place of birth", f"Town{number}"))
    ]
    write_jsonl(folder / "questions.jsonl", questions)
    texts = [f"{name} is a {WORK[number % 3]} of{f' Town{number}' * 9}" for number, name in enumerate(people[:6])]
    write_jsonl(folder / "corpus.jsonl", [{"id": f"d{n}", "text": text} for n, text in enumerate([*texts, "no one"])])
    return folder


def typed(data: Path, out: Path, *overrides: str) -> list[str]:
    return [
        "evaluate",
        str(ROOT / "configs/eval_popqa.yaml"),
        f"out={out}",
        f"questions.path={data / 'questions.jsonl'}",
        "questions.shots=2",
        "questions.max_new_tokens=2",
        "k=3",
        "lm.path=stand_in",
        *overrides,
    ]


def with_corpus(data: Path) -> list[str]:
    return [
        f"data.corpus={data / 'corpus.jsonl'}",
        "retriever.path=stand_in",
        "index.dtype=float32",
        f"methods=[{','.join(METHODS)}]",
    ]


Evaluate = Callable[..., tuple[dict, str]]


@pytest.fixture(scope="module")
def evaluate(replug: CommandLine, data: Path) -> Evaluate:
    return lambda out, *overrides: evaluated(replug, out, *typed(data, out, *overrides))


def test_every_way_to_answer_is_measured_with_its_costs(evaluate, data, tmp_path):
    out = tmp_path / "out"
    results, _ = evaluate(out, *with_corpus(data))
    assert list(results) == METHODS
    value = {name: {metric: entry["value"] for metric, entry in of.items()} for name, of in results.items()}
    assert results["none"]["accuracy"]["n"] == 20, "two of each relation are shown and not asked"
    assert [value[name]["lm_calls"] for name in METHODS] == [1, 1, 1, 1, 3, 1, 2]
    assert [value[name]["retriever_calls"] for name in METHODS] == [0, 0, 1, 1, 1, 1, 0]
    assert value["none"]["answer_recall"] == 0 < value["bm25@1"]["answer_recall"] < 1
    assert value["genread"]["prompt_tokens"] > value["none"]["prompt_tokens"]
    assert {"accuracy/occupation", "accuracy/popularity 10^0-10^1"} <= results["bm25@1"].keys()
    low, high = results["bm25@1"]["accuracy"]["interval"]
    assert value["none"]["accuracy"] == 0 < low < value["bm25@1"]["accuracy"] < high, "the stand-in repeats the town"
    rows = pq.read_table(out / "examples.parquet").to_pylist()
    assert len(rows) == 20 * len(METHODS)
    of_bm25 = [row for row in rows if row["method"] == "bm25@1"]
    assert all(row["top_score"] is not None and row["documents"] for row in of_bm25)


def test_without_a_corpus_the_lm_answers_alone_or_from_its_own_document(evaluate, tmp_path):
    results, _ = evaluate(tmp_path / "out", "data.corpus=null", "methods=[none,genread]", "questions.shots=0")
    assert results["genread"]["accuracy"]["n"] == 24
    rows = pq.read_table(tmp_path / "out/examples.parquet").to_pylist()
    assert "top_score" not in rows[0]
