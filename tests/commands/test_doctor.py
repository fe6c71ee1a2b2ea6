"""What `replug doctor` finds of a machine and for a configuration, and that no check hangs or starts anything."""

import json
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub import constants

from replug.commands import doctor
from replug.commands import doctor_configuration as doctor_config
from replug.commands.doctor import Check, State, run_checks, run_doctor
from replug.commands.doctor_folder import verify_scores
from replug.config.load import load_config
from replug.models.black_box_lm import ContinuationScore, sum_of
from replug.models.score_cache import ScoreCache
from tests.support.command_line import CommandLine

ROOT = Path(__file__).parent.parent.parent
DEBUG = ROOT / "configs/debug.yaml"


@pytest.fixture
def config(tmp_path):
    def load(*overrides: str):
        return load_config(DEBUG, [f"run_dir={tmp_path / 'run'}", *overrides])

    return load


def states(path: Path | None, *overrides: str, capsys) -> tuple[int, dict[str, dict]]:
    capsys.readouterr()
    status = run_doctor(path, overrides, as_json=True)
    return status, {check["name"]: check for check in json.loads(capsys.readouterr().out)}


def test_the_debug_configuration_is_well_here(tmp_path, capsys):
    status, found = states(DEBUG, f"run_dir={tmp_path / 'run'}", capsys=capsys)
    assert status == 0, found
    assert {"CUDA", "configuration", "retriever", "LM", "run_dir", "disk", "layout"} <= set(found)
    assert not (tmp_path / "run").exists()


def test_a_configuration_that_does_not_load_is_wrong_and_named(capsys):
    status, found = states(DEBUG, "train.max_stepz=3", capsys=capsys)
    assert status == 1
    assert "train.max_stepz" in found["configuration"]["found"]
    assert found["CUDA"]["state"] == "ok"  # the machine is looked at nevertheless


def test_the_command_starts_no_ray_and_is_quick():
    code = "from replug.commands.doctor import run_doctor; import sys; run_doctor(None, [], True); import ray; " + (
        "sys.exit(3 if ray.is_initialized() else 0)"
    )
    begun = time.monotonic()
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, timeout=200).returncode == 0
    assert time.monotonic() - begun < 100


def test_a_check_that_hangs_is_left_after_its_time():
    well = Check("well", State.ok, "yes")
    found = run_checks([("stuck", lambda: time.sleep(20)), ("well", lambda: well)], limit_seconds=0.2)
    assert found[0].state is State.warning and "no answer" in found[0].found
    assert found[1] is well


def test_a_token_that_others_can_read_is_wrong(monkeypatch, tmp_path):
    token = tmp_path / "token"
    token.write_text("very secret")
    token.chmod(0o644)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
    check = doctor.ray_token()
    assert check.state is State.wrong and check.fix == f"chmod 600 {token}" and "secret" not in check.found
    token.chmod(0o600)
    assert doctor.ray_token().state is State.ok
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "gone"))
    assert doctor.ray_token().state is State.wrong


def test_a_cluster_is_joined_and_says_how_a_run_would_be_laid_out_on_it(config, ray_address):
    check = doctor_config.layout(config(f"ray.address={ray_address}", "lm.num_replicas=2"))
    assert check.state is State.ok
    assert check.found.startswith(f"{ray_address}; index.num_shards 1, resources.index 1, lm.num_replicas 2")
    few = doctor_config.layout(config(f"ray.address={ray_address}", "lm.num_replicas=20"))
    assert few.state is State.warning and "scorers find no room" in few.found
    none = doctor_config.layout(config(f"ray.address={ray_address}", "resources.index=20"))
    assert none.state is State.wrong and "the cluster has 8 CPUs on 1 nodes" in none.found
    assert not sys.modules["ray"].is_initialized()


def test_models_are_found_by_folder_package_and_name(config, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    folder = tmp_path / "encoder"
    folder.mkdir()
    assert doctor_config.retriever(config(f"retriever.path={folder}")).state is State.wrong  # no config.json
    (folder / "config.json").write_text('{"hidden_size": 32}')
    (folder / "model.safetensors").write_bytes(bytes(400))
    found = config(f"retriever.path={folder}")
    assert doctor_config.retriever(found).state is State.ok
    assert doctor_config.retriever(config("retriever.path=/no/such")).state is State.wrong
    offline = doctor_config.retriever(config("retriever.path=nobody/nothing"))
    assert offline.state is State.wrong and "hf download nobody/nothing" in offline.fix
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert doctor_config.retriever(config("retriever.path=nobody/nothing")).state is State.warning


def test_the_papers_corpus_needs_more_disk_and_memory_than_a_small_machine_has(config, monkeypatch, tmp_path):
    large = config("data.num_documents=36000000", "retriever.path=nobody/nothing")
    assert "index versions 207.6" in doctor_config.disk(large).found  # the plan's figure, in GiB
    usage = type("Usage", (), {"free": 10 * 2**30})
    monkeypatch.setattr(doctor_config.shutil, "disk_usage", lambda path: usage)
    monkeypatch.setattr(doctor_config, "available_memory", lambda: 10 * 2**30)
    assert doctor_config.disk(large).state is State.wrong
    assert doctor_config.memory(large).state is State.wrong
    assert doctor_config.disk(config()).state is State.ok


@pytest.fixture
def one_gpu(monkeypatch):
    """Of 24 GB."""
    properties = type("Properties", (), {"total_memory": 24e9, "uuid": "a"})
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda number: properties)
    monkeypatch.setattr(
        "torch.cuda.is_bf16_supported", lambda *given, **more: True
    )  # a build for CUDA would ask the driver


@pytest.mark.usefixtures("one_gpu")
def test_gpus_whose_memory_does_not_hold_the_run_are_wrong_with_the_gigabytes(config):
    found = doctor_config.layout(config())
    assert found.state is State.ok and "of 20.6 GiB" in found.found
    large = config("lm.path=gpt2-xl", "retriever.path=facebook/contriever", "train.batch_size=64", "retrieve.k=20")
    large.data.context_tokens = 128
    found = doctor_config.layout(large)
    assert found.state is State.wrong
    assert "22.1 GB" in found.found and "train.gradient_checkpointing=true" in found.found


def test_an_evaluations_configuration_is_one_too(replug: CommandLine) -> None:
    ended = replug("doctor", "eval_retrieval", "questions.path=q", "data.corpus=c", "retriever.path=stand_in", "out=o")
    assert ended.status == 0 and "keys, types and rules are valid" in ended.output
    ended = replug("doctor", "eval_retrieval", "questions.paht=q")
    assert ended.status == 1 and "did you mean questions.path" in " ".join(ended.output.split())


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


# A cache of scores ----------------------------------------------------------------------------------------------------


DAY = 86_400


def fill(path: Path, identity: str, first: int, num_rows: int, with_tokens: bool = False, age_days: float = 0) -> None:
    """Rows with keys of their own."""
    cache = ScoreCache(path)
    score = ContinuationScore(-np.random.default_rng(0).random(128, dtype=np.float32))
    keys = [number.to_bytes(16, "big") for number in range(first, first + num_rows)]
    cache.store(identity, dict.fromkeys(keys, score if with_tokens else sum_of(score)))
    cache.close()
    change(path, f"UPDATE cached SET created = created - {age_days * DAY} WHERE key >= ?", first)


def change(path: Path, statement: str, number: int) -> None:
    with sqlite3.connect(path) as database:
        database.execute(statement, (number.to_bytes(16, "big"),))
    database.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Two LMs: 600 sums of today, and 400 rows with tokens that are three days old."""
    path = tmp_path / "scores.sqlite"
    fill(path, "llama#[bold]", 0, 600)
    fill(path, "gpt:float32", 600, 400, with_tokens=True, age_days=3)
    return path


def shown(path: Path, capsys: pytest.CaptureFixture) -> dict:
    verify_scores(path, as_json=True)
    return json.loads(capsys.readouterr().out)


# Showing ------------------------------------------------------------------------------------------------


def test_json_says_all_that_is_known(path: Path, capsys: pytest.CaptureFixture) -> None:
    answer = shown(path, capsys)
    assert (answer["file"], answer["rows"], answer["rows_with_tokens"]) == (str(path), 1000, 400)
    assert answer["bytes"] >= path.stat().st_size > 400 * 128 * 4
    llama, gpt = answer["models"]
    assert (llama["identity"], llama["rows"], llama["rows_with_tokens"]) == ("llama#[bold]", 600, 0)
    assert abs(llama["oldest"] - time.time()) < 60
    assert abs(gpt["newest"] - (time.time() - 3 * DAY)) < 60


# Checking -----------------------------------------------------------------------------------------------


# The command line ---------------------------------------------------------------------------------------


def test_the_command_ends_with_0_1_and_2(path: Path, replug: CommandLine) -> None:
    fine = replug("doctor", path, "--json")
    assert (fine.status, json.loads(fine.output)["rows"]) == (0, 1000), fine.errors
    whole = path.read_bytes()
    path.write_bytes(whole[: 5 * 4096] + bytes(len(whole) - 5 * 4096))
    wrong = replug("doctor", path)
    assert (wrong.status, wrong.output, wrong.errors.count("\n")) == (1, "", 1)
    missing = replug("doctor", path.parent / "no.sqlite")
    assert (missing.status, missing.output, missing.errors.count("\n")) == (2, "", 1)
    assert "no.sqlite does not exist; expected a YAML file, an index" in missing.errors
    assert not (path.parent / "no.sqlite").exists()
