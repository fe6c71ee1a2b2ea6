"""`replug plan` as a user sees it."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from replug.commands.plan import PlanOutput, PlanRequest, plan, run_plan
from replug.config.errors import UserError
from replug.planning.plans import Assumptions

ROOT = Path(__file__).parents[2]
PAPER = ROOT / "configs/paper.yaml"
SMALL = ["train.max_steps=400", "refresh.every_steps=100", "refresh.lag_steps=30", "data.num_documents=1000000"]
ROLES = {"score", "embed", "train", "search"}
NAMES = {
    *("devices", "nodes", "lm", "retriever", "documents", "tokens", "flop", "hours", "query_encoding_hours"),
    *("wall_hours", "wall", "steps_per_minute", "dominates", "split", "gpus_per_replica", "search_on"),
    *("gradient_checkpointing", "memory_gb", "memory_limit_gb", "gpus", "idle", "waits", "index_lag", "disk_gb"),
    *("network_gb", "settings", "notes", "price", "dollars"),
}
EVALUATION = ROOT / "configs/eval_lm.yaml"
ASKED = ["retriever.path=facebook/contriever", "lm.path=gpt2-xl"]
EVALUATION_NAMES = {
    *("devices", "evaluation", "examples", "documents", "lms", "retrievers", "tokens", "hours", "gpu_hours"),
    *("wall_hours", "price", "dollars", "notes"),
}


def run(config: Path, gpus: Sequence[str] = (), **options: Any) -> None:
    """`options` are fields of the request or of the output."""
    output = PlanOutput(**{name: options.pop(name) for name in ("as_json", "as_markdown", "chart") if name in options})
    run_plan(PlanRequest(config, gpus, **options), output)


def read_json(capsys: pytest.CaptureFixture[str]) -> dict:
    found: dict = json.loads(capsys.readouterr().out)
    return found


def test_json_is_one_object_whose_names_stay(capsys: pytest.CaptureFixture[str]) -> None:
    run(PAPER, ["8xA100"], as_json=True, overrides=SMALL)
    plan = read_json(capsys)
    assert set(plan) == NAMES
    assert set(plan["hours"]) == set(plan["tokens"]) == set(plan["flop"]) == set(plan["idle"]) == ROLES
    assert set(plan["memory_gb"]) == ROLES | {"train_checkpointed"}
    assert set(plan["split"]) == {"score", "embed", "train"}
    assert set(plan["waits"]) == {"scores", "index"}
    assert plan["dominates"] in ROLES
    assert plan["wall_hours"] == pytest.approx(sum(plan["wall"].values()))


def test_the_same_command_prints_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    outputs = []
    for _ in range(2):
        run(PAPER, ["4xH100"], as_json=True, overrides=SMALL)
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1]


def test_what_if_compares_with_the_plan_as_given(capsys: pytest.CaptureFixture[str]) -> None:
    run(PAPER, ["8xA100"], as_json=True, overrides=SMALL, what_if=["lm.path=gpt2", "retrieve.k=10 loss.beta=0.2"])
    plans = read_json(capsys)["plans"]
    assert [plan["what_if"] for plan in plans] == ["as given", "lm.path=gpt2", "retrieve.k=10 loss.beta=0.2"]
    assert plans[1]["hours"]["score"] < plans[0]["hours"]["score"] / 10
    assert plans[2]["flop"]["score"] == plans[0]["flop"]["score"] / 2


def test_several_devices_make_a_markdown_table_of_a_row_each(capsys: pytest.CaptureFixture[str]) -> None:
    run(PAPER, ["8xA100", "64xH100"], as_markdown=True, overrides=SMALL)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("|")[1].strip() for line in lines] == ["run", "---", "8xA100", "64xH100"]
    assert len({line.count("|") for line in lines}) == 1


def test_the_table_names_the_roles_and_what_dominates(capsys: pytest.CaptureFixture[str]) -> None:
    run(PAPER, ["8xA100"], overrides=SMALL)
    output = capsys.readouterr().out
    assert "LM scoring" in output
    assert "dominated by" in output
    assert "resources.score=" in output
    assert "7 GPUs on node 1: searcher + builder + scorer, 5.9 of 73.6 GB each" in output


def test_sixty_four_gpus_lie_over_the_nodes_given(capsys: pytest.CaptureFixture[str]) -> None:
    run(PAPER, ["64xA100"], nodes=4, as_json=True, overrides=SMALL)
    plan = read_json(capsys)
    assert plan["nodes"] == 4
    assert max(plan["split"].values()) == 64 == sum(gpus["count"] for gpus in plan["gpus"])


def test_gpus_of_many_nodes_exchange_gradients_more_slowly(capsys: pytest.CaptureFixture[str]) -> None:
    walls = []
    for nodes in (1, 8):
        run(PAPER, ["8xA100"], nodes=nodes, as_json=True, overrides=SMALL, assumptions=Assumptions(split="2/2/4"))
        walls.append(read_json(capsys)["hours"]["train"])
    assert walls[1] > walls[0]


def test_a_plan_for_processors_keeps_the_layout_of_the_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    debug = ROOT / "configs/debug.yaml"
    run(debug, ["2xcpu"], as_json=True, overrides=["data.num_documents=600", "lm.num_replicas=2"])
    plan = read_json(capsys)
    assert plan["split"] == {"score": 2, "embed": 1, "train": 1}
    assert any("share the cores" in note for note in plan["notes"])
    assert plan["settings"] == []


def test_the_chart_is_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(PAPER, ["8xA100"], chart=tmp_path / "plan.png", overrides=SMALL)
    assert (tmp_path / "plan.png").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(UserError, match="--chart: the folder"):
        run(PAPER, ["8xA100"], chart=tmp_path / "none" / "plan.png", overrides=SMALL)


def test_without_devices_the_error_names_the_flags() -> None:
    with pytest.raises(UserError, match=r"--gpus is missing; .*--measured"):
        run(PAPER)


def test_an_efficiency_above_the_peak_is_an_error() -> None:
    with pytest.raises(UserError, match=r"--efficiency is 1\.5"):
        run(PAPER, ["8xA100"], assumptions=Assumptions(efficiency=1.5))


def test_an_unknown_lm_is_planned_by_its_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="--lm-parameters"):
        run(PAPER, ["8xA100"], overrides=[*SMALL, "lm.path=acme/lm"])
    overrides = [*SMALL, "lm.path=acme/lm"]
    run(PAPER, ["8xA100"], as_json=True, overrides=overrides, assumptions=Assumptions(lm_parameters=7e9))
    assert read_json(capsys)["lm"] == {"name": "acme/lm", "parameters": 7_000_000_000}


def test_the_papers_run_is_planned_without_torch_ray_or_faiss() -> None:
    code = (
        "import sys; from pathlib import Path; from replug.commands.plan import PlanOutput, PlanRequest, run_plan; "
        f"run_plan(PlanRequest(Path({str(PAPER)!r}), ['8xA100'], {SMALL!r}), PlanOutput(as_json=True)); "
        "found = {'torch', 'ray', 'faiss', 'transformers', 'matplotlib'} & set(sys.modules); assert not found, found"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=100, capture_output=True)


def test_dollars_are_of_all_devices_until_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    run(PAPER, ["8xA100"], as_json=True, overrides=SMALL, price=2.0)
    plan = read_json(capsys)
    assert plan["dollars"] == pytest.approx(plan["wall_hours"] * 8 * 2)
    run(PAPER, ["8xA100", "4xA100"], as_markdown=True, overrides=SMALL, price=2.0)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("| dollars |")
    assert len({line.count("|") for line in lines}) == 1


def test_an_evaluation_is_one_object_whose_names_stay(capsys: pytest.CaptureFixture[str]) -> None:
    run(EVALUATION, ["1xA100"], as_json=True, overrides=ASKED, price=2.0)
    plan = read_json(capsys)
    assert set(plan) == EVALUATION_NAMES
    assert set(plan["hours"]) == set(plan["tokens"]) == {"score", "embed"}


def test_an_evaluation_says_its_tokens_hours_and_dollars(capsys: pytest.CaptureFixture[str]) -> None:
    run(EVALUATION, ["1xA100"], overrides=ASKED, examples=1_000_000, price=2.0)
    output = " ".join(capsys.readouterr().out.split())
    assert "1,000,000 examples, 3,200 documents:" in output
    assert "GPU hours" in output
    assert "dollars" in output
    assert "note: texts are taken for 40 + 40 tokens" in output


def test_evaluations_are_compared_by_devices_and_overrides(capsys: pytest.CaptureFixture[str]) -> None:
    run(EVALUATION, ["1xA100"], as_markdown=True, overrides=ASKED, what_if=["lm.path=gpt2"], price=2.0)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("|")[1].strip() for line in lines] == ["run", "---", "as given", "lm.path=gpt2"]
    run(EVALUATION, ["1xA100", "1xH100"], overrides=ASKED)
    assert "1xH100" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nodes": 2}, "--nodes is for plans of training"),
        ({"measured": Path("runs/x")}, "--measured is for plans of training"),
        ({"split": "1/0/0"}, "--split is for plans of training"),
        ({"rehearse": True}, "--rehearse is for plans of training"),
        ({"disk": 100.0}, "--disk is for plans of training"),
        ({"chart": Path("plan.png")}, "--chart draws a training run"),
    ],
)
def test_options_that_an_evaluation_has_not_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        plan(EVALUATION, ASKED, gpus=["1xA100"], **options)


def test_examples_belong_to_an_evaluation() -> None:
    with pytest.raises(UserError, match=r"--examples is given, but the configuration is one of training"):
        plan(PAPER, SMALL, gpus=["8xA100"], examples=9)


def test_an_evaluation_is_planned_without_torch_ray_or_faiss() -> None:
    code = (
        "import sys; from pathlib import Path; from replug.commands.plan import PlanOutput, PlanRequest, run_plan; "
        f"run_plan(PlanRequest(Path({str(EVALUATION)!r}), ['8xA100'], {ASKED!r}), PlanOutput(as_json=True)); "
        "found = {'torch', 'ray', 'faiss', 'transformers', 'matplotlib'} & set(sys.modules); assert not found, found"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=100, capture_output=True)
