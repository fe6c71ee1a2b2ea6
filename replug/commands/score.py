"""`replug score`: log-probabilities of the user's own pairs, through the pool, probe and cache of training.

All rows are checked before anything starts. Rows are scored in calls of a fixed number, counted from the
beginning of the file, so what is scored together follows from the file alone, also after an interruption; answers are
appended in order, and a rerun goes on after the last whole line. Beside OUT lie

OUT.lm.json         which LM the rows are of; stays, so that no other LM's rows are ever mixed in
OUT.cache.sqlite    what was scored but not yet written; goes at the end, since OUT then holds it all (`lm.cache`
                    names a cache that is kept)
OUT.lm_spent.json   what a server was sent, against lm.max_requests and lm.max_tokens_sent; stays
"""

import json
import logging
import os
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import numpy as np
import typer

from replug.cluster.environment import configure_ray_environment
from replug.commands.command import Command, Group
from replug.config.choices import TooLong
from replug.config.errors import RunError, UserError
from replug.config.load import load_score_config
from replug.config.schema import LMConfig, ScoreConfig
from replug.data.files import write_json
from replug.data.folder_lock import sole_writer_of_file
from replug.data.progress import Progress, format_duration
from replug.data.rows import read_json_lines

log = logging.getLogger(__name__)

if TYPE_CHECKING:  # seconds to import, and mistakes in the rows are to be told at once
    from transformers import PreTrainedTokenizerBase

    from replug.models.black_box_lm import AsyncLM, ContinuationScore
    from replug.models.caching_lm import CachingLM
    from replug.models.lm_source import LMSource
    from replug.models.prompt import PromptTemplate

ROWS_PER_CALL = 256
CALLS_IN_FLIGHT = 8
# What tells one LM's scores from another's before either is loaded.
LM_KEYS = ("path", "dtype", "model", "tokenizer", "too_long")
OTHER_OUT = "give another --out"


@dataclass(frozen=True, slots=True)
class InputRow:
    """One row of the input and where it stands (`file:line`)."""

    id: str | int
    prefix: str
    continuation: str
    where: str

    @property
    def label(self) -> str:
        return f"{self.where} (id {self.id})"


@dataclass(frozen=True, slots=True)
class Survey:
    """What one reading of input and output found: rows, and the output's bytes up to its last whole row and in all."""

    num_rows: int
    num_written: int
    whole_bytes: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Call:
    """Rows that are scored together; `first` is the number of the first among all rows of the file."""

    first: int
    pairs: list[InputRow]


class Output:
    """OUT and the files beside it."""

    def __init__(self, path: Path, lm: LMConfig) -> None:
        self.path = path
        self.mark, self.cache, self.budget_file = (
            path.with_name(path.name + suffix) for suffix in (".lm.json", ".cache.sqlite", ".lm_spent.json")
        )
        self._lm = {key: str(getattr(value, "name", value)) for key in LM_KEYS if (value := getattr(lm, key))}

    def rows(self) -> Iterator[tuple[Any, int]]:
        """The id of every whole line, and how many bytes there are up to its end."""
        if not self.path.exists():
            return
        end = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.endswith(b"\n"):
                    end += len(line)
                    yield self._id(line, number), end

    def require_lm(self, identity: str | None = None) -> None:
        """Raise UserError where what is there is of another LM, by its keys and, once it is known, its identity."""
        if not self.path.exists() or self.path.stat().st_size == 0:
            return
        if not self.mark.is_file():
            raise UserError(f"{self.path} was not made by `replug score` ({self.mark} is missing); {OTHER_OUT}")
        try:
            mark = json.loads(self.mark.read_text(encoding="utf-8"))
            keys, of = dict(mark["lm"]), mark["identity"]
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{self.mark} does not say which LM {self.path} is of; {OTHER_OUT}") from error
        if keys != self._lm or identity not in (None, of):
            shown = " ".join(f"lm.{key}={value}" for key, value in keys.items())
            raise UserError(f"{self.path} holds scores of another LM ({shown}, identity {of}); {OTHER_OUT}")

    def write_mark(self, identity: str) -> None:
        write_json(self.mark, {"lm": self._lm, "identity": identity})

    @contextmanager
    def appending(self, survey: Survey) -> Iterator[BinaryIO]:
        """The file, for this process alone, without its torn last line."""
        with sole_writer_of_file(self.path), self.path.open("ab") as file:
            if os.fstat(file.fileno()).st_size != survey.num_bytes:
                raise UserError(f"{self.path} was written by another process just now; run again, or {OTHER_OUT}")
            file.truncate(survey.whole_bytes)
            yield file
            file.flush()
            os.fsync(file.fileno())

    def remove_cache(self) -> None:
        for suffix in ("", "-wal", "-shm"):
            self.cache.with_name(self.cache.name + suffix).unlink(missing_ok=True)

    def _id(self, line: bytes, number: int) -> Any:
        try:
            return json.loads(line)["id"]
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{self.path}:{number} is not a row of `replug score`; {OTHER_OUT}") from error


def score(
    source: Annotated[Path, typer.Option("--in", help='JSON Lines: {"id", "prefix", "continuation"}.')],
    out: Annotated[Path, typer.Option("--out", help='JSON Lines: {"id", "sum", "num_tokens", "token_logprobs"}.')],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Any key of lm and ray; lm.path or lm.url must be there.", metavar="KEY=VALUE"),
    ] = None,
) -> None:
    """Log-probabilities (nats) of your own continuations, in the order of the input; a rerun goes on.

    replug score lm.path=DIR --in pairs.jsonl --out scores.jsonl
    """
    config = load_score_config(overrides or [])
    configure_ray_environment(config)
    run_score(config, source, out)


def run_score(config: ScoreConfig, source: Path, out: Path) -> None:
    """Score what is left to do. Raises UserError before anything starts for what is wrong with a row or with OUT."""
    if out.is_dir() or out.resolve() == source.resolve():
        raise UserError(f"--out: {out} is {'a folder' if out.is_dir() else 'the input itself'}; expected a new file")
    output = Output(out, config.lm)
    output.require_lm()
    survey = take_survey(source, output)
    log.info(f"{source}: {survey.num_rows} rows, {survey.num_written} of them scored before")
    with output.appending(survey) as file:
        if survey.num_written < survey.num_rows:
            _score_rest(config, source, output, survey, file)
    if not config.lm.cache:
        output.remove_cache()
    print(f"scores: {out}")


def _score_rest(config: ScoreConfig, source: Path, output: Output, survey: Survey, file: BinaryIO) -> None:
    from replug.models.build import lm_source, prompt_template  # seconds to import, and the rows are checked by now

    source_of_lm = lm_source(config.lm, output.budget_file, output.cache)
    limit = source_of_lm.max_tokens
    if config.lm.too_long is TooLong.error and limit and (tokenizer := source_of_lm.tokenizer()) is not None:
        check_lengths(source, tokenizer, limit)
    with _open(config, source_of_lm, output.cache) as lm:
        output.require_lm(lm.identity)
        output.write_mark(lm.identity)
        writer, template = RowWriter(file, survey, lm), prompt_template(config.lm, source_of_lm)
        score_calls(lm, read_calls(source, survey.num_written), template, writer)
    if template.num_truncated:
        log.info(f"{template.num_truncated} prefixes were cut at their beginning to fit (lm.too_long=truncate)")
    print(writer.totals())


@contextmanager
def _open(config: ScoreConfig, source_of_lm: "LMSource", cache: Path) -> "Iterator[CachingLM]":
    """The LM behind its cache; Ray runs where the LM wants actors."""
    from replug.cluster.ray_cluster import ray_cluster
    from replug.models.build import opened_lm
    from replug.models.hardware import check_gpus, multiplies_bfloat16
    from replug.planning.memory import run_sizes

    if source_of_lm.roles:
        check_gpus()
    sizes = run_sizes(config, None, multiplies_bfloat16())
    cluster = ray_cluster(config, source_of_lm.roles, sizes=sizes) if source_of_lm.roles else nullcontext()
    with cluster, opened_lm(config.lm, source_of_lm, cache) as lm:
        yield lm


def read_pairs(path: Path) -> Iterator[InputRow]:
    """Rows with `id`, `prefix` (which may be empty) and `continuation`. Raises UserError with file and line."""
    for where, row in read_json_lines(path):
        identifier = row.get("id")
        if isinstance(identifier, bool) or not isinstance(identifier, str | int):
            raise UserError(f"{where}: field 'id' must be a string or an integer, found {identifier!r}")
        for name in ("prefix", "continuation"):
            if not isinstance(row.get(name), str):
                found = type(row[name]).__name__ if name in row else f"only {', '.join(row)}"
                raise UserError(f"{where} (id {identifier}): field '{name}' must be a string, found {found}")
        if not row["continuation"]:
            raise UserError(f"{where} (id {identifier}): field 'continuation' is empty: there is nothing to score")
        yield InputRow(identifier, row["prefix"], row["continuation"], where)


def take_survey(source: Path, output: Output) -> Survey:
    """Read all of both files, one row at a time. Raises UserError unless the output's ids are the input's first."""
    num_rows = num_written = whole_bytes = 0
    num_bytes = output.path.stat().st_size if output.path.exists() else 0
    written = output.rows()
    for num_rows, pair in enumerate(read_pairs(source), start=1):  # noqa: B007 - the last number is wanted
        row = next(written, None)
        if row is None:
            continue
        found, whole_bytes = row
        num_written += 1
        if type(found) is not type(pair.id) or found != pair.id:
            raise UserError(
                f"{output.path}:{num_written} has id {found!r}, but {pair.where} has {pair.id!r}: it is not the output "
                f"of this input; {OTHER_OUT}"
            )
    if not num_rows:
        raise UserError(f"{source} holds no pairs")
    if next(written, None) is not None:
        raise UserError(f"{output.path} holds more rows than {source}; {OTHER_OUT}")
    return Survey(num_rows, num_written, whole_bytes, num_bytes)


def check_lengths(source: Path, tokenizer: "PreTrainedTokenizerBase", max_tokens: int) -> None:
    """Raise UserError for the first row that the LM cannot hold.

    A token is at least one byte, so only what is longer in bytes is tokenized.
    """
    from replug.models.pair_tokens import pair_token_ids

    for pair in read_pairs(source):
        if len((pair.prefix + pair.continuation).encode()) + 2 <= max_tokens:
            continue
        before, after = pair_token_ids(tokenizer, pair.prefix, pair.continuation)
        if len(before) + len(after) > max_tokens:
            raise UserError(
                f"{pair.label} has {len(before)} + {len(after)} tokens (prefix + continuation), but the LM holds "
                f"{max_tokens}: shorten it, set lm.too_long=truncate, or take an LM with a longer context"
            )


def read_calls(source: Path, num_written: int) -> Iterator[Call]:
    """Calls from the one on that holds the first row which is not written yet."""
    first = num_written // ROWS_PER_CALL * ROWS_PER_CALL
    pairs = islice(read_pairs(source), first, None)
    while some := list(islice(pairs, ROWS_PER_CALL)):
        yield Call(first, some)
        first += len(some)


class RowWriter:
    """Appends the rows of calls that come in order, those that are not there yet, and says how fast it goes."""

    def __init__(self, file: BinaryIO, survey: Survey, lm: "CachingLM") -> None:
        self._file, self._survey, self._lm = file, survey, lm
        self._progress = Progress("rows scored", survey.num_rows, survey.num_written)
        self._start = time.monotonic()
        self._num_tokens = 0

    def write(self, call: Call, scores: "list[ContinuationScore]") -> None:
        num_old = max(0, self._survey.num_written - call.first)
        for pair, score in list(zip(call.pairs, scores, strict=True))[num_old:]:
            self._file.write(_line(pair, score))
            self._num_tokens += score.num_tokens
        self._file.flush()
        self._progress.advance(len(scores) - num_old, self._rates())

    def totals(self) -> str:
        num_rows = self._survey.num_rows - self._survey.num_written
        seconds = format_duration(time.monotonic() - self._start)
        return f"scored {num_rows} rows, {self._num_tokens} tokens, in {seconds}: {self._rates()}"

    def _rates(self) -> str:
        rate = self._num_tokens / max(1e-9, time.monotonic() - self._start)
        return f"{rate:.0f} tokens/s, {self._lm.hit_share:.0%} from the cache"


def score_calls(lm: "AsyncLM", calls: Iterable[Call], template: "PromptTemplate", writer: RowWriter) -> None:
    """Keep several calls in flight and write their rows in order."""
    in_flight: deque[tuple[Call, Future[list[ContinuationScore]]]] = deque()
    for call in calls:
        in_flight.append((call, _submit(lm, call, template)))
        if len(in_flight) == CALLS_IN_FLIGHT:
            oldest, future = in_flight.popleft()
            writer.write(oldest, _answer(oldest, future))
    for call, future in in_flight:
        writer.write(call, _answer(call, future))


def _submit(lm: "AsyncLM", call: Call, template: "PromptTemplate") -> "Future[list[ContinuationScore]]":
    prefixes = []
    for pair in call.pairs:
        try:
            prefixes.append(template.prefix(None, pair.prefix, pair.continuation))
        except ValueError as error:
            raise UserError(f"{pair.label}: {error}") from error
    return lm.submit(prefixes, [pair.continuation for pair in call.pairs])


def _answer(call: Call, future: "Future[list[ContinuationScore]]") -> "list[ContinuationScore]":
    try:
        return future.result()
    except UserError:
        raise
    except ValueError as error:  # what an LM says of a text that it cannot score, in Ray's case after a traceback
        said = str(error).strip().splitlines()[-1]
        rows = f"{call.pairs[0].where} to {call.pairs[-1].where}"
        raise RunError(f"{rows}: the LM refuses one of these rows: {said}") from error


def _line(pair: InputRow, score: "ContinuationScore") -> bytes:
    """A row of the output. Numbers are the shortest that are the same float32 again."""
    if not np.isfinite(score.sum_logprob):
        raise RunError(f"{pair.label}: the LM's score is {score.sum_logprob}; expected a finite number")
    total, *logprobs = (
        float(str(value)) for value in (np.float32(score.sum_logprob), *score.token_logprobs.astype(np.float32))
    )
    row = {"id": pair.id, "sum": total, "num_tokens": score.num_tokens, "token_logprobs": logprobs}
    return json.dumps(row, ensure_ascii=False).encode() + b"\n"


COMMAND = Command(score, Group.use, place=3)
