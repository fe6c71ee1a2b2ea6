"""What `replug slurm` writes and refuses, without a SLURM."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from replug.cluster.layout import lay_out
from replug.cluster.packing import Node
from replug.commands.slurm import freeze, job_state, render, run_slurm, template_options
from replug.config.errors import UserError
from replug.config.load import flatten, load_config
from replug.planning.memory import run_sizes
from replug.train.run_dir import RunDirectory

ROOT = Path(__file__).parent.parent.parent
SCRIPT = ROOT / "slurm/job.sbatch"
DEBUG = ROOT / "configs/debug.yaml"


@pytest.fixture
def prints(tmp_path, monkeypatch, capsys):
    """What `replug slurm` prints for the debug configuration in a fresh run directory, with enough CPUs."""

    def run(*overrides: str, job: str = "train", submit: bool = False, **options: str) -> str:
        monkeypatch.chdir(tmp_path)
        asked = {"cpus-per-task": "4", **{name.replace("_", "-"): value for name, value in options.items()}}
        run_slurm(DEBUG, [f"run_dir={tmp_path / 'run'}", *overrides], job, asked, submit)
        return capsys.readouterr().out

    return run


def test_the_script_is_valid_and_asks_to_be_warned_and_requeued():
    subprocess.run(["bash", "-n", SCRIPT], check=True)
    asked = template_options()
    assert asked["signal"] == "B:USR1@120"
    assert {"requeue", "nodes", "cpus-per-task", "time"} <= set(asked)
    assert asked["open-mode"] == "append"  # the log of the start before is kept
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", SCRIPT], check=True)


def test_options_replace_the_scripts_own_and_what_was_frozen_is_run(tmp_path):
    options = {"nodes": "3", "gpus-per-node": "4", "mem": "64G", "exclusive": "", "comment": "a b"}
    lines = render("prepare", options, tmp_path / "run", tmp_path / "a b", "/venv/bin/python").splitlines()
    asked = [line for line in lines if line.startswith("#SBATCH")]
    assert {"#SBATCH --nodes=3", "#SBATCH --gpus-per-node=4", "#SBATCH --mem=64G", "#SBATCH --exclusive"} <= set(asked)
    assert {'#SBATCH --comment="a b"', "#SBATCH --cpus-per-task=8"} <= set(asked)  # the latter is the template's
    assert f"#SBATCH --output={tmp_path}/run/%j.log" in asked
    assert lines[0].startswith("#!") and sum(line.startswith("#SBATCH --nodes=") for line in asked) == 1
    assert f"folder='{tmp_path}/a b'" in lines
    assert f"code={tmp_path}/run/code" in lines
    assert "python=/venv/bin/python" in lines
    assert f"arguments=(prepare {tmp_path}/run/config.yaml)" in lines


def test_without_submit_nothing_is_written(prints, tmp_path):
    printed = prints(nodes="2")
    assert "#SBATCH --nodes=2" in printed and "Nothing is written" in printed
    assert f"#SBATCH --output={tmp_path}/run/submitted/train/%j.log" in printed
    assert "all nodes must see it" in printed
    assert not (tmp_path / "run").exists()


def test_actors_that_no_node_has_room_for_are_refused_before_the_queue(prints):
    with pytest.raises(UserError, match="cpus-per-task"):
        prints("index.num_shards=9")
    with pytest.raises(UserError, match=r"resources\.index=2"):
        prints("resources.index=2", gpus_per_node="1")
    assert "lm.num_replicas 40" in prints("lm.num_replicas=40")  # further scorers join when there is room


PAPER = ROOT / "configs/paper.yaml"


def test_a_job_of_a_known_gpu_prints_the_layout_that_it_takes(capsys, tmp_path):
    asked = {"nodes": "1", "gpus-per-node": "a100:8", "cpus-per-task": "64"}
    run_slurm(PAPER, [f"run_dir={tmp_path}"], "train", asked, submit=False)
    printed, config = capsys.readouterr().out, load_config(PAPER)
    node = Node("n1", 64, 8, 80e9, is_driver=True)
    taken = lay_out(config, [node], run_sizes(config, config.data.num_documents, has_bfloat16=True))
    assert f"actors           {taken.describe()}; for GPUs of 80 GB" in printed
    run_slurm(PAPER, [f"run_dir={tmp_path}"], "train", {**asked, "gpus-per-node": "8"}, submit=False)
    assert "the job may be laid out otherwise: name a known type of GPU" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"train\.gradient_checkpointing"):
        run_slurm(PAPER, ["resources.train=1"], "train", {**asked, "gpus-per-node": "a10:8"}, submit=False)


def test_a_job_asks_for_the_memory_of_its_processes_unless_it_is_told(prints):
    def asked(printed: str) -> int:
        return int(printed.partition("#SBATCH --mem=")[2].partition("G")[0])

    one, more = asked(prints()), asked(prints("lm.num_replicas=3"))
    assert one >= 16 and more == one + 2 * 4  # a process in torch takes 4 GiB
    assert asked(prints("resources.index=2", cpus_per_task="8", nodes="2")) < more
    assert "--mem=" not in prints(mem_per_cpu="4G")
    assert asked(prints(mem="7G")) == 7


def test_an_unfinished_run_goes_on_with_its_own_configuration_only(prints, tmp_path):
    RunDirectory(tmp_path / "run").folder.claim(flatten(load_config(DEBUG)))
    with pytest.raises(UserError, match=r"loss.gamma is 0.5, but .* made with 0.02"):
        prints("loss.gamma=0.5")
    assert "replug train" in prints()


def test_a_finished_run_is_not_submitted_again(prints, tmp_path):
    folder = RunDirectory(tmp_path / "run").folder
    folder.claim({})
    folder.finish([])
    with pytest.raises(UserError, match="finished run"):
        prints()
    assert "replug evaluate" in prints(job="evaluate")


def fake_squeue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Squeue and sbatch of this test's own, first on PATH."""
    for name, text in (("squeue", script), ("sbatch", "echo 18")):
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")


def test_a_run_directory_whose_job_is_queued_takes_no_second_one(prints, tmp_path, monkeypatch):
    fake_squeue(tmp_path, monkeypatch, f"echo PENDING {tmp_path}/run/submitted/train/job.sbatch")
    assert "submitted as job 18" in prints(submit=True)
    with pytest.raises(UserError, match=r"train job 18 .* is PENDING.*scancel 18"):
        prints(submit=True)
    with pytest.raises(UserError, match="--sbatch=--dependency=afterok:18"):
        prints(submit=True, job="evaluate")
    assert "submitted" in prints(submit=True, job="evaluate", dependency="afterok:18")


def test_a_job_that_slurm_has_forgotten_is_over(tmp_path, monkeypatch):
    script = tmp_path / "job.sbatch"
    fake_squeue(tmp_path, monkeypatch, f"echo RUNNING {script}")
    assert job_state("18", script) == "RUNNING"
    fake_squeue(tmp_path, monkeypatch, "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    assert job_state("18", script) is None
    fake_squeue(tmp_path, monkeypatch, f"echo COMPLETED {script}")
    assert job_state("18", script) is None
    fake_squeue(tmp_path, monkeypatch, "echo RUNNING /of/another/job.sbatch")  # which has its number now
    assert job_state("18", script) is None


def test_what_is_frozen_is_whole_and_says_its_version(tmp_path):
    config = load_config(DEBUG, ["lm.separator=|"])
    freeze(config, tmp_path, "#!/bin/sh\n")
    assert load_config(tmp_path / "config.yaml") == config
    assert [path.name for path in (tmp_path / "code").iterdir()] == ["replug"]
    rooms = {path.name for path in (tmp_path / "code/replug").iterdir()}
    assert rooms >= {"train", "slurm", "configs", "data", "models"}
    assert not list((tmp_path / "code").rglob("__pycache__"))
    assert json.loads((tmp_path / "version.json").read_text())["packages"]
    freeze(config, tmp_path, "#!/bin/sh\n")  # again, over what is there
