"""LM calls and tokens of evaluations, against numbers counted by hand."""

import json
from pathlib import Path

import pytest

from replug.config.errors import UserError
from replug.config.evaluation_schema import EvaluationConfig
from replug.config.load import load_evaluation_config
from replug.data.shards import prepared_folder
from replug.planning.evaluations import count_examples, plan_evaluation
from tests.support.command_line import ROOT

OWN = ["data.source=null", "data.corpus=D.jsonl", "retriever.path=facebook/contriever", "lm.path=gpt2"]
EVALUATIONS = sorted([*ROOT.glob("configs/eval_*.yaml"), *ROOT.glob("configs/paper_tables/*.yaml")])


def config_of(name: str, *overrides: str) -> EvaluationConfig:
    path = "texts.path=T" if name == "lm" else "questions.path=Q.jsonl"
    return load_evaluation_config(ROOT / f"configs/eval_{name}.yaml", [*OWN, path, *overrides])


@pytest.mark.parametrize(
    ("name", "methods", "calls", "tokens"),
    [
        ("lm", "[none]", 1, 256),
        ("lm", "[none,replug]", 11, 256 + 10 * 356),
        ("lm", "[replug@3,replug@2/posterior]", 7, 7 * 356),
        ("lm", "[replug@10/concat]", 1, 10 * 100 + 256),
        ("mmlu", "[none,replug]", 11, 104 + 10 * 204),
        ("open_qa", "[replug@3]", 3, 3 * (20 + 100 + 16)),
        ("popqa", "[genread]", 2, 2 * (15 + 150 + 15)),
        ("internet", "[poe@2]", 8, 8 * (150 + 20 + 4 * 25)),  # answers, and three other factors of each passage
        ("internet", "[none]", 1, 150 + 20 + 50 * 25),
        ("retrieval", "[replug]", 0, 0),
    ],
)
def test_each_method_reads_its_documents(name: str, methods: str, calls: int, tokens: int) -> None:
    config = config_of(name, "data.document_tokens=100", f"methods={methods}")
    plan = plan_evaluation(config, 7)
    assert (plan["examples"], plan["lm_calls"], plan["tokens"]) == (7, 7 * calls, 7 * tokens)


@pytest.mark.parametrize("path", EVALUATIONS, ids=lambda path: path.stem)
def test_every_evaluation_of_this_repository_has_a_plan(path: Path) -> None:
    own = [*OWN, *["retrievers.lsr=facebook/contriever"] * ("  lsr:" in path.read_text())]  # of a run to come
    config = load_evaluation_config(path, own)
    plan = plan_evaluation(config, 10)
    assert (plan["lm_calls"] > 0) == (plan["tokens"] > 0) == (config.evaluation != "retrieval")


def test_examples_are_counted_in_files_else_by_keys_else_the_flag_is_named(tmp_path: Path) -> None:
    (tmp_path / "q.jsonl").write_text('{"question": "?"}\n' * 7)
    path = f"questions.path={tmp_path / 'q.jsonl'}"
    assert count_examples(config_of("open_qa", path, "questions.max_questions=null"), None) == 7
    assert count_examples(config_of("open_qa", path, "questions.max_questions=5"), None) == 5
    assert count_examples(config_of("open_qa", path), 3) == 3
    assert count_examples(config_of("mmlu", "questions.max_questions=25"), None) == 25 * 57
    with pytest.raises(UserError, match=r"questions.max_questions is not set .*--examples N"):
        count_examples(config_of("open_qa", "questions.max_questions=null"), None)


def test_a_prepared_set_tells_its_texts_and_their_lengths(tmp_path: Path) -> None:
    prepared = prepared_folder(tmp_path)
    prepared.claim({"data.context_tokens": 64, "data.document_tokens": 100})
    prepared.finish([], {"counts": {"documents": 9, "queries": 5, "heldout": 50}})
    own = [*OWN[2:], "data.source=null", f"data.prepared={tmp_path}", "methods=[none]"]
    plan = plan_evaluation(load_evaluation_config(ROOT / "configs/eval_lm.yaml", own))
    assert (plan["examples"], plan["tokens"]) == (50, 50 * 128)
    json.dumps(plan)
