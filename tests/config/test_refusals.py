"""A configuration that contradicts itself is refused by the key, or the method, that is wrong."""

from pathlib import Path

import pytest

from replug.config.errors import UserError
from replug.config.load import load_config, load_evaluation_config
from tests.support.packages import ROOT

EVALUATION = "evaluation: language_modelling\nout: x\nmethods: [none]\nlm: {path: stand_in}\ntexts: {path: stand_in}\n"

# Overrides of a training, and what the message names.
OF_TRAINING = {
    "loss.contrastive=1 train.micro_batches=2": "train.micro_batches is 2",
    "train.epochs=2": "train.epochs is 2",
    "train.patience=1": "train.patience is 1",
    "train.labels=x resources.train=2": "resources.train is 2",
    "data.num_dev=5 data.query_share=0.6 data.heldout_share=0.4": "for data.num_dev is 1.1",
    "ensemble.temperature=fit": "data.num_dev is 0",
    "evaluate.heldout=false": "evaluate.heldout is False",
    "refresh.every_steps=10 refresh.lag_steps=11": "refresh.lag_steps is 11",
    "lm={path: x}": "lm.path=VALUE",
    "retriever.query_path=DIR ": "retriever.query_path='\"DIR \"'",
    "data.queries=q": "data.queries: unknown key",
    "lr=3": "did you mean train.lr?",
    "train.labels=x train.max_steps=16 train.label_steps=16": "train.label_steps is 16",
}
OF_EVALUATIONS = {
    "retrievers.none=x": "retrievers.none",
    "questions.query=x": "questions.query is 'x'",
    "methods=[]": "methods is empty",
    "methods=[none,replug]": "retriever.path=DIR",
    "methods=[none,random]": "data.corpus is missing",
    "methods=[random/softmax]": "methods: random/softmax",
    "methods=[replug/sum]": "methods: replug/sum",
    "methods=[bm25@0]": "methods: bm25@0",
    "methods=[genread@2]": "methods: genread@2",
    "methods=[none/posterior]": "methods: none/posterior",
    "methods=[genread/posterior]": "methods: genread/posterior",
    "methods=[contriever]": "methods: contriever is unknown",
    "methods=[none,bm25,none]": "methods names none twice",
    "evaluation=internet_qa methods=[replug@3]": "methods: replug@3 is unknown",
    "evaluation=internet_qa methods=[gold@3]": "methods: gold@3",
    "evaluation=internet_qa methods=[poe@0]": "methods: poe@0",
}


@pytest.mark.parametrize("overrides", [*OF_TRAINING, *OF_EVALUATIONS])
def test_a_contradiction_is_refused_by_its_key(overrides: str, tmp_path: Path) -> None:
    (tmp_path / "evaluation.yaml").write_text(EVALUATION)
    given = [overrides] if "{" in overrides or overrides.endswith(" ") else overrides.split()
    with pytest.raises(UserError) as refused:
        if overrides in OF_TRAINING:
            load_config(ROOT / "configs/debug.yaml", given)
        else:
            load_evaluation_config(tmp_path / "evaluation.yaml", given)
    assert {**OF_TRAINING, **OF_EVALUATIONS}[overrides] in str(refused.value)
