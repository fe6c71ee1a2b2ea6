"""Queries tuned alone, in the online loop: one index for the whole run, searched by the tuned encoder."""

import json
from pathlib import Path

import numpy as np
import pytest

from replug.index_workers.local_index import IndexRetriever, LocalIndex
from replug.models.encoder import Encoder
from tests.support.command_line import CommandLine
from tests.support.runs import metrics


@pytest.mark.nightly
def test_no_document_is_embedded_again_and_the_runs_index_is_searched_by_the_tuned_queries(
    replug: CommandLine, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    replug.finish(run, "retriever.train=query", "train.max_steps=8", "refresh.every_steps=2", "refresh.lag_steps=1")
    assert {row["index/live_version"] for row in metrics(run)} == {0.0}
    index = LocalIndex(run / "index", threads=1)
    assert index.plan.version == 0 and index.query_encoder_folder == run / "retriever"
    retriever = IndexRetriever(index)
    assert ":queries by " in retriever.identity
    [found] = retriever.retrieve(["mida furo"], 3)
    query = Encoder(str(run)).encode_query(["mida furo"]).numpy()
    _, similarities = index.search(query, 3)
    np.testing.assert_allclose([document.similarity for document in found], similarities[0])
    results = json.loads((run / "results.json").read_text())
    assert {"replug", "lsr"} <= results["bpb"]["all"].keys()
