"""How many examples an evaluation measures, by its files and keys."""

import gzip
import json
from pathlib import Path

from replug.config.evaluation_schema import EvaluationConfig
from replug.config.load import load_evaluation_config
from replug.data.rows import count_rows
from replug.planning.examples import count_examples, with_lengths_of_set

ROOT = Path(__file__).parents[2]


def questions(name: str, *overrides: str) -> EvaluationConfig:
    return load_evaluation_config(
        ROOT / f"configs/eval_{name}.yaml", ["data.corpus=D.jsonl", "retriever.path=facebook/contriever", *overrides]
    )


def test_rows_are_counted_without_a_header_and_through_gzip(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n\n{"a": 2}\n')
    (tmp_path / "b.tsv.gz").write_bytes(gzip.compress(b"id\ttext\ttitle\n1\tx\ty\n2\tx\ty\n3\tx\ty\n"))
    assert [count_rows(tmp_path / name) for name in ("a.jsonl", "b.tsv.gz")] == [2, 3]


def test_questions_are_those_of_the_file_up_to_what_is_asked_for(tmp_path: Path):
    (tmp_path / "q.jsonl").write_text('{"question": "?"}\n' * 7)
    path = f"questions.path={tmp_path / 'q.jsonl'}"
    assert count_examples(questions("open_qa", path, "questions.max_questions=null"), None) == 7
    assert count_examples(questions("open_qa", path, "questions.max_questions=5"), None) == 5
    assert count_examples(questions("open_qa", path), 3) == 3


def test_questions_of_mmlu_are_counted_by_subject_without_headers(tmp_path: Path):
    (tmp_path / "test").mkdir()
    (tmp_path / "test/a_test.csv").write_text("q,1,2,3,4,A\n" * 6)
    (tmp_path / "test/b_test.csv").write_text('question,A,B,C,D,answer\n"q\nr",1,2,3,4,A\n')
    path = f"questions.path={tmp_path}"
    assert count_examples(questions("mmlu", path), None) == 7
    assert count_examples(questions("mmlu", path, "questions.max_questions=4"), None) == 5


def test_files_that_are_arrays_are_counted(tmp_path: Path):
    (tmp_path / "P1.json").write_text(json.dumps([{"question": "?"}] * 3))
    (tmp_path / "P2.json").write_text(json.dumps([{"question": "?"}] * 2))
    assert count_examples(questions("popqa", f"questions.path={tmp_path}", "questions.max_questions=null"), None) == 5


def test_without_a_file_as_many_as_are_asked_for():
    assert count_examples(questions("mmlu", "questions.max_questions=25"), None) == 25 * 57


def test_a_prepared_set_tells_its_texts_and_their_lengths(tmp_path: Path):
    origin = {"data.window": 128, "data.document_tokens": 100}
    manifest = {"counts": {"documents": 9, "heldout": 50}, "origin": origin}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    own = ["data.source=null", f"data.prepared={tmp_path}", "retriever.path=facebook/contriever"]
    config = load_evaluation_config(ROOT / "configs/eval_lm.yaml", own)
    assert count_examples(config, None) == 50
    data = with_lengths_of_set(config).data
    assert (data.window, data.document_tokens) == (128, 100)
