"""`replug doctor` on machines and configurations; its checks start nothing."""

import sys
from pathlib import Path

import numpy as np
import pytest

from replug.commands import doctor
from replug.commands.doctor import Check, State
from replug.config.load import load_config
from replug.models.black_box_lm import ContinuationScore
from replug.models.score_cache import ScoreCache
from tests.support.command_line import CommandLine

ROOT = Path(__file__).parent.parent.parent
DEBUG = ROOT / "configs/debug.yaml"


@pytest.fixture
def config(tmp_path):
    def load(*overrides: str):
        return load_config(DEBUG, [f"run_dir={tmp_path / 'run'}", *overrides])

    return load


def test_the_debug_configuration_is_well_here(tmp_path: Path, replug: CommandLine) -> None:
    ended = replug("doctor", DEBUG, f"run_dir={tmp_path / 'run'}")
    assert ended.status == 0, ended.printed
    names = ("CUDA", "shared memory", "configuration", "disk", "memory", "layout")
    assert all(f" {name} " in ended.output for name in names)
    assert not (tmp_path / "run").exists()
    ended = replug("doctor", "eval_retrieval", "questions.path=q", "data.corpus=c", "retriever.path=stand_in", "out=o")
    assert ended.status == 0 and "keys, types and rules are valid" in ended.output


@pytest.mark.parametrize(
    ("typed", "named"),
    [
        ("debug train.max_stepz=3", "train.max_stepz"),
        ("debug retriever.path=/no/such", "retriever.path"),
        ("debug data.source=/no/such", "data.source"),
        ("eval_retrieval questions.paht=q", "did you mean questions.path"),
    ],
)
def test_a_configuration_that_a_run_refuses_is_wrong_and_named(replug: CommandLine, typed: str, named: str) -> None:
    ended = replug("doctor", *typed.split())
    assert ended.status == 1 and named in " ".join(ended.output.split())
    assert "ok       CUDA" in ended.output, "the machine is looked at nevertheless"


def layout(config) -> Check:
    return doctor.memory_and_layout(config)[-1]


def test_a_cluster_is_joined_and_says_how_a_run_would_be_laid_out_on_it(config, ray_address):
    check = layout(config(f"ray.address={ray_address}", "lm.num_replicas=2"))
    assert check.state is State.ok
    assert check.found.startswith(f"{ray_address}; index.num_shards 1, resources.index 1, lm.num_replicas 2")
    few = layout(config(f"ray.address={ray_address}", "lm.num_replicas=20"))
    assert few.state is State.warning and "scorers do not fit" in few.found
    none = layout(config(f"ray.address={ray_address}", "resources.index=20"))
    assert none.state is State.wrong and "the cluster has 8 CPUs on 1 nodes" in none.found
    assert not sys.modules["ray"].is_initialized()


def test_the_papers_corpus_needs_more_disk_and_memory_than_a_small_machine_has(config, monkeypatch, tmp_path):
    large = config("data.num_documents=36000000", "retriever.path=nobody/nothing")
    assert "index versions 207.6" in doctor.disk(large).found  # the plan's figure, in GiB
    usage = type("Usage", (), {"free": 10 * 2**30})
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: usage)
    monkeypatch.setattr("replug.models.hardware.available_memory", lambda: 10 * 2**30)
    assert doctor.disk(large).state is State.wrong
    assert doctor.memory_and_layout(large)[0].state is State.wrong
    assert doctor.disk(config()).state is State.ok


def test_a_run_without_its_index_is_told_apart_and_says_how_to_make_one(tmp_path: Path, replug: CommandLine) -> None:
    (tmp_path / "run/retriever").mkdir(parents=True)
    (tmp_path / "run/config.yaml").touch()
    ended = replug("search", tmp_path / "run", "a query")
    run = tmp_path / "run"
    again = f"replug prepare {run}/config.yaml --index retriever.path={run}/retriever run_dir={run}-index"
    assert (ended.status, ended.errors) == (
        2,
        f"replug: {run} is a run without its index; make one of its retriever: {again}\n",
    )


def test_a_cache_of_scores_is_sound_or_damaged(tmp_path: Path, replug: CommandLine) -> None:
    path = tmp_path / "scores.sqlite"
    cache = ScoreCache(path)
    keys = [number.to_bytes(16, "big") for number in range(1000)]
    cache.store("gpt:float32", dict.fromkeys(keys, ContinuationScore(-np.ones(128, np.float32))))
    cache.close()
    fine = replug("doctor", path)
    assert (fine.status, fine.output) == (0, f"{path}: intact, 1000 scores\n"), fine.errors
    whole = path.read_bytes()
    path.write_bytes(whole[: 5 * 4096] + bytes(len(whole) - 5 * 4096))
    wrong = replug("doctor", path)
    assert wrong.status == 1 and "damaged" in wrong.errors
    missing = replug("doctor", tmp_path / "no.sqlite")
    assert missing.status == 2 and "no.sqlite does not exist" in missing.errors
    assert not (tmp_path / "no.sqlite").exists()
