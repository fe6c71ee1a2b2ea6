"""A sweep in this process: trials that train nothing, and real ones on real labels, which never read held-out texts."""

import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from replug.config.errors import NotFiniteError, RunError, UserError
from replug.config.load import load_config
from replug.config.schema import Config
from replug.config.sweep_space import read_space
from replug.data.labels import DEV_SCHEMA, SCHEMA, LabelOrigin, finish_labels, write_labels
from replug.data.prepare.local_pool import LocalPool
from replug.data.store import PreparedSet
from replug.train import data_checks
from replug.train.labels.dev import DevLook
from replug.train.run_dir import RunDirectory
from replug.train.sweep import trials
from replug.train.sweep.baselines import baselines_of
from replug.train.sweep.run import Sweep, sweep
from replug.train.sweep.trials import TrialSettings, override
from tests.support.command_line import BASE, ROOT, CommandLine

SWEPT = ["loss.gamma=[0.03,0.1,0.3]"]
ORIGIN = LabelOrigin("lm", "\n", "error", "retriever", "set", "corpus", 4, 0, 0, False, 0)


@pytest.fixture
def labels(tmp_path: Path) -> Path:
    """Of one training text and two development texts, whose second candidate is the best and the most similar."""
    folder = tmp_path / "labels"
    folder.mkdir()
    row = dict.fromkeys(("id", "domain", "source", "context"), "x") | {
        "continuation": " ab",
        "num_tokens": 2,
        "sum_logprob_alone": -4.0,
        "doc_ids": list("abcd"),
        "doc_rows": [0, 1, 2, 3],
        "given_by": ["dense"] * 4,
        "ranks": [1, 2, 3, 4],
        "similarities": [0.2, 0.4, 0.1, 0.3],
        "sum_logprobs": [-3.0, -2.0, -6.0, -5.0],
    }
    tokens = {
        "token_logprobs": [[-1.5, -1.5], [-1.0, -1.0], [-3.0, -3.0], [-2.5, -2.5]],
        "token_logprobs_alone": [-2.0, -2.0],
    }
    write_labels(folder / "queries.parquet", [row], SCHEMA)
    write_labels(folder / "dev.parquet", [row | tokens, row | tokens], DEV_SCHEMA)
    finish_labels(folder, ORIGIN, {"queries": 1, "dev": 2})
    return folder


Run = Callable[..., dict]


@pytest.fixture
def run(tmp_path: Path, labels: Path) -> Run:
    """A sweep over gamma, one trial at a time, in `out`."""

    def pool_of(config: Config) -> AbstractContextManager[LocalPool]:
        return nullcontext(LocalPool(1))

    def run(*overrides: str, samples: int | None = None, seed: int = 0) -> dict:
        space, fixed = read_space([*(overrides or SWEPT), f"train.labels={labels}"])
        settings = TrialSettings(ROOT / "configs/debug.yaml", tuple(fixed), tmp_path / "out", 1)
        return sweep(Sweep(space, samples, seed), settings, pool_of)

    return run


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """The configurations of all trials; a trial is the better the nearer its gamma is to 0.1, and fails at 0.3."""
    configs: list[Config] = []

    def train(config: Config) -> None:
        configs.append(config)
        if config.loss.gamma == 0.3:
            raise NotFiniteError("the loss is not finite")
        folder = RunDirectory(Path(config.run_dir))
        folder.path.mkdir(parents=True)
        best = asdict(DevLook(20, 0.6 + abs(config.loss.gamma - 0.1), 0.5, 0.02, 0.9))
        folder.fitted.write_text(json.dumps({"step": 40, "first": best, "best": best}))
        folder.times.write_text(json.dumps({"training": 1.5, "start_up": 0.5}))

    monkeypatch.setattr(trials, "train", train)
    return configs


def test_the_best_by_development_texts_comes_first_and_failures_are_said(
    run: Run, trained: list, tmp_path: Path
) -> None:
    results = run()
    assert {number: result.dev_bpb for number, result in results.items()} == {
        0: pytest.approx(0.67),
        1: 0.6,
        2: None,
    }
    table = (tmp_path / "out/table.md").read_text().splitlines()
    assert table[0].startswith("2 of 3 trials")
    assert [line.split("|")[1].strip() for line in table[4:7]] == ["trial-0001", "trial-0000", "trial-0002"]
    assert "the loss is not finite" in table[6]
    assert (tmp_path / "out/figure.svg").read_text().startswith("<svg")
    best = load_config(tmp_path / "out/best.yaml")
    assert best.loss.gamma == 0.1 and best.evaluate.heldout, "it is to be measured on held-out texts once"


def test_no_trial_measures_held_out_texts_whatever_is_asked(run: Run, trained: list) -> None:
    run(*SWEPT, "evaluate.heldout=true")
    assert [config.evaluate.heldout for config in trained] == [False] * 3
    assert {config.wandb.group for config in trained} == {"out"}
    assert len({config.run_dir for config in trained}) == 3


def test_what_has_ended_is_passed_over(run: Run, trained: list, monkeypatch: pytest.MonkeyPatch) -> None:
    stub, calls = trials.train, []

    def interrupted(config: Config) -> None:
        calls.append(config)
        if len(calls) == 2:
            raise KeyboardInterrupt
        stub(config)

    monkeypatch.setattr(trials, "train", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run()
    results = run()
    assert [config.loss.gamma for config in calls] == [0.03, 0.1, 0.1, 0.3]
    assert list(results) == [0, 1, 2]
    run()
    assert len(calls) == 4, "nothing is left to do"


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["loss.gamma=[0.03,0.1]"], "of another space"),
        ([*SWEPT, "train.lr=0.1"], "of another fixed"),
    ],
)
def test_another_sweep_in_the_same_folder_is_refused(run: Run, trained: list, overrides: list, says: str) -> None:
    run()
    with pytest.raises(UserError, match=says):
        run(*overrides)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ([*SWEPT, "train.dev_measure=kl"], "changes with the loss"),
        (["loss.gamma=[0.1,-1]"], "loss.gamma is -1"),
        (["loss.gama=[0.1,1]"], "unknown key; did you mean loss.gamma"),
        (["loss.gamma=log(0.01,1)"], "--samples N"),
    ],
)
def test_a_mistake_in_any_trial_is_told_before_the_first_begins(
    run: Run, trained: list, overrides: list, says: str
) -> None:
    with pytest.raises(UserError, match=says):
        run(*overrides)
    assert not trained


def test_a_sweep_of_failures_alone_says_so(run: Run, trained: list) -> None:
    with pytest.raises(RunError, match="none of 2 trials ended well"):
        run("seed=[1,2]", "loss.gamma=0.3")


def test_samples_are_drawn_between_the_ends(run: Run, trained: list) -> None:
    run("loss.gamma=uniform(0.05,0.15)", "train.lr=log(1e-5,1e-3)", samples=4, seed=3)
    assert len({config.loss.gamma for config in trained}) == 4
    assert all(0.05 <= config.loss.gamma <= 0.15 and 1e-5 <= config.train.lr <= 1e-3 for config in trained)


def test_baselines_are_those_of_the_labels(labels: Path) -> None:
    from replug.data.labels import Labels

    known = baselines_of(Labels(labels), k=2, beta=0.1)
    bits = 1 / np.log(2) / 3  # of a nat, by bytes
    assert known.alone == pytest.approx(4 * bits)
    assert known.start.best_document == pytest.approx(2 * bits)  # of the two most similar, 1 and 3
    assert known.start.best_document <= known.start.ensemble < 3 * bits
    assert known.start.q_weighted == pytest.approx(2 * bits, abs=1e-3)


@pytest.mark.parametrize(("value", "text"), [(True, "k=true"), (1e-05, "k=1e-05"), ("query", "k=query"), (3, "k=3")])
def test_settings_are_typed_as_a_user_would(value: object, text: str) -> None:
    assert override("k", value) == text


class Unread:
    """Held-out texts that may be counted and compared, and not read."""

    def __init__(self, store: object) -> None:
        self._store = store

    def __len__(self) -> int:
        return len(self._store)

    def __getattr__(self, name: str) -> object:
        assert name != "windows", "held-out texts were read"
        return getattr(self._store, name)


@pytest.mark.slow
def test_real_trials_run_two_at_a_time_on_ray_and_read_no_held_out_text(
    replug: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [*BASE, f"run_dir={tmp_path / 'run'}", "data.num_dev=12", f"data.out={tmp_path / 'set'}"]
    config = str(ROOT / "configs/debug.yaml")
    labels, out = tmp_path / "labels", tmp_path / "out"
    assert replug("label", config, "--out", labels, *made, "label.dense=6").status == 0
    shared = [*made, f"train.labels={labels}", "train.max_steps=6", "train.dev_every_steps=3", *SWEPT]
    ended = replug("sweep", config, "--out", out, "--at-once", 2, *shared)
    assert ended.status == 0, ended.printed
    assert "3 of 3 trials" in ended.output and "replug train" in ended.output
    table = (out / "table.md").read_text()

    whole = PreparedSet.__init__

    def without_heldout(self: PreparedSet, folder: Path) -> None:
        whole(self, folder)
        self.heldout = Unread(self.heldout)  # type: ignore[assignment]

    monkeypatch.setattr(PreparedSet, "__init__", without_heldout)
    monkeypatch.setattr(data_checks, "require_windows_apart", lambda *texts: None)  # a proof, which reads them
    space, fixed = read_space(shared)
    settings = TrialSettings(Path(config), tuple(fixed), tmp_path / "again", 1)
    results = sweep(Sweep(space, None, 0), settings, lambda config: nullcontext(LocalPool(1)))
    bits = {result.dev_bpb for result in results.values()}
    assert all(f"{value:.4f}" in table for value in bits), "here as on Ray"
