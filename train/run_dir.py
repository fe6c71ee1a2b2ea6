"""The run directory: what is in it, and how a run finds out what is already done.

config.yaml        the resolved configuration
environment.json   package versions, git commit, machine
data/              the prepared set (unless `data.prepared` names another)
index/             index versions
checkpoints/       step-000100.ckpt with its mark step-000100.json, which holds its checksum; the last one stays
dev_best/          of a training on labels the weights that did best on development texts, and dev_best.json
labels/            of train.labels=auto, what `replug prepare --labels` writes
first/             there with label.tuned, the run of the first training, whose queries find candidates
labels.json        which labels it trains on: a hash of their mark
best/              the weights whose documents helped most on held-out text during training, and best.json
metrics.jsonl      one object for every logged step
device_use.jsonl   seconds that each device was busy, by role; one object for some steps
scores.sqlite      the cache of LM scores
lm.json            which LM scores: a hash of its weights, or a server's model and probe
set.json           which prepared set: a hash of its manifest
lm_spent.json      requests and tokens that a server was sent
retriever/         the tuned encoder; a pair where queries and documents have their own (retriever.train)
evaluation/        the outcome of every held-out text, in lm/ and retrieval/; what `replug evaluate` adds (index/)
results.json       written when all is done; report.html beside it
"""

import json
import logging
import shutil
from dataclasses import dataclass
from pathlib import Path

from replug.config.errors import RunError, UserError
from replug.config.load import config_to_yaml, has_more_steps, load_stored_config, require_same
from replug.config.paths import require_folder
from replug.config.schema import Config
from replug.data.files import file_sha256, read_json, replace_file, write_json, writing
from replug.data.folder_lock import NAME as WRITER
from replug.data.manifest import NAME as CHECKSUMS
from replug.data.manifest import require_checksums, write_last
from replug.train.environment import describe_environment, provenance_lines

log = logging.getLogger(__name__)

CHECKPOINT_FORMAT = 3  # of what the callbacks put into a checkpoint
MEND = "bring it back, or run `replug train` in another run_dir"


@dataclass(frozen=True, slots=True)
class CheckpointMark:
    """A whole checkpoint: its file with its checksum, its step, and the index versions it needs."""

    path: Path
    step: int
    versions: tuple[int, ...]
    sha256: str


class RunDirectory:
    """Paths under one run directory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data = path / "data"
        self.set_mark = path / "set.json"
        self.index = path / "index"
        self.checkpoints = path / "checkpoints"
        self.metrics = path / "metrics.jsonl"
        self.device_use = path / "device_use.jsonl"
        self.scores = path / "scores.sqlite"
        self.budget_file = path / "lm_spent.json"
        self.evaluation = path / "evaluation"
        self.retriever = path / "retriever"
        self.best = path / "best"
        self.dev_best = path / "dev_best"
        self.dev_best_mark = path / "dev_best.json"
        self.labels = path / "labels"
        self.first = path / "first"
        self.labels_mark = path / "labels.json"
        self.found_before = path / "heldout_before.npz"
        self.found_after = path / "heldout_after.npz"
        self.fitted = path / "fitted.json"  # a training on labels has ended, at which step
        self.results = path / "results.json"
        self.examples = path / "examples.json"
        self.report = path / "report.html"

    @property
    def is_finished(self) -> bool:
        return self.results.is_file()

    def require_ours(self, config: Config) -> None:
        """Raise UserError where another run, or what is of no run, lies here. Nothing is written."""
        require_folder("run_dir", self.path)
        begun = self.begun_with()
        if begun is not None:
            require_same(begun, config, self.path, "finished run" if self.is_finished else "unfinished run")
        elif foreign := self._foreign_files():
            raise UserError(f"run_dir: {self.path} holds {foreign[0]}, which is of no run; give another run_dir")

    def goes_on(self, config: Config) -> bool:
        """Whether a finished run is asked for more steps."""
        begun = self.begun_with()
        return begun is not None and has_more_steps(begun, config)

    def begun_with(self) -> Config | None:
        """The configuration of the run that is here, finished or not."""
        stored = self.path / "config.yaml"
        return load_stored_config(stored) if stored.is_file() else None

    def claim(self, config: Config, lm_identity: str, prepared: Path) -> None:
        """Begin the run, or check that it was begun with the same configuration, LM and prepared set.

        One that was begun with fewer steps goes on to more of them, finished or not.
        """
        self.require_ours(config)
        begun = self.begun_with()
        if begun is not None:
            self.require_same_lm(lm_identity)
            self.require_same_set(prepared)
            if has_more_steps(begun, config):
                self._extend(begun.train.max_steps, config.train.max_steps)
        self.path.mkdir(parents=True, exist_ok=True)
        (self.path / CHECKSUMS).unlink(missing_ok=True)  # of what the run was when it was last finished
        replace_file(self.path / "config.yaml", config_to_yaml(config).encode())
        write_json(self.path / "environment.json", describe_environment())
        write_json(self.path / "lm.json", {"identity": lm_identity})
        write_json(self.set_mark, {"manifest_sha256": file_sha256(prepared / "manifest.json")})

    def _extend(self, before: int, after: int) -> None:
        """What followed from the last step is made again; the results go first, since they say that all is done."""
        newest = self.newest_checkpoint()
        if self.is_finished and newest is None:
            raise UserError(
                f"train.max_steps is {after}, but the finished run in {self.path} kept no checkpoint to go on from: "
                "give another run_dir"
            )
        log.warning(
            f"train.max_steps is {after} instead of {before}: from step {newest.step if newest else 0} on the learning "
            f"rate is that of a run of {after} steps, so the losses are not those of one that was begun so"
        )
        for path in (self.results, self.found_after, self.fitted, self.report, self.examples):
            path.unlink(missing_ok=True)
        shutil.rmtree(self.retriever, ignore_errors=True)

    def require_same_lm(self, identity: str) -> None:
        """Weights in a folder and models behind a URL can change while their names stay."""
        stored = self.path / "lm.json"
        begun = read_json(stored, MEND)["identity"] if stored.is_file() else identity
        if begun != identity:
            raise UserError(
                f"lm: the run in {self.path} was begun with another LM than what is there under this name now ({begun} "
                f"then, {identity} now): bring the first one back, or give another run_dir"
            )

    def require_same_set(self, prepared: Path) -> None:
        """The prepared set, which `data.prepared` names, may have been made anew with other texts."""
        now = file_sha256(prepared / "manifest.json")
        stored = self.set_mark
        begun = read_json(stored, MEND)["manifest_sha256"] if stored.is_file() else now
        if begun != now:
            raise UserError(
                f"data: the run in {self.path} was begun with another prepared set than {prepared} is now: bring the "
                "first one back, or give another run_dir"
            )

    def _foreign_files(self) -> list[str]:
        """What other commands of ours do not leave where a run is to begin."""
        ours = {
            self.data.name,
            self.labels.name,
            self.first.name,
            self.index.name,
            self.budget_file.name,
            self.evaluation.name,
            "environment.json",
            "config.yaml",
            WRITER,
        }
        ours |= {"submitted", "logs"}
        names = [path.name for path in self.path.iterdir()] if self.path.exists() else []
        return sorted(name for name in names if name not in ours and not name.startswith(self.scores.name))

    def finish(self, results: dict) -> None:
        """Write results.json, which says that the run is finished, and the checksums of what is shown of it."""
        names = ("config.yaml", "environment.json", "lm.json", "best.json", "fitted.json")
        named = [self.path / name for name in names]
        write_last(self.results, results, [*named, self.metrics, self.device_use, self.examples])

    def require_intact(self, *names: str) -> None:
        """Raise UserError where a finished run's results, or these files of it, are not what was written."""
        require_checksums(self.path, MEND, names or None)

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:06d}.ckpt"

    def mark(self, mark: CheckpointMark) -> None:
        """From now on the checkpoint counts."""
        kept = {"step": mark.step, "versions": list(mark.versions), "sha256": mark.sha256}
        write_json(mark.path.with_suffix(".json"), {"format": CHECKPOINT_FORMAT, **kept})

    def unmark(self, step: int) -> None:
        self.checkpoint(step).with_suffix(".json").unlink(missing_ok=True)

    def checkpoint_marks(self) -> list[CheckpointMark]:
        """Checkpoints, oldest first; one without its mark was interrupted and does not count."""
        marks = []
        for path in sorted(self.checkpoints.glob("step-*.json")):
            content = _read_mark(path)
            if content.get("format") != CHECKPOINT_FORMAT:
                raise UserError(
                    f"{path} is of another version of replug; end that run with it, or give another run_dir"
                )
            checkpoint = path.with_suffix(".ckpt")
            versions = tuple(content["versions"])
            marks.append(CheckpointMark(checkpoint, _step_of(checkpoint), versions, content["sha256"]))
        return marks

    def newest_checkpoint(self, with_index: bool = True) -> CheckpointMark | None:
        """The newest checkpoint that is what its mark says, `with_index` one whose index versions are there too.

        One that is not is passed over, and never looked at again. Raises RunError where there are checkpoints, but none
        will do: beginning anew would hide the loss.
        """
        marks = self.checkpoint_marks()
        for mark in reversed(marks):
            problem = self._problem(mark, with_index)
            if problem is None:
                return mark
            log.warning(f"{mark.path} {problem}; taking the one before it")
        if marks:
            raise RunError(
                f"no checkpoint in {self.checkpoints} is whole; bring one back, or remove that folder to train anew"
            )
        return None

    def _problem(self, mark: CheckpointMark, with_index: bool) -> str | None:
        from replug.index_workers.version_store import VersionStore  # brings torch, which `replug --help` does without

        if not mark.path.is_file() or file_sha256(mark.path) != mark.sha256:
            return "is torn (its checksum differs from its mark)"
        store = VersionStore(self.index)
        gone = [version for version in mark.versions if with_index and not store.can_be_built(version)]
        return f"needs index version {gone[0]}, which is gone from {self.index}" if gone else None

    def forget_after(self, step: int) -> None:
        """Remove the marks of later checkpoints, which are torn."""
        for mark in self.checkpoint_marks():
            if mark.step > step:
                self.unmark(mark.step)

    def best_weights(self) -> dict | None:
        """`heldout_bpb` and `step` of the weights in `best`; None where none were measured."""
        path = self.path / "best.json"
        return read_json(path, MEND) if path.is_file() and self.best.is_dir() else None

    def offer_best(self, encoder: Path, heldout_bpb: float | None, step: int) -> None:
        """Copy an encoder's folder to `best` if its bits per byte on held-out text are the lowest so far.

        best.json comes last, so an interrupted copy is made again.
        """
        best = self.best_weights()
        if heldout_bpb is None or (best is not None and best["heldout_bpb"] <= heldout_bpb):
            return
        partial = self.best.with_name("best.partial")
        shutil.rmtree(partial, ignore_errors=True)
        with writing(partial):
            shutil.copytree(encoder, partial)
            shutil.rmtree(self.best, ignore_errors=True)
            partial.replace(self.best)
        write_json(self.path / "best.json", {"heldout_bpb": heldout_bpb, "step": step})

    def truncate_metrics(self, step: int) -> None:
        """Drop what was logged at or after a step that is about to be done again, and a torn last line."""
        for path in (self.metrics, self.device_use):
            if path.exists():
                kept = [line for line in path.read_text().splitlines() if _logged_step(line, step) < step]
                replace_file(path, "".join(f"{line}\n" for line in kept).encode())

    def read_metrics(self) -> list[dict]:
        return _read_rows(self.metrics)

    def read_device_use(self) -> list[dict]:
        return _read_rows(self.device_use)

    def provenance(self) -> list[str]:
        """Lines that say how the run was made."""
        environment, lm = self.path / "environment.json", self.path / "lm.json"
        config = self.begun_with()
        if config is None:
            return []
        known = read_json(environment, MEND) if environment.is_file() else {}
        return provenance_lines(config, known, read_json(lm, MEND)["identity"] if lm.is_file() else None)

    def remove_work_files(self) -> None:
        """After the end: of the checkpoints the newest is kept, from which the run may go on to more steps."""
        for mark in self.checkpoint_marks()[:-1]:
            self.unmark(mark.step)
            mark.path.unlink(missing_ok=True)


def _read_mark(path: Path) -> dict:
    """A damaged mark is that of a torn checkpoint."""
    try:
        content = json.loads(path.read_text())
        if content.get("format") != CHECKPOINT_FORMAT or (
            content["step"] == _step_of(path) and _is_of_versions(content)
        ):
            return content
    except (ValueError, KeyError, AttributeError):
        pass
    return {"format": CHECKPOINT_FORMAT, "versions": [], "sha256": "of a damaged mark"}


def _is_of_versions(content: dict) -> bool:
    return all(isinstance(version, int) for version in content["versions"]) and isinstance(content["sha256"], str)


def _step_of(path: Path) -> int:
    return int(path.stem.removeprefix("step-"))


def _read_rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _logged_step(line: str, torn: int) -> int:
    try:
        return json.loads(line)["step"]
    except json.JSONDecodeError:  # kill -9 in the middle of a write
        return torn
