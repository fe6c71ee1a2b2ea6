"""Hours and dollars of evaluations, by the formulas of a training plan."""

import json
from pathlib import Path
from typing import Any

import pytest

from replug.config.errors import UserError
from replug.config.load import load_evaluation_config
from replug.evals.kinds import kind_names
from replug.planning.accelerators import ACCELERATORS
from replug.planning.evaluations import EvaluationAssumptions, EvaluationPlan, evaluation_json, plan_evaluation
from replug.planning.model_sizes import encoder_size, lm_size

ROOT = Path(__file__).parents[2]
CONTRIEVER = "retriever.path=facebook/contriever"
RATE = 0.35 * 312e12
EVALUATIONS = sorted([*ROOT.glob("configs/eval_*.yaml"), *ROOT.glob("configs/paper_tables/*.yaml")])


def planned(name: str, *overrides: str, gpus: str | None = "1xA100", **given: Any) -> EvaluationPlan:
    config = load_evaluation_config(ROOT / f"configs/{name}.yaml", overrides)
    return plan_evaluation(config, gpus, EvaluationAssumptions(**given))


def of_texts(*overrides: str, **given: Any) -> EvaluationPlan:
    return planned("eval_lm", CONTRIEVER, "lm.path=gpt2-xl", "data.window=128", *overrides, **given)


def of_answers(*overrides: str, gpus: str = "1xA100", **given: Any) -> EvaluationPlan:
    own = ["data.corpus=DOCUMENTS.jsonl", "questions.path=NQ.jsonl", CONTRIEVER, *overrides]
    return planned("eval_open_qa", *own, gpus=gpus, num_documents=1000, num_examples=100, **given)


@pytest.mark.parametrize("path", EVALUATIONS, ids=lambda path: path.stem)
def test_every_evaluation_of_this_repository_has_a_plan(path: Path):
    content = path.read_text()
    own = [] if "source:" in content else ["data.corpus=DOCUMENTS.jsonl"]
    own += ["lm.path=gpt2"]
    config = load_evaluation_config(path, [*own, CONTRIEVER])
    given = EvaluationAssumptions(None, 110e6, num_documents=1000, num_examples=10, price=2.0)
    plan = evaluation_json(plan_evaluation(config, "1xA100", given))
    assert plan["dollars"] == pytest.approx(2 * plan["gpu_hours"])
    assert bool(plan["lms"]) == (config.evaluation != "retrieval")
    json.dumps(plan)


def test_hours_of_scoring_and_embedding_are_flop_over_the_rate_of_a_training_plan():
    plan = of_texts("methods=[none,replug]", "data.document_tokens=128", num_documents=36_000_000)
    lm, encoder = lm_size("gpt2-xl"), encoder_size("facebook/contriever")
    num = 200
    flop = num * (10 * 384 * lm.flop_per_token(384) + 256 * lm.flop_per_token(256) + 11 * 128 * lm.flop_per_prediction)
    assert plan.lms[0].flop == pytest.approx(flop)
    assert plan.hours["score"] == pytest.approx(flop / RATE / 3600)
    assert plan.hours["embed"] == pytest.approx(36_000_000 * 128 * encoder.flop_per_token(128) / RATE / 3600, rel=1e-4)
    assert plan.hours["embed"] == pytest.approx(2.05, rel=0.01)  # as docs/planning.md has it


def test_a_price_makes_dollars_and_none_makes_none():
    assert evaluation_json(of_texts())["dollars"] is None
    plan = evaluation_json(of_texts(price=3.0, gpus="4xA100"))
    assert plan["dollars"] == pytest.approx(3 * plan["gpu_hours"])
    assert plan["wall_hours"] == pytest.approx(plan["gpu_hours"] / 4)


def test_an_answer_takes_no_less_than_reading_the_weights_for_each_token():
    plan = of_answers("methods=[none]", "lm.path=llama-2-13b")
    weights, bandwidth = 2 * lm_size("llama-2-13b").parameters, ACCELERATORS["A100"].bandwidth
    assert plan.hours["score"] * 3600 > 100 * 16 * weights / bandwidth
    assert plan.lms[0].flop / RATE < 100 * 16 * weights / bandwidth


def test_an_lm_of_several_gpus_holds_them_all_and_wants_them():
    with pytest.raises(UserError, match=r"--gpus is 1xA100, but facebook/opt-66b takes 2 of them .* 2xA100"):
        of_answers("lm.path=facebook/opt-66b")
    one, two = (of_answers("lm.path=facebook/opt-66b", gpus=gpus) for gpus in ("2xB200", "2xA100"))
    assert [one.lms[0].gpus, two.lms[0].gpus] == [1, 2]
    assert any("spread over 2 GPUs" in note for note in two.notes)


def test_a_server_reads_every_prompt_whole():
    here = of_answers("lm.path=gpt2-xl")
    there = of_answers("lm.url=http://127.0.0.1:9/v1", "lm.model=gpt2-xl")
    assert here.lms[0].tokens_read < here.lms[0].tokens_put == there.lms[0].tokens_put == there.lms[0].tokens_read
    assert any("server" in note for note in there.notes)


def test_a_retriever_that_no_method_asks_is_not_embedded():
    assert of_texts("methods=[none,bm25]").retrievers == ()


def test_unknown_models_are_taken_for_the_parameters_that_are_told_and_known_ones_are_not():
    with pytest.raises(UserError, match="--retriever-parameters"):
        of_texts("retrievers.lsr=runs/lsr", "methods=[replug,lsr]")
    plan = of_texts("retrievers.lsr=runs/lsr", "methods=[replug,lsr]", retriever_parameters=335e6)
    known, told = plan.retrievers
    assert known.parameters == encoder_size("facebook/contriever").parameters
    assert told.parameters == 335e6
    assert any("runs/lsr is not there" in note for note in plan.notes)


def test_an_index_brings_the_vectors_of_its_documents(tmp_path: Path):
    encoder = tmp_path / "index/v000001/encoder"
    encoder.mkdir(parents=True)
    (encoder / "config.json").write_text(json.dumps(BERT))
    (tmp_path / "index/v000001/manifest.json").touch()
    plan = of_texts("methods=[replug]", f"retriever.path={tmp_path}")
    assert plan.retrievers[0].is_indexed
    assert plan.retrievers[0].tokens == 200 * 128


BERT = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 256, "num_attention_heads": 2, "vocab_size": 99}


def test_what_cannot_be_counted_names_the_flag():
    with pytest.raises(UserError, match=r"--gpus is missing; expected such as --gpus 1xA100"):
        of_texts(gpus=None)
    with pytest.raises(UserError, match=r"questions.max_questions is not set .*--examples N"):
        planned(
            "eval_open_qa",
            *("data.corpus=D.jsonl", "questions.max_questions=null", CONTRIEVER, "lm.path=gpt2"),
            num_documents=9,
        )
    with pytest.raises(UserError, match=r"--efficiency is 2"):
        of_texts(efficiency=2.0)


def test_an_evaluation_that_is_not_known_and_a_missing_lm_are_refused():
    with pytest.raises(UserError, match="evaluation: no plan is known of 'chess'; expected one of lm, tokens"):
        of_texts("evaluation=chess", num_examples=3)
    with pytest.raises(UserError, match=r"lm\.path is missing"):
        planned("eval_lm", CONTRIEVER)


def test_every_kind_of_evaluation_has_a_plan():
    given = ["data.corpus=D", "data.source=null", CONTRIEVER]
    planned_kinds = {load_evaluation_config(path, given).evaluation for path in EVALUATIONS}
    assert planned_kinds == set(kind_names())


def test_lengths_that_are_assumed_are_said():
    assert "128 + 128 tokens (data.window)" in of_texts().notes[0]
    whole = of_texts("texts.path=T", "data.source=null", "data.corpus=D.jsonl", num_documents=9, num_examples=9)
    assert "128 + 128 tokens (texts.context_tokens)" in whole.notes[0]
