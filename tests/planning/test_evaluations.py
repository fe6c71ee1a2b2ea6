"""Tokens, hours and dollars of evaluations, against numbers counted by hand."""

import json
from pathlib import Path
from typing import Any

import pytest

from replug.config.errors import UserError
from replug.config.evaluation_schema import EvaluationConfig
from replug.config.load import load_evaluation_config
from replug.data.shards import prepared_folder
from replug.planning.evaluations import count_examples, plan_evaluation, prompts_of
from replug.planning.model_sizes import encoder_size, lm_size
from tests.support.command_line import ROOT

RATE = 0.49 * 312e12
OWN = ["data.source=null", "data.corpus=D.jsonl", "retriever.path=facebook/contriever", "lm.path=gpt2"]
EVALUATIONS = sorted([*ROOT.glob("configs/eval_*.yaml"), *ROOT.glob("configs/paper_tables/*.yaml")])


def config_of(name: str, *overrides: str) -> EvaluationConfig:
    path = "texts.path=T" if name == "lm" else "questions.path=Q.jsonl"
    return load_evaluation_config(ROOT / f"configs/eval_{name}.yaml", [*OWN, path, *overrides])


def planned(
    name: str, *overrides: str, gpus: str | None = "1xA100", documents: int = 1000, examples: int = 100, **given: Any
) -> dict[str, Any]:
    return plan_evaluation(config_of(name, *overrides), gpus, documents, examples, **given)


def read_of(name: str, methods: str, num: int, *overrides: str) -> tuple[int, int]:
    """Tokens that are read, and that are generated."""
    prompts = prompts_of(config_of(name, "data.document_tokens=100", f"methods={methods}", *overrides), num)
    return sum(one.tokens_read for one in prompts), sum(one.tokens_generated for one in prompts)


@pytest.mark.parametrize(
    ("methods", "tokens"),
    [
        ("[none]", 256),
        ("[none,replug,replug@3,replug/even]", 256 + 10 * 356),  # a document that several methods read is scored once
        ("[none,replug@3,bm25@2]", 256 + 5 * 356),
        ("[replug@3,replug@2/posterior]", 3 * 356),
        ("[replug@10/concat]", 10 * 100 + 256),
    ],
)
def test_texts_are_read_after_each_document(methods: str, tokens: int) -> None:
    assert read_of("lm", methods, 7)[0] == 7 * tokens


def test_letters_are_scored_after_each_prompt_and_demonstrations_read_once() -> None:
    assert read_of("mmlu", "[none]", 10) == (10 * (100 + 4), 0)
    assert read_of("mmlu", "[replug]", 10) == read_of("mmlu", "[replug,replug/vote]", 10) == (100 * (200 + 4), 0)


def test_answers_and_documents_that_the_lm_writes_are_generated() -> None:
    assert read_of("open_qa", "[replug@3]", 10) == (30 * 120, 30 * 16)
    once, generated = read_of("popqa", "[genread]", 10, "questions.shots=0")
    assert (once, generated) == (10 * 15 + 10 * (15 + 150), 10 * 150 + 10 * 15)


def test_answers_from_passages_are_sampled_and_every_other_factor_is_scored() -> None:
    once = (150 + 20, 150 + 20, 150 + 4 * 5, 150 + 4 * 25)  # a sample's own log-prob comes with it
    assert read_of("internet", "[poe@2]", 3) == (3 * 2 * sum(once), 3 * 2 * 4 * 5)
    assert read_of("internet", "[none]", 3)[1] == 3 * 50 * 5
    assert read_of("internet", "[none,direct@2]", 3, "questions.dataset=fever")[1] == 0  # labels are scored
    both = planned("internet", "methods=[poe@2]", "rerank_lm.path=gpt2-xl")
    assert [lm["name"] for lm in both["lms"]] == ["gpt2", "gpt2-xl"]
    assert (both["lms"][0]["tokens_generated"] > 0, both["lms"][1]["tokens_generated"]) == (True, 0)


@pytest.mark.parametrize("path", EVALUATIONS, ids=lambda path: path.stem)
def test_every_evaluation_of_this_repository_has_a_plan(path: Path) -> None:
    own = [one for one in OWN if not ("lms:" in path.read_text() and one.startswith("lm."))]
    own += ["retrievers.lsr=facebook/contriever"] * ("  lsr:" in path.read_text())  # of a run that is still to come
    config = load_evaluation_config(path, own)
    plan = plan_evaluation(config, "1xA100", 1000, 10, price=2.0)
    assert plan["dollars"] == pytest.approx(2 * plan["gpu_hours"])
    assert bool(plan["lms"]) == (config.evaluation != "retrieval")
    json.dumps(plan)


def test_hours_are_flop_over_the_rate_of_a_training_plan() -> None:
    keys = ("methods=[none,replug]", "data.document_tokens=128", "lm.path=gpt2-xl")
    plan = planned("lm", *keys, documents=36_000_000, examples=200)
    lm, encoder = lm_size("gpt2-xl"), encoder_size("facebook/contriever")
    flop = 200 * (10 * 384 * lm.flop_per_token(384) + 256 * lm.flop_per_token(256) + 11 * 128 * lm.flop_per_prediction)
    assert plan["lms"][0]["hours"] == pytest.approx(flop / RATE / 3600)
    embedding = 36_000_000 * 130 * encoder.flop_per_token(130)
    assert plan["retrievers"][0]["hours"] == pytest.approx(embedding / (0.36 * 312e12) / 3600, 1e-4)


def test_an_lm_of_several_gpus_holds_them_all_and_a_price_is_of_each() -> None:
    with pytest.raises(UserError, match=r"--gpus is 1xA100.* 2xA100"):
        planned("open_qa", "lm.path=facebook/opt-66b")
    plan = planned("open_qa", "lm.path=facebook/opt-66b", gpus="4xA100", price=3.0)
    assert plan["lms"][0]["gpus"] == 2
    assert plan["dollars"] == pytest.approx(3 * plan["gpu_hours"]) == 12 * plan["wall_hours"]


def test_retrievers_are_those_that_are_asked_and_an_index_brings_its_vectors(tmp_path: Path) -> None:
    assert planned("lm", "methods=[none,bm25]")["retrievers"] == []
    with pytest.raises(UserError, match="runs/lsr"):
        planned("lm", "retrievers.lsr=runs/lsr", "methods=[replug,lsr]")
    (tmp_path / "index/v000001/encoder").mkdir(parents=True)
    bert = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "vocab_size": 99}
    (tmp_path / "index/v000001/encoder/config.json").write_text(json.dumps(bert))
    (tmp_path / "index/v000001/manifest.json").touch()
    [indexed] = planned("lm", "methods=[replug]", f"retriever.path={tmp_path}")["retrievers"]
    assert (indexed["is_indexed"], indexed["tokens"]) == (True, 100 * 130)


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
    plan = plan_evaluation(load_evaluation_config(ROOT / "configs/eval_lm.yaml", own), "1xA100")
    assert (plan["examples"], plan["lms"][0]["tokens_read"]) == (50, 50 * 128)


def test_the_hours_of_a_server_are_not_made_up() -> None:
    server = ("lm.path=null", "lm.url=http://127.0.0.1:9/v1", "lm.model=m", "lm.tokenizer=package:smollm2")
    [lm] = planned("lm", *server)["lms"]
    assert lm["hours"] is None and lm["tokens_read"] > 0
