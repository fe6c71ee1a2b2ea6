"""The kinds of evaluation: what each needs of a configuration, and how one is added."""

from pathlib import Path

import pytest

from replug.config.errors import UserError
from replug.config.load import load_evaluation_config
from replug.evals.kinds import KINDS, check_evaluation

CONFIGS = Path(__file__).parents[2] / "configs"
SHIPPED = {path.stem: path for path in CONFIGS.glob("eval_*.yaml")}
GOOD = "evaluation: language_modelling\nout: x\nmethods: [none]\nlm: {path: stand_in}\ntexts: {path: stand_in}\n"


INTERNET = ["evaluation=internet_qa", "texts.path=null", "methods=[none]", "questions.path=x", "questions.dataset=nq"]
HELDOUT = ["texts.path=null", "data.prepared=x"]
MMLU = ["evaluation=mmlu", "questions.path=x"]


def checked(tmp_path: Path, *overrides: str) -> None:
    path = tmp_path / "evaluation.yaml"
    path.write_text(GOOD)
    check_evaluation(load_evaluation_config(path, overrides))


def given(path: Path) -> list[str]:
    """List what a shipped configuration leaves to its user: models, and a source, or questions and documents."""
    has_questions = "source:" not in path.read_text()
    own = ["questions.path=given", "data.corpus=given"] if has_questions else []
    own += ["data.source=given"] if "source: null" in path.read_text() else []
    return ["retriever.path=given", "lm.path=given", "out=given", *own]


def test_every_kind_has_a_configuration_under_its_name_that_lacks_models_questions_and_documents_only():
    configs = {name: load_evaluation_config(path, given(path)) for name, path in SHIPPED.items()}
    assert {config.evaluation for config in configs.values()} == set(KINDS)
    for config in configs.values():
        check_evaluation(config)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["evaluation=mmlu"], "questions.path is missing"),
        (["methods=[genread]"], "methods: genread answers questions, and evaluation=language_modelling asks"),
        (
            ["evaluation=retrieval", "questions.path=x", "methods=[bm25]", "data.corpus=x"],
            "bm25 ranks too few documents",
        ),
        (
            ["evaluation=retrieval", "questions.path=x", "methods=[bm25/posterior]", "k=20", "data.corpus=x"],
            "bm25/posterior; weights change no ranking; expected bm25",
        ),
        (["texts.path=null"], "texts.path is missing"),
        ([*HELDOUT, "texts.scored_tokens=64"], "texts.scored_tokens is set, but held-out texts are measured as they"),
        (
            ["evaluation=mmlu", "questions.path=x", "methods=[bm25/posterior]", "data.corpus=x"],
            "bm25/posterior; an answer of mmlu is one letter",
        ),
        (
            [*INTERNET, "questions.dataset=popqa"],
            "questions.dataset is popqa; evaluation=internet_qa expects one of nq, hotpotqa, fever, strategyqa, situ",
        ),
        ([*INTERNET, "methods=[poe@10]"], "data.corpus is missing; web.engine=local expects documents"),
        (
            ["questions.dataset=nq"],
            "questions.dataset is set, but evaluation=language_modelling does not read it",
        ),
        ([*INTERNET, "rerank_lm.path=a", "rerank_lm.url=b"], "rerank_lm.path and rerank_lm.url are both set"),
        (["ensemble.temperature=0"], "ensemble.temperature is 0"),
        (["rerank_lm.path=x"], "rerank_lm.path is set"),
        ([*MMLU, "ensemble.temperature=2"], "texts.path is set"),
        (
            ["evaluation=perplexity"],
            "evaluation: 'perplexity' .*expected one of internet_qa, language_modelling, mmlu, open_qa, popqa, retri",
        ),
    ],
)
def test_what_a_kind_needs_is_asked_for_by_its_key(tmp_path, overrides, message):
    checked(tmp_path)
    with pytest.raises(UserError, match=message):
        checked(tmp_path, *overrides)
