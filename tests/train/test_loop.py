"""The whole loop as a user drives it: determinism, kill -9 and resume, a faulty server, real models, adapters."""

import contextlib
import errno
import json
import math
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from replug.data.sources.built_in_texts import stand_in_vocabulary
from replug.index_workers.local_index import IndexRetriever, LocalIndex
from replug.models.encoder import ADAPTER, Encoder
from replug.train import workers
from tests.support.command_line import STEPS, CommandLine, arguments, start, wait_for
from tests.support.fault_server import KNOWN, FaultServer, write_word_tokenizer
from tests.support.real_models import real_encoder, real_lm
from tests.support.runs import descendants, heldout_bits, metrics, name_of, wait_for_step, what_must_be_equal


def test_a_run_ends_with_everything_a_user_is_promised(quiet_run):
    results = json.loads((quiet_run / "results.json").read_text())["language_modelling"]
    assert list(results) == ["none", "replug", "lsr", "replug/posterior", "lsr/posterior"]
    assert {"bpb", "bpb/even", "bpb/odd", "bpb - replug", "bpb - none"} <= results["lsr"].keys()
    assert results["lsr"]["bpb"]["n"] == 40
    for name in ("config.yaml", "environment.json", "report.html", "retriever/model.safetensors", "metrics.jsonl"):
        assert (quiet_run / name).is_file()
    assert [row["step"] for row in metrics(quiet_run)] == list(range(STEPS))
    [of_index, of_retriever] = sorted(quiet_run.rglob("model.safetensors"))
    assert of_index.is_relative_to(quiet_run / "index") and of_index.read_bytes() == of_retriever.read_bytes()
    assert not list(quiet_run.rglob("*.ckpt"))
    losses = [row["train/loss"] for row in metrics(quiet_run)]
    assert sum(losses[-6:]) < sum(losses[:6]), "the debug run learns"


def test_batches_record_the_version_they_saw_and_refreshes_come_at_their_lag(quiet_run):
    rows = metrics(quiet_run)
    depth, versions = 2, [int(row["index/version"]) for row in rows]
    # Adopted at steps 9, 15 and 21; the batch of step s was retrieved at the boundary of step s - 2.
    expected = [sum(s - depth >= adopted for adopted in (9, 15, 21)) for s in range(STEPS)]
    assert versions == expected
    assert [int(row["pipeline/query_age_steps"]) for row in rows] == [0, 1] + [2] * (STEPS - 2)
    assert [row["step"] for row in rows if row["index/swapped"]] == [9, 15, 21]


@pytest.mark.slow
def test_slowed_workers_change_no_number(quiet_run, tmp_path):
    """A sleeping LM on two replicas, and builders that are stopped and let go again all the time."""
    run = tmp_path / "slow"
    process = start(run, "lm.path=stand_in:0.01", "resources.score=2", "resources.index=2")
    while process.poll() is None:
        builders = [p for p in descendants(process.pid) if "Builder" in name_of(p)]
        for signal_number in (signal.SIGSTOP, signal.SIGCONT):
            for builder in builders:
                with contextlib.suppress(psutil.NoSuchProcess):
                    builder.send_signal(signal_number)
            time.sleep(0.2)
    wait_for(process)
    assert what_must_be_equal(run) == what_must_be_equal(quiet_run)
    assert (run / "results.json").read_text() == (quiet_run / "results.json").read_text()


@pytest.mark.slow
def test_killed_in_a_refresh_the_same_command_goes_on_with_the_same_losses(quiet_run, finish, tmp_path):
    run, slow = tmp_path / "run", "lm.path=stand_in:0.05"  # so that the signal comes long before the end
    process = start(run, slow)
    wait_for_step(run, 7, process)
    os.kill(process.pid, signal.SIGKILL)
    wait_for(process, status=-signal.SIGKILL)
    assert not (run / "results.json").exists(), "the run ended before it was killed"
    assert "resuming at step" in finish(run, slow)
    assert what_must_be_equal(run) == what_must_be_equal(quiet_run)
    assert (run / "results.json").read_text() == (quiet_run / "results.json").read_text()


@pytest.mark.slow
def test_a_run_whose_feeder_of_scorers_is_killed_has_the_same_losses(quiet_run, finish, tmp_path, monkeypatch, caplog):
    run = tmp_path / "run"
    monkeypatch.setattr(workers, "MOST_FED_HERE", 0)

    def kill() -> None:
        while not (run / "metrics.jsonl").exists() or len(metrics(run)) < 4:
            time.sleep(0.05)
        feeders = [one for one in psutil.process_iter(["name"]) if one.info["name"].startswith("ray::Feeder")]
        for feeder in feeders:
            feeder.kill()
        killed.extend(feeders)

    killed: list[psutil.Process] = []
    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    finish(run, "lm.path=stand_in:0.05")
    killer.join(60)
    assert killed and "feeder of scorers 0 died" in caplog.text
    assert what_must_be_equal(run) == what_must_be_equal(quiet_run)
    assert (run / "results.json").read_text() == (quiet_run / "results.json").read_text()


@pytest.mark.slow
def test_ctrl_c_saves_the_step_and_the_same_command_goes_on_with_the_same_losses(quiet_run, begin, here, tmp_path):
    """It comes to every process of the terminal: to those of Ray that did not leave its group as well."""
    run, only_by_signal = tmp_path / "run", ("checkpoint.every_steps=100", "lm.path=stand_in:0.05")
    process = begin(run, *only_by_signal)
    wait_for_step(run, 7, process)
    os.killpg(process.pid, signal.SIGINT)
    output = wait_for(process, status=130)
    assert "replug: Ctrl-C: saving the current step; a second Ctrl-C ends at once, without it" in output
    assert output.splitlines()[-1].startswith("replug: interrupted by Ctrl-C; the same command resumes")
    saved = len(metrics(run))
    assert f"saved step {saved}: the same command resumes from there" in output
    assert not (run / "results.json").exists(), "the run ended before it was interrupted"
    assert f"resuming at step {saved}" in here.finish(run, *only_by_signal)
    assert what_must_be_equal(run) == what_must_be_equal(quiet_run)


# A server as LM, which scores as the stand-in does -------------------------------------------------------------


SERVER = ["lm.path=null", "lm.model=words", "data.source=null", "lm.max_concurrency=8", "lm.timeout_seconds=2"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Write a tokenizer of the words of the debug run and the probe."""
    words = [f"{start}{word}" for topic in stand_in_vocabulary() for word in topic for start in ("", "\n", "\n ")]
    return write_word_tokenizer(tmp_path_factory.mktemp("tokenizer"), [*KNOWN, *words])


@pytest.mark.slow
def test_a_run_through_a_faulty_server_has_the_losses_of_the_lm_itself(quiet_run, here, tokenizer, tmp_path):
    with FaultServer(fault_share=0.1, tokenizer=tokenizer) as server:
        keys = [f"lm.url={server.url}", f"lm.tokenizer={tokenizer}", f"data.prepared={quiet_run / 'data'}"]
        here.finish(tmp_path / "run", *SERVER, *keys)
        assert sum(server.faults.values()) > 10
    losses = [[row["train/loss"] for row in metrics(run)] for run in (tmp_path / "run", quiet_run)]
    assert losses[0] == losses[1]
    assert heldout_bits(tmp_path / "run") == heldout_bits(quiet_run)


# A shipped recipe with real weights and text, made very small; CI runs the quickstart whole -------------------------

ON_LABELS = (
    *("data.num_documents=150", "data.num_queries=16", "data.num_heldout=4", "retrieve.k=3", "evaluate.k=2"),
    *("data.source=package:numpy_docstrings", "retriever.path=package:minilm", "lm.path=package:smollm2"),
    *("data.context_tokens=40", "data.num_dev=4", "label.dense=2", "label.bm25=1", "train.epochs=1"),
    *("data.questions=null", "train.batch_size=2"),
)


@pytest.mark.nightly
def test_a_shipped_recipe_tunes_a_real_retriever_to_a_real_lm(finish, tmp_path):
    real_lm()
    before, run = Encoder(str(real_encoder())), tmp_path / "run"
    assert "0 shared sources, 0 equal texts" in finish(run, *ON_LABELS, config="own_data")
    bits = heldout_bits(run)
    assert set(bits) == {"none", "replug", "lsr", "replug/posterior", "lsr/posterior"}
    assert all(0 < value < 8 and math.isfinite(value) for value in bits.values())
    weights, tuned = before.state_dict(), Encoder(str(run)).state_dict()
    for name in ("word_embeddings.weight", "layer.0.output.dense.weight"):
        [key] = [key for key in weights if key.endswith(name)]
        assert not tuned[key].equal(weights[key])
    num_bytes = sum(path.lstat().st_size for path in run.rglob("*"))
    assert num_bytes < 200e6, "two encoders: the tuned one, and the index's"


# A part of the retriever is trained; a full disk breaks the run off, so that both commands run in this process --------

SHORT = (
    *("train.max_steps=8", "checkpoint.every_steps=2", "refresh.every_steps=3", "refresh.lag_steps=1"),
    *("data.num_queries=80", "data.num_heldout=8", "evaluate.max_examples=4"),
)
SAVED = 4  # the newest step when a run is broken off: a version behind a refresh
QUERY = "mida furo"


def break_off(here: CommandLine, run: Path, keys: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """After the checkpoint of step SAVED, with a refresh behind it where there are any."""
    save = torch.save

    def until_full(what: dict, *to: object) -> None:
        if what["global_step"] > SAVED:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        save(what, *to)

    with monkeypatch.context() as patched:
        patched.setattr(torch, "save", until_full)
        ended = here(*arguments(run, keys, "train", "debug"))
    assert ended.status == 1 and f"step {SAVED} is: " in ended.printed, ended.printed


def require_searched_by_the_tuned(run: Path, dims: int | None, is_refreshed: bool) -> None:
    """The newest index holds vectors of the tuned retriever, or of the one that documents kept."""
    tuned = Encoder(str(run / "retriever"), dims=dims)
    documents = tuned if is_refreshed else Encoder("stand_in")
    index = LocalIndex(run / "index", threads=1)
    assert (index.plan.dims, index.plan.dim) == (dims, tuned.dim)
    retriever = IndexRetriever(index)
    assert (":queries by " in retriever.identity) is not is_refreshed
    [results] = retriever.retrieve([QUERY], 3)
    expected = documents.encode_document([document.text for document in results]) @ tuned.encode_query([QUERY])[0]
    np.testing.assert_allclose([document.similarity for document in results], expected, atol=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keys", "dims", "is_refreshed"),
    [
        (("lora.rank=2", "index.dims=8"), 8, True),
        pytest.param(("retriever.train=query", "lora.rank=2"), None, False, marks=pytest.mark.nightly),
    ],
)
def test_a_part_of_the_retriever_is_trained_and_broken_off_it_resumes_to_the_same_losses_and_retriever(
    here: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: tuple, dims: int, is_refreshed: bool
) -> None:
    whole, run, keys = tmp_path / "whole", tmp_path / "run", (*SHORT, *keys)
    here.finish(whole, *keys)
    rows = metrics(whole)
    assert [row["index/live_version"] for row in rows] == ([0, 0, 0, 0, 1, 1, 1, 2] if is_refreshed else [0] * 8)
    assert {"replug", "lsr"} <= heldout_bits(whole).keys()
    assert (whole / "retriever" / ADAPTER).is_dir()
    require_searched_by_the_tuned(whole, dims, is_refreshed)

    break_off(here, run, keys, monkeypatch)
    assert f"resuming at step {SAVED}" in here.finish(run, *keys)
    assert what_must_be_equal(run) == what_must_be_equal(whole)
    assert (run / "results.json").read_text() == (whole / "results.json").read_text()
    tuned, expected = (Encoder(str(folder / "retriever")).encode_query([QUERY]) for folder in (run, whole))
    assert torch.equal(tuned, expected)
    assert (tuned - Encoder("stand_in").encode_query([QUERY])).abs().max() > 1e-4
    require_searched_by_the_tuned(run, dims, is_refreshed)
