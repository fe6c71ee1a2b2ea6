"""Several draws of demonstrations: what is averaged over them, what is refused, and one command over two."""

import json
import statistics
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from replug.config.errors import UserError
from replug.config.evaluation_schema import EvaluationConfig
from replug.config.load import load_evaluation_config
from replug.config.schema import LMConfig
from replug.evals import run
from replug.evals.draw_table import compare_draws, draw_table, other_documents_line
from replug.evals.draws import alike_lines, configs_by_draw, evaluate_draws
from replug.evals.folder import EvaluationFolder
from replug.evals.internet.deciding import DecidedAnswers
from replug.evals.kinds import DRAW_DEMONSTRATIONS, check_evaluation, kind_names
from replug.evals.loop import Metric
from replug.evals.tasks.open_qa import BOUNDS, OpenQa
from replug.evals.tasks.popqa import PopQa
from replug.models import build
from replug.models.caching_lm import CachingLM
from replug.models.lm_source import LMSource

ROOT = Path(__file__).parents[2]
METHODS = ("none", "replug")
CONFIG = EvaluationConfig("open_qa", "out", methods=list(METHODS), num_resamples=200)


def rows_of(*right: tuple[float, float], change: str = "") -> list[dict]:
    """Rows of examples.parquet: which questions the two methods answer; cost is not known of `none`'s first."""
    return [
        {
            "id": f"q{number}",
            "group": "ab"[number % 2],
            "method": method,
            "question": f"who is {number}{change}",
            "references": ["Ada"],
            "documents": ["d1", "d2"],
            "exact_match": value,
            "cost": None if method == "none" and number == 0 else 2.0,
        }
        for number, of in enumerate(right)
        for method, value in zip(METHODS, of, strict=True)
    ]


def results_of(rows: list[dict]) -> dict:
    """As results.json has it, of what draws are compared by."""
    found: dict = {}
    for method in METHODS:
        own = [row for row in rows if row["method"] == method]
        groups = {"": own, **{f"/{name}": [row for row in own if row["group"] == name] for name in "ab"}}
        found[method] = {
            f"exact_match{name}": {"value": float(np.mean([row["exact_match"] for row in some]))}
            for name, some in groups.items()
        }
    for name in list(found["none"]):
        value = found["replug"][name]["value"] - found["none"][name]["value"]
        found["replug"][f"{name} - none"] = {"value": value}
    found["replug"] |= {"cost": {"value": 2.0}, "cost/a": {"value": 2.0}, "cost/b": {"value": 2.0}}
    found["replug"]["seconds"] = {"value": 0.1}
    return found


DRAWS = {
    "seed0": rows_of((0, 1), (0, 1), (1, 1), (0, 0)),
    "seed1": rows_of((0, 1), (0, 0), (0, 1), (0, 0)),
    "seed4": rows_of((1, 1), (0, 1), (0, 1), (0, 1)),
}
RESULTS = {name: results_of(rows) for name, rows in DRAWS.items()}


def test_methods_are_compared_by_outcomes_averaged_over_draws_and_their_spread_is_told():
    compared = compare_draws(CONFIG, RESULTS, DRAWS)
    of_draws = [0.75, 0.5, 1.0]
    replug, none = compared["replug"], compared["none"]["exact_match"]
    assert replug["exact_match"]["value"] == pytest.approx(statistics.mean(of_draws))
    assert replug["exact_match"]["draws"] == dict(zip(DRAWS, of_draws, strict=True))
    assert replug["exact_match"]["sd"] == pytest.approx(statistics.stdev(of_draws))
    assert (replug["exact_match"]["least"], replug["exact_match"]["greatest"]) == (0.5, 1.0)
    assert none["n"] == 4, "questions, and not questions of draws"
    difference = replug["exact_match - none"]
    assert difference["value"] == pytest.approx(replug["exact_match"]["value"] - none["value"])
    assert difference["draws"] == {"seed0": 0.5, "seed1": 0.5, "seed4": 0.75} and difference["p_holm"] <= 1
    assert replug["exact_match/a"]["value"] == 1.0, "questions 0 and 2"
    assert "cost" in replug and "cost" not in compared["none"], "what some draw does not know is no mean"
    assert "seconds" not in replug, "which are of a few questions"


def test_questions_of_the_corpus_are_a_group():
    told = {name: json.loads(json.dumps(of)) for name, of in RESULTS.items()}
    for of in told.values():
        for entries in of.values():
            for name in list(entries):
                metric, separator, other = name.partition(" - ")
                if "/" not in metric:
                    for group in ("in the corpus", "not in the corpus"):
                        entries[f"{metric}/{group}{separator}{other}"] = entries[name]
    compared = compare_draws(CONFIG, told, DRAWS, in_corpus={"q0"})
    assert compared["replug"]["exact_match/not in the corpus"]["n"] == 3


def test_the_table_has_the_spread_over_draws_and_the_intervals_over_questions():
    lines = draw_table(compare_draws(CONFIG, RESULTS, DRAWS), CONFIG, list(DRAWS)).splitlines()
    assert lines[:7] == [
        "open_qa: 3 draws of demonstrations (seed0, seed1, seed4), n = 4",
        "",
        "| exact_match over draws | mean | standard deviation | least | greatest |",
        "| --- | --- | --- | --- | --- |",
        "| none | 0.1667 | 0.1443 | 0.0000 | 0.2500 |",
        "| replug | 0.7500 | 0.2500 | 0.5000 | 1.0000 |",
        "| replug − none | 0.5833 | 0.1443 | 0.5000 | 0.7500 |",
    ]
    assert any(line.startswith("- exact_match of replug − none: +0.5833 (") for line in lines)
    assert any(line.startswith("Intervals: 95%, each by itself, over 4 examples.") for line in lines)


@pytest.mark.parametrize("other", [rows_of((0, 1), (0, 1), (1, 1)), rows_of(*[(0, 1)] * 4, change="?")])
def test_draws_of_other_questions_are_refused(other: list[dict]):
    with pytest.raises(UserError, match=r"question 'q\d' is not the same in the draws seed0 and other"):
        compare_draws(CONFIG, {**RESULTS, "other": RESULTS["seed0"]}, {**DRAWS, "other": other})


def test_draws_without_demonstrations_of_their_own_are_named():
    draws = {"seed0": ["a", "b"], "seed1": ["b", "a"], "seed2": ["a", "c"], "seed3": ["d"], "seed4": ["d"]}
    assert list(alike_lines(draws)) == [
        "seed0, seed1 show the same demonstrations and differ in their order alone.",
        "seed3, seed4 show the same demonstrations in one order: they are one draw.",
    ]


def test_kinds_that_draw_demonstrations_are_those_that_are_named_and_their_metrics_are_means_of_numbers():
    kinds = {name: import_module(f"replug.evals.tasks.{name}").EVALUATION for name in kind_names()}
    assert sorted(name for name, kind in kinds.items() if kind.demonstrations) == list(DRAW_DEMONSTRATIONS)
    decided = [DecidedAnswers([], metric).metrics for metric in ("exact_match", "accuracy")]
    for metrics in (OpenQa.metrics, BOUNDS, PopQa.metrics, *decided):
        assert all(replace(one, may_be_unknown=False) == Metric(name) for name, one in metrics.items())


def write(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def question(name: str, number: int) -> dict:
    return {"id": f"{name}{number}", "question": f"what is {name} {number}?", "answers": [f"{name}answer{number}"]}


def config_of(tmp_path: Path, *overrides: str, shown: int = 12) -> EvaluationConfig:
    """Of open questions, of which the corpus tells the answers to some."""
    files = {name: [question(name, number) for number in range(count)] for name, count in (("q", 6), ("d", shown))}
    files["corpus"] = [{"id": str(n), "text": f"q {n} is qanswer{n} qanswer{n}"} for n in range(3)]
    files["corpus"] += [{"id": str(n), "text": f"d {n} is danswer{n}"} for n in range(3, 30)]
    paths = {name: write(tmp_path / f"{name}.jsonl", rows) for name, rows in files.items()}
    own = [
        *(f"questions.path={paths['q']}", f"questions.demonstrations={paths['d']}", f"data.corpus={paths['corpus']}"),
        *("questions.shots=2", "questions.max_new_tokens=2", "methods=[none,bm25@2]", "num_resamples=100"),
        *("lm.path=stand_in", f"out={tmp_path / 'out'}", *overrides),
    ]
    return load_evaluation_config(ROOT / "configs/eval_open_qa.yaml", own)


def test_draws_that_have_other_documents_say_so():
    assert other_documents_line(DRAWS) == ""
    other = [{**row, "documents": ["d2", "d1"]} if row["id"] == "q1" else row for row in DRAWS["seed1"]]
    line = other_documents_line({**DRAWS, "seed1": other})
    assert line == "Draws differ in documents too for 2 of 8 questions and methods.\n"


@contextmanager
def opened_here(lm: object, source: LMSource, cache: Path) -> Iterator[CachingLM]:
    """In this process: no Ray."""
    with closing(CachingLM(source.open_here(), build.cache_path(lm, cache))) as opened:
        yield opened


@pytest.fixture
def budgets(monkeypatch) -> list[Path]:
    """Evaluations work in this process; which files their requests were counted in."""
    counted: list[Path] = []
    lm_source = build.lm_source

    def counting(lm: LMConfig, budget_file: Path, cache: Path) -> LMSource:
        counted.append(budget_file)
        return lm_source(lm, budget_file, cache)

    monkeypatch.setattr(build, "lm_source", counting)
    monkeypatch.setattr(build, "opened_lm", opened_here)
    monkeypatch.setattr(run, "evaluation_cluster", lambda config, *_: nullcontext(config.run_config()))
    return counted


def test_one_command_measures_every_draw_and_goes_on_where_it_stopped(tmp_path, budgets, caplog):
    config = config_of(tmp_path, "questions.demonstration_seeds=[0,3]")
    compared = evaluate_draws(config)
    first, second = (EvaluationFolder(tmp_path / f"out/seed{seed}") for seed in (0, 3))
    own = [json.loads(folder.results.read_text()) for folder in (first, second)]
    for method in ("none", "bm25@2"):
        values = [of[method]["f1"]["value"] for of in own]
        assert compared[method]["f1"]["value"] == pytest.approx(statistics.mean(values))
        assert list(compared[method]["f1"]["draws"].values()) == values
    assert compared["bm25@2"]["exact_match - none"].keys() >= {"interval", "p", "p_holm", "sd"}
    assert (second.data / "corpus").is_symlink() and not second.scores.is_file(), "documents and cache are the first's"
    assert first.overlaps.read_bytes() == second.overlaps.read_bytes()
    assert first.temperatures.read_bytes() == second.temperatures.read_bytes()
    out = EvaluationFolder(tmp_path / "out")
    assert json.loads(out.results.read_text()) == compared and "same demonstrations" not in out.table.read_text()
    assert budgets == [out.budget_file] * 2, "one budget of requests for all draws"
    out.results.unlink()
    second.results.unlink()
    caplog.clear()
    assert evaluate_draws(config) == compared
    assert f"{first.path} holds a finished evaluation" in caplog.text
    assert f"{second.path} holds a finished" not in caplog.text


def test_each_draw_is_an_evaluation_of_one_seed_with_the_same_questions(tmp_path):
    config = config_of(tmp_path, "questions.demonstration_seeds=[2,0]")
    configs = dict(configs_by_draw(config))
    assert [one.questions.demonstration_seeds for one in configs.values()] == [[2], [0]]
    assert {one.seed for one in configs.values()} == {config.seed}
    kind = check_evaluation(config)
    queries = [kind.make_dataset(one, None).queries for one in configs.values()]
    assert queries[0][:6] == queries[1][:6] and set(queries[0][6:]) != set(queries[1][6:])
    with pytest.raises(ValueError, match="unpack"):
        kind.make_dataset(config, None)


def test_draws_of_popqa_show_other_questions_of_other_relations_before_the_same_ones(tmp_path):
    rows = {
        name: [
            {"id": f"{name}{n} {prop}", "subj": f"{name}{n}", "prop": prop, "obj": "x", "s_pop": 1}
            for n in range(count)
            for prop in ("occupation", "place of birth")
        ]
        for name, count in (("asked", 4), ("shown", 20))
    }
    answered = {name: [{**row, "possible_answers": ["x"]} for row in of] for name, of in rows.items()}
    paths = {name: write(tmp_path / f"{name}.jsonl", of) for name, of in answered.items()}
    own = [f"questions.path={paths['asked']}", f"questions.demonstrations={paths['shown']}", "questions.shots=3"]
    own += ["lm.path=stand_in", "methods=[none]", "data.corpus=null", f"out={tmp_path}"]
    config = load_evaluation_config(ROOT / "configs/eval_popqa.yaml", [*own, "questions.demonstration_seeds=[0,1]"])
    kind = check_evaluation(config)
    configs = list(dict(configs_by_draw(config)).values())
    queries = [kind.make_dataset(one, None).queries[:8] for one in configs]
    assert queries[0] == queries[1]
    assert not list(alike_lines({one.out: kind.demonstrations(one) for one in configs}))


def test_documents_that_were_changed_between_draws_are_refused(tmp_path, budgets):
    configs = configs_by_draw(config_of(tmp_path, "questions.demonstration_seeds=[0,1]"))
    run.evaluate(next(configs)[1])
    write(tmp_path / "corpus.jsonl", [{"id": "0", "text": "another"}])
    with pytest.raises(UserError, match="imported from other documents"):
        run.evaluate(next(configs)[1])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["questions.demonstrations=null"], "demonstration_seeds is set without questions.demonstrations: other"),
        (["questions.shots=0"], "demonstration_seeds is set, but questions.shots is 0, so that none is shown"),
        (["evaluation=mmlu"], "is set, but evaluation=mmlu draws none; internet_qa, open_qa, popqa do"),
        (["lm.path=null", "lms={a: stand_in}"], "lms and several questions.demonstration_seeds are set"),
        (["questions.demonstration_seeds=[1,1]"], r"is \[1, 1\]; expected different numbers of 0 or more, such as"),
        (["questions.demonstration_seed=1"], r"unknown key; did you mean questions\.demonstration_seeds\?"),
    ],
)
def test_seeds_that_would_change_nothing_or_something_else_are_refused(tmp_path, overrides, message):
    with pytest.raises(UserError, match=message):
        check_evaluation(config_of(tmp_path, "questions.demonstration_seeds=[0,1]", *overrides))
