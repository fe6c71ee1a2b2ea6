"""LM backends: one protocol, one list. Adding one touches its own file, the list, and a key if it needs one."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from replug.config.errors import UserError
from replug.config.load import load_ask_config
from replug.config.schema import LMConfig
from replug.models import build
from replug.models.black_box_lm import AsyncLM
from replug.models.build import lm_source, lm_tokenizer_json, opened_lm
from replug.models.local.local_source import HuggingFaceSource
from replug.models.local.stand_in_lm import StandInLM, StandInSource
from tests.support import toy_backend
from tests.support.command_line import CommandLine
from tests.support.fault_server import MODEL, FaultServer
from tests.support.runs import what_must_be_equal
from tests.support.tokenizers import write_family
from tests.support.toy_backend import ToySource

PREFIXES, CONTINUATIONS = ["a b c", "c d", "a b c"], [" a b", " e", " c"]


@pytest.fixture
def with_toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "BACKENDS", [toy_backend.source, *build.BACKENDS])


def lm_section(*overrides: str) -> LMConfig:
    return load_ask_config(list(overrides)).lm


def bits(lm: AsyncLM) -> list[bytes]:
    return [score.token_logprobs.tobytes() for score in lm.score(PREFIXES, CONTINUATIONS)]


def test_the_path_names_the_backend(with_toy: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HuggingFaceSource, "connect", lambda *_: None)  # there is no such name on the hub

    def source(path: str) -> object:
        return lm_source(lm_section(f"lm.path={path}"), tmp_path / "budget.json", tmp_path / "scores.sqlite")

    assert source("stand_in") == StandInSource()
    assert source("stand_in:0.25") == StandInSource(0.25)
    assert isinstance(source("toy:lm"), ToySource)
    assert source("somebody/lm") == HuggingFaceSource("somebody/lm", lm_dtype())
    with pytest.raises(UserError, match=r"lm\.path: \./nothing does not exist"):
        source("./nothing")


def lm_dtype() -> str:
    from replug.models.hardware import dtype_name

    return dtype_name("auto")


def test_a_server_is_asked_and_probed_before_anything_heavy_and_is_the_lm_that_is_opened(tmp_path: Path) -> None:
    with FaultServer() as server:
        lm = lm_section(f"lm.url={server.url}", f"lm.model={MODEL}")
        source = lm_source(lm, tmp_path / "budget.json", tmp_path / "scores.sqlite")
        assert json.loads((tmp_path / "budget.json").read_text())["requests"] > 0
        assert source.identity.startswith(f"{MODEL}#")
        assert (source.roles, source.tokenizer()) == ((), None)
        with opened_lm(lm, source, tmp_path / "scores.sqlite") as opened:
            assert bits(opened) == bits(source.open_here())
        again = lm_source(lm, tmp_path / "budget.json", tmp_path / "scores.sqlite")
        assert again.identity == source.identity
        again.open_here().close()


def test_a_server_that_is_not_there_is_told_at_once_and_its_tokenizer_needs_no_server(tmp_path: Path) -> None:
    lm = lm_section("lm.url=http://127.0.0.1:1/v1", "lm.model=words", "lm.patience_minutes=0.001")
    with pytest.raises(UserError, match=r"lm\.url: http://127.0.0.1:1/v1 cannot be reached"):
        lm_source(lm, tmp_path / "budget.json", tmp_path / "scores.sqlite")
    with pytest.raises(UserError, match=r"lm\.tokenizer is missing"):
        lm_tokenizer_json(lm)
    lm.tokenizer = str(tmp_path / "tokenizer")
    write_family("Llama 2", tmp_path / "tokenizer")
    (tmp_path / "tokenizer/config.json").write_text("{}")
    assert "Prepend" not in lm_tokenizer_json(lm), "it counts the tokens of what stands inside a text"


def test_a_toy_is_scored_and_cached_without_ray(with_toy: None, tmp_path: Path) -> None:
    lm, cache = lm_section("lm.path=toy:lm"), tmp_path / "scores.sqlite"
    source = lm_source(lm, tmp_path / "budget.json", cache)
    for hits in (0, 3):
        with opened_lm(lm, source, cache) as opened:
            expected = StandInLM().score(PREFIXES, CONTINUATIONS)
            assert bits(opened) == [score.token_logprobs.tobytes() for score in expected]
            assert opened.num_hits == hits
            assert opened.metrics()["batch_fill"] == 1


@pytest.mark.slow
def test_a_toy_trains_and_answers_through_the_command_line_with_the_stand_ins_numbers(
    with_toy: None, quiet_run: Path, finish: Callable[..., str], replug: CommandLine, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    finish(run, "lm.path=toy:lm")
    assert what_must_be_equal(run) == what_must_be_equal(quiet_run)
    assert (run / "results.json").read_text() == (quiet_run / "results.json").read_text()
    answered = replug("ask", "a b", "--index", run, "--max-new-tokens", 3, "--json")
    assert json.loads(answered.output)["answer"], answered.printed
