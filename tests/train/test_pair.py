"""Training a pair of encoders: which side moves, and that a whole run searches with both."""

import json
import os
import signal
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from replug.config.choices import Similarity, TrainedSide
from replug.config.schema import Config
from replug.data.datamodule import Position
from replug.data.store import PreparedSet
from replug.index_workers.build_plan import IndexState
from replug.index_workers.local_index import IndexRetriever, LocalIndex
from replug.models.build import load_encoder
from replug.models.encoder import Encoder
from replug.train.fitting import lsr_module
from tests.support.command_line import CommandLine, wait_for
from tests.support.dpr_folders import write_dpr_pair
from tests.support.runs import metrics, wait_for_step, what_must_be_equal
from tests.support.training import InlineLM, pipeline_for


def moved(config: Config, data: PreparedSet) -> list[bool]:
    """Whether vectors of queries, and of documents, are others after a step."""
    module = lsr_module(config, load_encoder(config.retriever), data)
    module.log_dict = lambda *args, **kwargs: None  # type: ignore[method-assign]
    pipeline_for(module, data, InlineLM()).advance(0, IndexState(0, 0))
    texts = ["mida furo", "furo"]

    def vectors() -> list[np.ndarray]:
        module.encoder.eval()
        return [module.encode_queries(texts), module.documents.encode_document(texts).numpy()]

    before, steps = vectors(), module.configure_optimizers()
    module.training_step(Position(0), 0).backward()
    steps["optimizer"].step()
    return [not np.array_equal(old, new) for old, new in zip(before, vectors(), strict=True)]


def test_a_step_moves_the_side_that_is_trained_and_no_other(
    debug_config: Config, data: PreparedSet, tmp_path: Path
) -> None:
    documents, queries = write_dpr_pair(tmp_path)
    one = replace(debug_config.retriever, dropout=True)
    two = replace(one, path=str(documents), query_path=str(queries), similarity=Similarity.dot)
    for retriever in (one, two):
        for side in TrainedSide:
            config = replace(debug_config, retriever=replace(retriever, train=side))
            expected = [side is not TrainedSide.documents, side is not TrainedSide.query]
            assert moved(config, data) == expected, (side, retriever)


def pair_keys(folder: Path) -> tuple[str, ...]:
    documents, queries = write_dpr_pair(folder)
    return f"retriever.path={documents}", f"retriever.query_path={queries}", "retriever.similarity=dot"


@pytest.mark.nightly
@pytest.mark.parametrize("side", ["both", "query", "documents"])
def test_a_run_of_a_pair_saves_and_searches_with_both(replug: CommandLine, tmp_path: Path, side: str) -> None:
    run, keys = tmp_path / "run", pair_keys(tmp_path)
    refresh = ("train.max_steps=6", "refresh.every_steps=2", "refresh.lag_steps=1")
    replug.finish(run, *keys, *refresh, f"retriever.train={side}", "retriever.query_prompt=furo")
    versions = {row["index/live_version"] for row in metrics(run)}
    assert (versions == {0.0}) is (side == "query")
    index, tuned = LocalIndex(run / "index", threads=1), Encoder(str(run / "retriever"))
    assert (index.plan.query_prompt, index.plan.modules) == ("furo", "cls; queries cls")
    [found] = IndexRetriever(index).retrieve(["mida furo"], 3)
    _, similarities = index.search(tuned.encode_query(["mida furo"]).numpy(), 3)
    np.testing.assert_allclose([document.similarity for document in found], similarities[0], rtol=1e-5)
    assert {"replug", "lsr"} <= json.loads((run / "results.json").read_text())["bpb"]["all"].keys()


@pytest.mark.nightly
def test_a_run_of_a_pair_that_is_killed_goes_on_with_the_losses_it_would_have_had(
    replug: CommandLine, begin: Callable[..., subprocess.Popen], tmp_path: Path
) -> None:
    keys = (*pair_keys(tmp_path), "train.max_steps=12", "checkpoint.every_steps=2", "refresh.every_steps=4")
    keys = (*keys, "refresh.lag_steps=1", "lm.path=stand_in:0.05")
    replug.finish(tmp_path / "whole", *keys)
    process = begin(tmp_path / "killed", *keys)
    wait_for_step(tmp_path / "killed", 5, process)
    os.kill(process.pid, signal.SIGKILL)
    wait_for(process, status=-signal.SIGKILL)
    assert "resuming at step" in replug.finish(tmp_path / "killed", *keys)
    assert what_must_be_equal(tmp_path / "killed") == what_must_be_equal(tmp_path / "whole")
