"""`replug score` as a user types it: values, order, kill -9 and resume, and every mistake named by its line."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replug.commands.score import (
    ROWS_PER_CALL,
    Call,
    InputRow,
    Output,
    RowWriter,
    Survey,
    check_lengths,
    read_calls,
    run_score,
    score_calls,
    take_survey,
)
from replug.config.errors import RunError, UserError
from replug.config.load import load_score_config
from replug.models.black_box_lm import ContinuationScore
from replug.models.caching_lm import CachingLM
from replug.models.lm_source import InProcessLM
from replug.models.local.stand_in_lm import StandInLM
from replug.models.prompt import PromptTemplate
from tests.support.command_line import ROOT, CommandLine, start_process
from tests.support.real_models import real_lm

NUM_ROWS = 11 * ROWS_PER_CALL + 7
# Slow enough to be killed in the middle.
SLOW = "lm.path=stand_in:0.08"


def rows(num_rows: int) -> list[dict]:
    """Pairs of several lengths and scripts; those after 2,700 have the texts of the first ones."""
    words = ["fox", "日本", "naïve", "🙂", "line\nbreak", "e\u0301", "\u2028", "fox,"]
    return [
        {
            "id": number if number % 2 else f"row {number} é",
            "prefix": " ".join(words[: i % 9]) + " more" * (i % 50),
            "continuation": f" {words[i % 8]} {words[i * 5 % 8]}" + " end" * (i % 3) + f" {i}",
        }
        for number, i in ((number, number % 2700) for number in range(num_rows))
    ]


def write(path: Path, content: Sequence[dict]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in content), encoding="utf-8")
    return path


def typed(source: Path, out: Path, *overrides: str) -> list[str]:
    return ["score", *overrides, "--in", str(source), "--out", str(out)]


Finish = Callable[..., str]


@pytest.fixture(scope="module")
def finish(replug: CommandLine) -> Finish:
    """Scores a file to a good end; gives what was printed."""

    def finish(source: Path, out: Path, *overrides: str) -> str:
        ended = replug(*typed(source, out, *overrides))
        assert ended.status == 0, ended.printed
        return ended.printed

    return finish


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("pairs") / "pairs.jsonl", rows(NUM_ROWS))


@pytest.fixture(scope="module")
def quiet(source: Path, finish: Finish, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Scores that nothing disturbed, and what was printed."""
    out = tmp_path_factory.mktemp("quiet") / "deeper/scores.jsonl"
    return out, finish(source, out, "lm.path=stand_in")


# The real command line ----------------------------------------------------------------------------------


def test_scores_are_the_lms_in_the_order_of_the_input(quiet: tuple[Path, str]) -> None:
    pairs = rows(NUM_ROWS)
    expected = StandInLM().score([row["prefix"] for row in pairs], [row["continuation"] for row in pairs])
    scored = [json.loads(line) for line in quiet[0].read_text(encoding="utf-8").splitlines()]
    assert [row["id"] for row in scored] == [row["id"] for row in pairs]
    assert [set(row) for row in scored] == [{"id", "sum", "num_tokens", "token_logprobs"}] * NUM_ROWS
    for row, score in zip(scored, expected, strict=True):
        assert np.array_equal(np.array(row["token_logprobs"], np.float32), score.token_logprobs)
        assert float(np.float32(row["sum"])) == score.sum_logprob
        assert row["num_tokens"] == score.num_tokens


def test_the_last_lines_say_how_much_was_scored_how_fast_and_from_where(quiet: tuple[Path, str]) -> None:
    out, printed = quiet
    num_tokens = sum(json.loads(line)["num_tokens"] for line in out.read_text(encoding="utf-8").splitlines())
    assert f"pairs.jsonl: {NUM_ROWS} rows, 0 of them scored before" in printed
    assert f"rows scored: {NUM_ROWS}/{NUM_ROWS}" in printed
    assert f"scored {NUM_ROWS} rows, {num_tokens} tokens, in " in printed
    assert " tokens/s, 4% from the cache" in printed
    assert printed.splitlines()[-1] == f"scores: {out}"


def test_only_the_scores_and_the_name_of_their_lm_are_left(quiet: tuple[Path, str]) -> None:
    out, _ = quiet
    assert sorted(path.name for path in out.parent.iterdir()) == ["scores.jsonl", "scores.jsonl.lm.json"]
    assert json.loads(out.with_name("scores.jsonl.lm.json").read_text())["identity"] == "stand_in"


@pytest.mark.nightly
def test_killed_again_and_again_the_scores_are_the_same_bytes(
    quiet: tuple[Path, str], finish: Finish, source: Path, tmp_path: Path
) -> None:
    out = tmp_path / "scores.jsonl"
    wanted = quiet[0].read_bytes()
    size = 0
    for by in (signal.SIGKILL, signal.SIGTERM):
        process = start_process(*typed(source, out, SLOW))
        while (not out.exists() or out.stat().st_size <= size) and process.poll() is None:
            time.sleep(0.005)
        os.kill(process.pid, by)
        process.communicate(timeout=30)
        assert process.returncode == (75 if by == signal.SIGTERM else -by)
        size = out.stat().st_size
        assert size < len(wanted), "it ended before it was killed"
        assert wanted.startswith(out.read_bytes())
    out.write_bytes(wanted[: size + 10])  # a line that a killed process had written in part
    whole_lines = wanted[: size + 10].count(b"\n")
    printed = finish(source, out, SLOW)
    assert f"{whole_lines} of them scored before" in printed
    assert f"scored {NUM_ROWS - whole_lines} rows, " in printed
    assert out.read_bytes() == wanted


@pytest.mark.slow
def test_a_real_lm_gives_what_it_gives_by_itself(finish: Finish, tmp_path: Path) -> None:
    path = real_lm()
    from replug.models.local.hf_lm import HuggingFaceLM

    pairs = [
        {"id": i, "prefix": prefix, "continuation": continuation}
        for i, (prefix, continuation) in enumerate(
            [
                ("The capital of France is", " Paris."),
                ("", "Once upon a time"),
                ("def add(a, b):\n    return", " a + b"),
            ]
        )
    ]
    finish(write(tmp_path / "in.jsonl", pairs), tmp_path / "out.jsonl", "lm.path=package:smollm2", "lm.dtype=float32")
    lm = HuggingFaceLM(path)
    expected = lm.score([row["prefix"] for row in pairs], [row["continuation"] for row in pairs])
    scored = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["num_tokens"] for row in scored] == [score.num_tokens for score in expected]
    for row, score in zip(scored, expected, strict=True):
        np.testing.assert_allclose(row["token_logprobs"], score.token_logprobs, atol=1e-4)
        assert row["sum"] == pytest.approx(score.sum_logprob, abs=1e-3)


@pytest.fixture
def server() -> Iterator[str]:
    """The address of a server that scores as the stand-in does."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, "tests/support/fault_server.py", str(port)], cwd=ROOT)
    while process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            break
        except OSError:
            time.sleep(0.05)
    yield f"http://127.0.0.1:{port}/v1"
    process.kill()
    process.wait(20)


def test_a_server_scores_without_ray_and_what_it_was_sent_is_booked(server: str, tmp_path: Path) -> None:
    pairs = [{"id": i, "prefix": f"one two three {i % 5}", "continuation": f" two {i % 7} three"} for i in range(30)]
    source, out = write(tmp_path / "in.jsonl", pairs), tmp_path / "out.jsonl"
    config = load_score_config([f"lm.url={server}", "lm.model=words", "lm.max_requests=100"])
    run_score(config, source, out)
    expected = StandInLM().score([row["prefix"] for row in pairs], [row["continuation"] for row in pairs])
    scored = [json.loads(line) for line in out.read_text().splitlines()]
    assert [np.array(row["token_logprobs"], np.float32).tobytes() for row in scored] == [
        score.token_logprobs.tobytes() for score in expected
    ]
    assert json.loads((tmp_path / "out.jsonl.lm.json").read_text())["identity"].startswith("words#")
    assert json.loads((tmp_path / "out.jsonl.lm_spent.json").read_text())["requests"] > 0


# Mistakes -----------------------------------------------------------------------------------------------


def assert_says(act: Callable[[], object], *fragments: str) -> None:
    with pytest.raises(UserError) as caught:
        act()
    message = str(caught.value)
    assert [fragment for fragment in fragments if fragment not in message] == [], message


GOOD = '{"id": "a", "prefix": "one", "continuation": " two"}\n'
WRONG_ROWS = [
    ("broken JSON", GOOD + '{"id": \n', "in.jsonl:2: not valid JSON"),
    ("a torn last line", GOOD + GOOD[:20], "in.jsonl:2: not valid JSON"),
    ("a list", '["a", "b", "c"]\n', "in.jsonl:1: expected a JSON object"),
    ("no id", GOOD + "\n" + GOOD.replace('"id"', '"name"'), "in.jsonl:3: field 'id' must be a string or an integer"),
    ("an id that is a flag", GOOD.replace('"a"', "true"), "in.jsonl:1: field 'id'", "found True"),
    ("an id that is a float", GOOD.replace('"a"', "1.5"), "in.jsonl:1: field 'id'", "found 1.5"),
    (
        "no prefix",
        GOOD.replace('"prefix"', '"text"'),
        "in.jsonl:1 (id a): field 'prefix'",
        "only id, text, continuation",
    ),
    ("a prefix that is null", GOOD.replace('"one"', "null"), "in.jsonl:1 (id a): field 'prefix'", "found NoneType"),
    (
        "a continuation that is a number",
        GOOD.replace('" two"', "2"),
        "field 'continuation' must be a string, found int",
    ),
    ("an empty continuation", GOOD + GOOD.replace('" two"', '""'), "in.jsonl:2 (id a): field 'continuation' is empty"),
    ("half a character", GOOD.replace(" two", "\\ud83d"), "in.jsonl:1: field 'continuation' holds half a surrogate"),
    ("Latin-1", GOOD.encode() + b'{"id": "\xe9"}\n', "in.jsonl:2: not UTF-8"),
    ("no rows", "\n\n", "in.jsonl holds no pairs"),
]


@pytest.mark.parametrize("case", WRONG_ROWS, ids=lambda case: case[0])
def test_a_wrong_row_is_named_by_its_line_before_anything_is_written(tmp_path: Path, case: tuple) -> None:
    _, content, *says = case
    (tmp_path / "in.jsonl").write_bytes(content if isinstance(content, bytes) else content.encode())
    config = load_score_config(["lm.path=stand_in"])
    assert_says(lambda: run_score(config, tmp_path / "in.jsonl", tmp_path / "out.jsonl"), *says)
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


OVERRIDES = [
    ("", "lm.path is missing; expected lm.path=DIR", "lm.url="),
    ("lm.path=a lm.url=http://a/v1 lm.model=b", "lm.path and lm.url are both set"),
    ("lm.pth=a", "lm.pth: unknown key; did you mean lm.path?"),
    ("train.lr=1", "train: unknown key; expected keys of lm and ray"),
    ("wandb=off", "wandb: unknown key; expected keys of lm and ray"),
    ("lm.path=a lm.num_replicas=0", "lm.num_replicas is 0; expected a number above 0"),
    ("lm.path=a lm.gpus_per_replica=-1", "lm.gpus_per_replica is -1.0; expected 0 or more"),
    ("lm.path=a lm.max_requests=many", "lm.max_requests: ", "'many'", "expected int | None"),
    ("lm=a", "lm: expected keys of this section, such as lm.path"),
    ("configs/debug.yaml", "override 'configs/debug.yaml' is not of the form key=value, such as lm.path=DIR"),
]


@pytest.mark.parametrize("case", OVERRIDES, ids=lambda case: case[0])
def test_a_wrong_override_is_named(case: tuple) -> None:
    overrides, *says = case
    assert_says(lambda: load_score_config(overrides.split()), *says)


def test_a_missing_input_and_an_output_that_cannot_be_one_are_named(tmp_path: Path) -> None:
    config, source = load_score_config(["lm.path=stand_in"]), write(tmp_path / "in.jsonl", rows(1))
    assert_says(lambda: run_score(config, tmp_path / "no.jsonl", tmp_path / "out.jsonl"), "no.jsonl does not exist")
    assert_says(lambda: run_score(config, source, tmp_path), "--out", "is a folder")
    assert_says(lambda: run_score(config, source, tmp_path / "x/../in.jsonl"), "--out", "is the input itself")


def written(folder: Path, ids: Sequence[object], **mark: object) -> Path:
    """An output with these ids, as `replug score` leaves it."""
    out = write(folder / "out.jsonl", [{"id": i, "sum": -1.0, "num_tokens": 1, "token_logprobs": [-1]} for i in ids])
    lm = {"path": "stand_in", "dtype": "auto", "too_long": "error"}
    (folder / "out.jsonl.lm.json").write_text(json.dumps({"lm": lm, "identity": "stand_in"} | mark))
    return out


OTHER_OUTPUTS = [
    ("another id", [0, 7], {}, "out.jsonl:2 has id 7, but", "in.jsonl:2 has 1", "another --out"),
    ("an id of another type", [0, "1"], {}, "out.jsonl:2 has id '1', but"),
    ("more rows", range(4), {}, "out.jsonl holds more rows than", "another --out"),
    ("another LM's name", [0], {"lm": {"path": "gpt"}}, "holds scores of another LM (lm.path=gpt, identity stand_in)"),
    ("a broken mark", [0], {"lm": None}, "out.jsonl.lm.json does not say which LM", "another --out"),
]


@pytest.mark.parametrize("case", OTHER_OUTPUTS, ids=lambda case: case[0])
def test_an_output_of_something_else_is_refused_and_left_as_it_is(tmp_path: Path, case: tuple) -> None:
    _, ids, mark, *says = case
    source = write(tmp_path / "in.jsonl", [{"id": i, "prefix": "", "continuation": "x"} for i in range(3)])
    out = written(tmp_path, ids, **mark)
    before = out.read_bytes()
    assert_says(lambda: run_score(load_score_config(["lm.path=stand_in"]), source, out), *says)
    assert out.read_bytes() == before


def test_a_file_that_score_did_not_make_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    source, out = write(tmp_path / "in.jsonl", rows(3)), tmp_path / "thesis.txt"
    out.write_text("years of work, without a line's end")
    assert_says(lambda: run_score(load_score_config(["lm.path=stand_in"]), source, out), "was not made by", "--out")
    assert out.read_text() == "years of work, without a line's end"


def test_a_line_of_the_output_that_is_no_row_is_named(tmp_path: Path) -> None:
    source, out = write(tmp_path / "in.jsonl", rows(3)), written(tmp_path, ["row 0 é"])
    out.write_text(out.read_text(encoding="utf-8") + "[]\n", encoding="utf-8")
    assert_says(lambda: run_score(load_score_config(["lm.path=stand_in"]), source, out), "out.jsonl:2 is not a row")


def test_the_loaded_lm_must_be_the_one_of_the_output(tmp_path: Path) -> None:
    output = Output(written(tmp_path, [0]), load_score_config(["lm.path=stand_in"]).lm)
    output.require_lm("stand_in")
    assert_says(lambda: output.require_lm("other weights"), "another LM", "identity stand_in")


def test_two_processes_may_not_write_one_output(tmp_path: Path) -> None:
    output = Output(tmp_path / "out.jsonl", load_score_config(["lm.path=stand_in"]).lm)
    with output.appending(Survey(3, 0, 0, 0)) as file:
        assert_says(lambda: output.appending(Survey(3, 0, 0, 0)).__enter__(), "is being written by process")
        file.write(b"{}\n")
    assert_says(lambda: output.appending(Survey(3, 0, 0, 0)).__enter__(), "by another process just now", "run again")


def test_a_finished_output_needs_no_lm(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    source = write(tmp_path / "in.jsonl", [{"id": i, "prefix": "", "continuation": "x"} for i in range(3)])
    out = written(tmp_path, range(3))
    (tmp_path / "out.jsonl.cache.sqlite").touch()  # killed between the last row and the end
    before = out.read_bytes()
    run_score(load_score_config(["lm.path=stand_in"]), source, out)
    assert out.read_bytes() == before
    assert capsys.readouterr().out == f"scores: {out}\n"
    assert not (tmp_path / "out.jsonl.cache.sqlite").exists()


# Parts --------------------------------------------------------------------------------------------------


class RefusingLM(StandInLM):
    """The stand-in; a continuation that holds `refuses` is an error, as one without tokens is."""

    refuses = "never"

    def score(
        self, prefixes: Sequence[str], continuations: Sequence[str], *, opening: str | None = None
    ) -> list[ContinuationScore]:
        if any(self.refuses in text for text in continuations):
            raise ValueError("Traceback of an actor\nValueError: continuation 3 has no tokens")
        return super().score(prefixes, continuations)


def test_calls_are_aligned_to_the_beginning_of_the_file_wherever_a_run_goes_on(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", rows(3 * ROWS_PER_CALL + 5))
    whole = list(read_calls(source, 0))
    assert [(call.first, len(call.pairs)) for call in whole] == [
        (0, ROWS_PER_CALL),
        (ROWS_PER_CALL, ROWS_PER_CALL),
        (2 * ROWS_PER_CALL, ROWS_PER_CALL),
        (3 * ROWS_PER_CALL, 5),
    ]
    for done, skipped in ((1, 0), (ROWS_PER_CALL, 1), (2 * ROWS_PER_CALL - 1, 1), (3 * ROWS_PER_CALL + 4, 3)):
        assert list(read_calls(source, done)) == whole[skipped:]


def test_only_rows_that_are_not_there_yet_are_written(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", rows(300))
    whole, part = tmp_path / "whole.jsonl", tmp_path / "part.jsonl"
    for out, num_written in ((whole, 0), (part, 261)):
        lm = CachingLM(InProcessLM(StandInLM()), tmp_path / f"{out.stem}.sqlite")
        with out.open("wb") as file:
            writer = RowWriter(file, Survey(300, num_written, 0, 0), lm)
            score_calls(lm, read_calls(source, num_written), PromptTemplate("\n"), writer)
        lm.close()
    assert part.read_bytes().splitlines() == whole.read_bytes().splitlines()[261:]


def test_a_survey_counts_the_rows_of_both_files_and_leaves_a_torn_line_out(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", rows(10))
    output = Output(written(tmp_path, [row["id"] for row in rows(4)]), load_score_config(["lm.path=stand_in"]).lm)
    whole = output.path.stat().st_size
    with output.path.open("ab") as file:
        file.write(b'{"id": "ro')
    assert take_survey(source, output) == Survey(10, 4, whole, whole + 10)
    with output.appending(take_survey(source, output)):
        pass
    assert output.path.stat().st_size == whole


def test_a_text_that_the_lm_refuses_is_named_by_its_call(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", rows(600))
    inner = RefusingLM()
    inner.refuses = " 300"
    lm = CachingLM(InProcessLM(inner), tmp_path / "cache.sqlite")
    out = tmp_path / "out.jsonl"
    with out.open("wb") as file, pytest.raises(RunError) as caught:
        score_calls(lm, read_calls(source, 0), PromptTemplate("\n"), RowWriter(file, Survey(600, 0, 0, 0), lm))
    assert str(caught.value) == (
        f"{source}:257 to {source}:512: the LM refuses one of these rows: ValueError: continuation 3 has no tokens"
    )
    assert out.read_bytes().count(b"\n") == ROWS_PER_CALL
    lm.close()


class WordTokenizer:
    """A token for each word."""

    eos_token_id, bos_token_id = 0, None

    def __call__(self, texts: list[str], **options: bool) -> dict:
        return {"input_ids": [[1] * len(text.split()) for text in texts]}


def test_a_row_that_the_lm_cannot_hold_is_named_before_anything_is_scored(tmp_path: Path) -> None:
    pairs = [{"id": f"r{n}", "prefix": "word " * n, "continuation": "a longer one"} for n in (0, 1, 5, 6, 50)]
    source = write(tmp_path / "in.jsonl", pairs)
    assert_says(
        lambda: check_lengths(source, WordTokenizer(), max_tokens=8),
        "in.jsonl:4 (id r6) has 6 + 3 tokens (prefix + continuation), but the LM holds 8",
        "lm.too_long=truncate",
    )
    check_lengths(source, WordTokenizer(), max_tokens=53)


def test_a_row_that_cannot_be_cut_to_fit_is_named(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", rows(3))
    template = PromptTemplate("\n", WordTokenizer(), max_tokens=2)
    lm = CachingLM(InProcessLM(StandInLM()), tmp_path / "cache.sqlite")
    with (tmp_path / "out.jsonl").open("wb") as file:
        writer = RowWriter(file, Survey(3, 0, 0, 0), lm)
        assert_says(lambda: score_calls(lm, read_calls(source, 0), template, writer), "in.jsonl:1 (id row 0 é): ")
    lm.close()


@pytest.mark.parametrize("value", [np.nan, -np.inf], ids=str)
def test_a_score_that_is_not_finite_stops_at_its_row_and_keeps_those_before(tmp_path: Path, value: float) -> None:
    lm = CachingLM(InProcessLM(StandInLM()), tmp_path / "cache.sqlite")
    pairs = [InputRow(i, "", "x", f"in.jsonl:{i}") for i in range(3)]
    scores = [ContinuationScore(np.array([-1.0, last], np.float32)) for last in (-1.0, value, -1.0)]
    with (tmp_path / "out.jsonl").open("wb") as file, pytest.raises(RunError, match=r"in\.jsonl:1 \(id 1\).*finite"):
        RowWriter(file, Survey(3, 0, 0, 0), lm).write(Call(0, pairs), scores)
    assert (tmp_path / "out.jsonl").read_bytes().count(b"\n") == 1
    lm.close()


@given(st.lists(st.floats(min_value=-(2.0**100), max_value=0, width=32), min_size=1))
def test_every_number_is_the_same_float32_when_it_is_read_again(logprobs: list[float]) -> None:
    from replug.commands.score import _line

    score = ContinuationScore(np.array(logprobs, dtype=np.float32))
    row = json.loads(_line(InputRow("é", "", "x", "here"), score))
    assert np.array(row["token_logprobs"], np.float32).tobytes() == score.token_logprobs.tobytes()
    assert float(np.float32(row["sum"])) == score.sum_logprob
    assert row["id"] == "é"
