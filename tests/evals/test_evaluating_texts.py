"""An evaluation of whole texts from its configuration to its table, the stand-in LM in this process: no Ray."""

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from replug.config.load import load_evaluation_config
from replug.evals import run
from replug.models import build
from replug.models.caching_lm import CachingLM
from replug.models.lm_source import LMSource


@contextmanager
def opened_here(lm: object, source: LMSource, cache: Path) -> Iterator[CachingLM]:
    with closing(CachingLM(source.open_here(), cache)) as opened:
        yield opened


@pytest.fixture
def config(tmp_path, monkeypatch) -> list[str]:
    """Three texts of which the corpus holds the second's end, and a document of the first's source."""
    monkeypatch.setattr(build, "opened_lm", opened_here)
    monkeypatch.setattr(run, "evaluation_cluster", lambda config, *_: nullcontext(config.run_config()))
    texts = {name: " ".join(f"{name}{word}" for word in range(60)) for name in ("a", "b", "c")}
    documents = [{"id": f"d{i}", "text": f"document a{i + 15} of c{i + 15}"} for i in range(25)]
    documents += [
        {"id": "own", "text": "another text of a", "source": "a"},
        {"id": "copy", "text": texts["b"][-150:]},
    ]
    rows = {"texts": [{"id": name, "text": text} for name, text in texts.items()], "corpus": documents}
    for name, content in rows.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    yaml = """
        evaluation: language_modelling
        methods: [none, long_context, random, bm25]
        k: 2
        num_resamples: 200
        texts: {scored_tokens: 20, context_tokens: 10, query_tokens: 5}
        lm: {path: stand_in}
    """
    (tmp_path / "evaluation.yaml").write_text(yaml.replace("\n        ", "\n"))
    return [
        f"texts.path={tmp_path / 'texts.jsonl'}",
        f"data.corpus={tmp_path / 'corpus.jsonl'}",
        f"out={tmp_path / 'out'}",
    ]


def evaluate(tmp_path: Path, overrides: list[str]) -> dict:
    loaded = load_evaluation_config(tmp_path / "evaluation.yaml", overrides)
    return run.evaluate(loaded)["language_modelling"]


def test_whole_texts_are_measured_by_source_and_with_and_without_what_the_corpus_holds(tmp_path, config):
    results = evaluate(tmp_path, config)
    assert results["bm25"]["bpb"]["n"] == 9 and results["bm25"]["bpb"]["clusters"] == 3
    rows = [row for row in pq.read_table(tmp_path / "out/examples.parquet").to_pylist() if row["method"] == "bm25"]
    assert sum(row["words"] for row in rows) == 180
    assert sum(row["tokens"] for row in rows) == 180
    assert [len(row["documents"]) for row in rows] == [0, 2, 2] * 3, "what begins a text is searched for by nothing"
    told = json.loads((tmp_path / "out/leakage.json").read_text())
    assert {name.partition("#")[0] for name in told["examples"]} == {"a", "b"}
    assert told["by"] == {"source": 3, "equal text": 0, "n-gram": 2}
    assert results["bm25"]["bpb/not in the corpus"]["n"] == 4
    table = (tmp_path / "out/table.md").read_text()
    assert table.startswith("language_modelling, n = 9 of 3 sources\n")
    assert "Intervals: 95%, each by itself, over 3 sources. Verdicts: p < 0.05 after Holm's correction for 6" in table
    assert "In the corpus: 5 of 9 examples (55.6%): 3 by source, 0 by an equal text, 2 by 13 words in a row." in table
    assert "| not in the corpus | 4 |" in table


def test_documents_of_a_texts_own_source_are_left_out_and_said(tmp_path, config):
    evaluate(tmp_path, [*config, "exclude_own_source=true", "methods=[none,bm25@20]"])
    rows = pq.read_table(tmp_path / "out/examples.parquet").to_pylist()
    found = {row["id"][0]: set(row["documents"]) for row in rows if row["documents"]}
    assert "own" not in found["a"] and "copy" in found["b"]
    assert "not retrieved, and not compared: 3 of 9 have some." in (tmp_path / "out/table.md").read_text()


def test_tokens_gain_by_the_rarity_of_their_word_and_the_popularity_of_their_name(tmp_path, config):
    row = {"subj": "a7", "prop": "occupation", "obj": "poet", "possible_answers": ["poet"], "s_pop": 50}
    (tmp_path / "popqa.jsonl").write_text(json.dumps(row) + "\n")
    own = ["evaluation=token_gain", "methods=[none,bm25]", f"texts.entities={tmp_path / 'popqa.jsonl'}"]
    gains = run.evaluate(load_evaluation_config(tmp_path / "evaluation.yaml", [*config, *own]))["token_gain"]["bm25"]
    of_words = [of["n"] for name, of in gains.items() if name.startswith("gain_bits/") and not name.endswith(" - rest")]
    assert sum(of_words) == 180
    assert gains["entity_gain_bits/popularity 10^1-10^2"]["n"] == 1 and gains["entity_gain_bits/no entity"]["n"] == 179
    assert "| popularity 10^1-10^2 | 1 | 1 | 1 | 1 | " in (tmp_path / "out/table.md").read_text()
    assert "| times in the corpus |" in (tmp_path / "out/table.md").read_text()
