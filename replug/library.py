"""The commands as Python: `LSRTrainer`, `label`, `evaluate` and `search`; the command line calls them too.

Objects become files before anything starts: rows and an encoder are written under RUN_DIR/given with checksums, and
are then read like a user's files. So resuming a run with other objects is refused, and the same rows and seed give the
same losses as the command line.
"""

import json
import math
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from replug.config.errors import UserError
from replug.config.evaluation_schema import EvaluationConfig
from replug.config.load import load_config, load_stored_config, load_stored_lm, names_evaluation
from replug.config.paths import RUN_CONFIG, check_names, check_paths, find_config
from replug.config.schema import Config

if TYPE_CHECKING:
    from datasets import Dataset
    from pandas import DataFrame
    from pytorch_lightning.loggers import Logger
    from sentence_transformers import SentenceTransformer

    from replug.models.black_box_lm import BlackBoxLM
    from replug.models.ensemble import Retrieved

    Rows: TypeAlias = str | Path | Iterable[str | Mapping[str, Any]] | Dataset | DataFrame
    Overrides: TypeAlias = Mapping[str, Any] | Sequence[str]

GIVEN = "given"  # the folder of objects in a run directory
RETRIEVER = "retriever"


class Results(dict[str, Any]):
    """Results of a run or an evaluation: results.json as a mapping, its table and its report.

    `table` is Markdown, which notebooks show. `report` is the page of a run, or None. `improved` is whether the
    verdict of a run is HELPED (`train.report`); None without a verdict.

    >>> Results({"verdict": {"verdict": "HELPED"}}, "").improved
    True
    """

    def __init__(self, content: Mapping[str, Any], table: str, report: Path | None = None) -> None:
        super().__init__(content)
        self.table, self.report = table, report

    @property
    def improved(self) -> bool | None:
        verdict = self.get("verdict")
        return verdict and verdict["verdict"] == "HELPED"

    def _repr_markdown_(self) -> str:
        return self.table


class LSRTrainer:
    """Tunes a retriever to a frozen LM (REPLUG LSR), as `replug train` does; resumes an unfinished run in `run_dir`.

    `retriever` is a hub name, a folder or a `SentenceTransformer`. `lm` is a hub name, a folder, a `ServerLM` or a
    `BlackBoxLM`; each scorer process gets a copy. `corpus` (id, text, optional title, domain, source),
    `train`, `dev` and `heldout` (context, continuation, optional query, id, domain, source, gold; or question, answers)
    are a file of rows (docs/formats.md), or rows: dicts, a `datasets.Dataset` or a `pandas.DataFrame`; documents may be
    plain texts.
    `source` is a folder, a file or raw texts; all four are cut from it, disjoint by source.

    `config` is the name of a shipped configuration, a YAML file or a `Config`; `overrides` are its keys. Lightning's
    `loggers` run on rank 0. Raises UserError for missing or invalid arguments and keys.

    >>> rows = [{"context": f"the cat {n}", "continuation": f" sat on mat {n}"} for n in range(20)]
    >>> trainer = LSRTrainer(
    ...     "stand_in", "stand_in", corpus=["cats sit on mats", "dogs lie in baskets"], train=rows[:16],
    ...     heldout=rows[16:], config="own_data_online", run_dir="runs/cats", overrides={"train.max_steps": 4},
    ... )
    >>> trainer.config.train.max_steps
    4
    """

    def __init__(
        self,
        retriever: "str | Path | SentenceTransformer | None" = None,
        lm: "str | Path | BlackBoxLM | None" = None,
        *,
        corpus: "Rows | None" = None,
        train: "Rows | None" = None,
        dev: "Rows | None" = None,
        heldout: "Rows | None" = None,
        source: "Rows | None" = None,
        config: str | Path | Config = "own_data",
        run_dir: str | Path | None = None,
        overrides: "Overrides" = (),
        loggers: "Sequence[Logger]" = (),
    ) -> None:
        data = {"corpus": corpus, "train": train, "dev": dev, "heldout": heldout, "source": source}
        self._given = _Given.of(retriever, lm, data, run_dir)
        self.config: Config = load_config(_file_of(config), [*self._given.keys, *_dotted(overrides)])
        self._loggers = loggers
        if not self._given.objects:
            check_paths(self.config)

    def train(self) -> Results:
        """Train or resume, then evaluate on the held-out texts; read a finished run. Raises RunError, UserError."""
        if not self._given.objects:
            check_names(self.config)
        with _running(self._given, self.config.run_dir):
            from replug.train.run import train

            return _results_of_run(train(self.config, self._loggers), self._run_dir)

    @cached_property
    def retriever(self) -> "SentenceTransformer":
        """Return the tuned retriever. Raises UserError before training has ended, or if `run_dir` holds another run.

        With `retriever.train=query` it encodes only queries: `Encoder(run_dir)` has the document encoder too.
        """
        if not (self._run_dir / "fitted.json").is_file():
            raise UserError(f"{self._run_dir} holds no tuned retriever yet; expected train() to end first")
        from sentence_transformers import SentenceTransformer

        from replug.train.run_dir import RunDirectory

        RunDirectory(self._run_dir).require_config(self.config)  # the folder may be that of another training
        self._given.write(self._run_dir)

        return SentenceTransformer(str(self._run_dir / RETRIEVER))

    @property
    def _run_dir(self) -> Path:
        return Path(self.config.run_dir).expanduser()


def label(
    retriever: "str | Path | SentenceTransformer | None" = None,
    lm: "str | Path | BlackBoxLM | None" = None,
    *,
    out: str | Path,
    corpus: "Rows | None" = None,
    train: "Rows | None" = None,
    dev: "Rows | None" = None,
    heldout: "Rows | None" = None,
    source: "Rows | None" = None,
    config: str | Path | Config = "own_data_online",
    run_dir: str | Path | None = None,
    overrides: "Overrides" = (),
) -> "Dataset":
    """Let the LM score candidates of every training example, into the folder `out`, as `replug prepare --labels` does.

    Returns a row for each example, for `DistillKLDivLoss` of sentence-transformers: `query`, `passage_1` to `passage_K`
    and `label`, the K scores. `train.labels=OUT` trains on them here. Arguments are as for `LSRTrainer`.
    """
    data = {"corpus": corpus, "train": train, "dev": dev, "heldout": heldout, "source": source}
    given = _Given.of(retriever, lm, data, run_dir)
    loaded = load_config(_file_of(config), [*given.keys, *_dotted(overrides)])
    with _running(given, loaded.run_dir):
        from replug.models.preparing import prepared_set
        from replug.train.labels import distill_kl_rows
        from replug.train.labels import label as make_labels
        from replug.train.run_dir import RunDirectory

        check_paths(loaded)
        labels = make_labels(loaded, Path(out).expanduser())
        documents = prepared_set(loaded, RunDirectory(Path(loaded.run_dir).expanduser()).data).corpus
        return distill_kl_rows(labels, documents, loaded.loss)


def evaluate(
    config: str | Path | Config | EvaluationConfig,
    retriever: "str | Path | SentenceTransformer | None" = None,
    lm: "str | Path | BlackBoxLM | None" = None,
    *,
    overrides: "Overrides" = (),
) -> Results:
    """Evaluate retrievers and methods, as `replug evaluate` does; resumes an unfinished evaluation.

    `config` is an evaluation's (`eval_lm`, docs/evaluation.md), the folder of a run or the configuration of a training:
    its retriever is compared with the tuned one on the run's held-out texts. Other arguments are as for `LSRTrainer`.
    """
    file = _file_of(config)
    given = _Given.of(retriever, lm, {}, None)
    keys = [*given.keys, *_dotted(overrides)]
    if isinstance(file, EvaluationConfig) or (isinstance(file, Path) and names_evaluation(file)):
        from replug.evals.kinds import checked_evaluation

        evaluation = checked_evaluation(file, keys)
        with _running(given, evaluation.out):
            from replug.evals.folder import EvaluationFolder
            from replug.evals.run import evaluate as run_evaluation

            content = run_evaluation(evaluation)
            return Results(content, EvaluationFolder(Path(evaluation.out).expanduser()).table.read_text())
    is_run = isinstance(file, Path) and file.is_dir()
    loaded = config_of_run(file, keys) if is_run else load_config(file, keys)
    if not is_run:
        check_paths(loaded)
        check_names(loaded)
    with _running(given, loaded.run_dir):
        from replug.train.run import evaluate as evaluate_run

        return _results_of_run(evaluate_run(loaded))


def config_of_run(run: Path, overrides: Sequence[str]) -> Config:
    """Load the configuration of a run, with its own prepared set unless the overrides name other data."""
    stored = run / RUN_CONFIG
    config = replace(load_stored_config(stored, overrides), run_dir=str(run), lm=load_stored_lm(stored, overrides))
    data = config.data
    prepared = Path(data.prepared or data.out or run / "data").expanduser()
    if any(override.startswith("data.") for override in overrides) or not (prepared / "manifest.json").is_file():
        return config
    data = replace(data, source=None, corpus=None, train=None, heldout=None, dev=None, out=None)
    return replace(config, data=replace(data, prepared=str(prepared)))


def search(directory: str | Path, text: str, k: int = 5) -> "list[Retrieved]":
    """Return the `k` documents that a run's retriever, or an index, finds for a text; the most similar first.

    The newest published version of the index is opened and searched, in this process; `RunRetriever` opens it once for
    many texts. Raises UserError if there is no index.
    """
    if not text.strip():
        raise UserError("the text is empty; expected a text to search with")
    from replug.index_workers.local_index import RunRetriever

    return RunRetriever(directory).retrieve([text], k)[0]


# From objects to files and keys ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Given:
    """Arguments as overrides `keys`, and the `objects` among them, by the name of their file."""

    keys: list[str]
    objects: dict[str, Any]
    lm: "BlackBoxLM | None" = None

    @classmethod
    def of(cls, retriever: Any, lm: Any, data: Mapping[str, Any], run_dir: str | Path | None) -> "_Given":
        keys: dict[str, Any] = {}
        objects: dict[str, Any] = {}
        if run_dir is not None:
            keys["run_dir"] = str(run_dir)
        for name, rows in data.items():
            if isinstance(rows, str | Path):
                keys[f"data.{name}"] = str(rows)
            elif rows is not None:
                file = f"{name}.jsonl"
                again = list(rows) if isinstance(rows, Iterator) else rows  # read again when a run resumes
                keys[f"data.{name}"], objects[file] = f"${{run_dir}}/{GIVEN}/{file}", (name, again)
        if isinstance(retriever, str | Path):
            keys["retriever.path"] = str(retriever)
        elif retriever is not None:
            if not callable(getattr(retriever, "save_pretrained", None)):
                raise UserError(
                    f"retriever is a {type(retriever).__name__}; expected a hub name, a folder or a SentenceTransformer"
                )
            from replug.models.encoder_retriever import require_both_sides

            require_both_sides(retriever)
            keys["retriever.path"], objects[RETRIEVER] = f"${{run_dir}}/{GIVEN}/{RETRIEVER}", retriever
        own = None
        if isinstance(lm, str | Path):
            keys["lm.url" if str(lm).startswith(("http://", "https://")) else "lm.path"] = str(lm)
        elif lm is not None:
            from replug.models.black_box_lm import BlackBoxLM
            from replug.models.http.server_source import ServerLM
            from replug.models.lm_source import name_of

            if isinstance(lm, ServerLM):  # connections belong to a process, so a run opens its own
                return cls(_dotted({**keys, **lm.keys}), objects)
            if not isinstance(lm, BlackBoxLM):
                raise UserError(f"lm is a {type(lm).__name__}; expected a name, a folder, a URL or a BlackBoxLM")
            keys["lm.path"], own = name_of(lm), lm
        return cls(_dotted(keys), objects, own)

    def write(self, run_dir: Path) -> None:
        """Write the objects under `run_dir`. Raises UserError if its contents were made from other objects."""
        from replug.data.files import writing
        from replug.data.folder import Folder, file_sum, run_work, sole_writer

        if not self.objects:
            return
        fix_hint = "give the same objects, or another run_dir"
        folder = Folder(run_dir / GIVEN, "set of given objects", key="run_dir", fix_hint=fix_hint)
        partial = folder.path / ".partial"
        with sole_writer(run_dir, folder.path), writing(partial):
            shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
            partial.mkdir()
            for name, value in self.objects.items():
                if name == RETRIEVER:
                    value.save_pretrained(str(partial / name), create_model_card=False)
                else:
                    _write_rows(partial / name, *value)
            paths = sorted(path for path in partial.rglob("*") if path.is_file())
            sums = {str(path.relative_to(partial)): file_sum(path) for path in paths}
            made_from = {f"{name} (sha256)": known["sha256"] for name, known in sums.items()}
            folder.claim(made_from, may_change=() if run_work(run_dir) else folder.changed(made_from))
            for path in () if folder.is_finished else paths:
                place = folder.path / path.relative_to(partial)
                place.parent.mkdir(parents=True, exist_ok=True)
                path.replace(place)
            folder.finish(sums)
            shutil.rmtree(partial)


def _write_rows(path: Path, name: str, rows: Any) -> None:
    """Write rows as JSON Lines, which are checked when they are read; a plain text gets its number as its id."""
    pandas = sys.modules.get("pandas")
    if pandas is not None and isinstance(rows, pandas.DataFrame):
        rows = rows.astype(object).where(rows.notna(), None).to_dict("records")
    if isinstance(rows, Mapping) or not isinstance(rows, Iterable):
        raise UserError(f"{name} is a {type(rows).__name__}; expected a path, or rows such as a list of dicts")
    with path.open("w", encoding="utf-8") as file:
        for number, row in enumerate(rows):
            if isinstance(row, str) and name in ("corpus", "source"):
                row = {"id": str(number), "text": row}
            if not isinstance(row, Mapping):
                fields_of = "context and continuation" if name not in ("corpus", "source") else "id and text"
                raise UserError(f"{name}[{number}] is a {type(row).__name__}; expected a dict with {fields_of}")
            try:
                line = json.dumps(row, ensure_ascii=False, default=_plain)
                file.write(f"{line}\n")
            except (TypeError, ValueError) as error:  # a circle; half a character
                raise UserError(f"{name}[{number}] is not a row of JSON: {error}") from error


def _plain(value: Any) -> Any:
    """Return the Python value of a numpy number or array."""
    if callable(own := getattr(value, "tolist", None)):
        return own()
    raise TypeError(f"a {type(value).__name__} is not text, a number or a list")


def _dotted(overrides: "Overrides") -> list[str]:
    """Return overrides as on the command line, `key=value` with the value as JSON, which is YAML too."""
    if not isinstance(overrides, Mapping):
        return list(overrides)
    return [f"{key}={_yaml(key, value)}" for key, value in overrides.items()]


def _yaml(key: str, value: Any) -> str:
    value = value.value if isinstance(value, Enum) else str(value) if isinstance(value, Path) else value
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{key} is {value}; expected a finite number")
    try:
        return json.dumps(value, ensure_ascii=False, default=_plain)
    except TypeError as error:
        raise UserError(f"{key}: {error}") from error


def _file_of(config: Any) -> Any:
    """Return the file of a shipped name or a path; a configuration as it is."""
    return find_config(str(config)) if isinstance(config, str | Path) else config


@contextmanager
def _running(given: _Given, run_dir: str) -> Iterator[None]:
    """Write the objects, then show messages while the block runs."""
    from replug.messages import quiet_transformers, shown_messages
    from replug.models.lm_source import given_lm

    with shown_messages(), quiet_transformers(), given_lm(given.lm):
        given.write(Path(run_dir).expanduser())
        yield


def _results_of_run(content: Mapping[str, Any], run_dir: Path | None = None) -> Results:
    from replug.evals.tables import to_markdown
    from replug.train.report import run_blocks

    return Results(content, to_markdown(run_blocks(content)), run_dir / "report.html" if run_dir else None)
