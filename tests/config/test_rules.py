"""A key that would play no part, or contradicts another, is refused by its name."""

import pytest

from replug.config.errors import UserError
from replug.config.load import load_config
from tests.support.packages import ROOT

CONTRADICTING = {
    "loss.in_batch=true": "loss.contrastive is 0",
    "loss.in_batch=true loss.contrastive=1 train.micro_batches=2": "train.micro_batches is 2 with loss.in_batch",
    "retriever.train=query index.rerank=live": "index.rerank is live with retriever.train=query",
    "train.epochs=2": r"train\.epochs is set, but train\.labels is not",
    "train.patience=1": r"train\.patience is set, but train\.labels is not",
    "train.labels=x resources.train=2": "one rank trains on labels",
    "train.labels=auto label.tuned=4": "label.tuned is 4 with retriever.train=both; expected query",
    "train.labels=auto label.tuned_path=x": "label.tuned_path is x, but label.tuned is 0",
    "train.labels=auto label.tuned=4 retriever.train=query retriever.query_path=x": "expected one encoder instead",
    "data.num_dev=5 data.query_share=0.6 data.heldout_share=0.4": "for data.num_dev is 1.1; expected less",
    "evaluate.heldout=false": r"evaluate\.heldout=false is set, but train\.labels is not",
    "retriever.dims=[8,8]": "retriever.dims is .*; expected different numbers above 0",
}


@pytest.mark.parametrize("overrides", CONTRADICTING)
def test_what_contradicts_is_refused_by_its_key(overrides):
    with pytest.raises(UserError, match=CONTRADICTING[overrides]):
        load_config(ROOT / "configs/debug.yaml", overrides.split())
