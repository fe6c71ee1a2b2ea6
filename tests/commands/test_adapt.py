"""`replug adapt` as a user types it, and `replug ask` with what it wrote."""

import json
from pathlib import Path

import pytest

from replug.data.prepare.sets import import_corpus
from replug.models.policy import load_policy
from tests.support.command_line import ROOT, CommandLine
from tests.support.outcome_folders import counted_in_documents, made_up_rows, write_evaluation


def only(rows: list[dict], *methods: str) -> list[dict]:
    return [{**row, "methods": {name: row["methods"][name] for name in methods}} for row in rows]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Outcomes of a tiny LM, closed book and with BM25's first document."""
    root = tmp_path_factory.mktemp("adapt")
    rows = only(made_up_rows(60), "none", "bm25@1")
    written = write_evaluation(root / "tiny", rows, seconds={"none": 0.2, "bm25@1": 0.5})
    (root / "corpus.jsonl").write_text('{"id": "d", "text": "some words"}\n')
    import_corpus(root / "corpus.jsonl", written / "data" / "corpus")
    return written


# Fitting ----------------------------------------------------------------------------------------------------------


def test_fit_compares_every_signal_and_keeps_one_policy(replug: CommandLine, folder, tmp_path):
    typed = ["--signal", "mean_entropy", "--price-in", "2", "--price-out", "6", "--out", tmp_path / "policy.json"]
    done = replug("adapt", "fit", folder, *typed)
    assert done.status == 0, done.printed
    for shown in ("tiny: none or bm25@1, 60 questions", "margin", "oracle", "AUROC", "dollars", "by relation"):
        assert shown in done.output
    policy = load_policy(tmp_path / "policy.json")
    assert (policy.signal, policy.augmented, policy.lm) == ("mean_entropy", "bm25@1", "tiny:float32")
    assert policy.retriever.startswith("bm25:") and policy.fitted["questions"] == 60


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (["--signal", "beauty"], "--signal: the outcomes hold no beauty; expected one of popularity, frequency"),
        (["--augmented", "lsr"], "--augmented: no folder holds the method lsr; expected one of none, bm25@1"),
        (["--price-in", "1"], "--price-out is missing; expected both prices, or none"),
    ],
)
def test_fit_says_what_is_wrong_and_writes_nothing(replug: CommandLine, folder, tmp_path, typed, message):
    done = replug("adapt", "fit", folder, "--out", tmp_path / "policy.json", *typed)
    assert done.status == 2 and message in done.errors
    assert not (tmp_path / "policy.json").exists()


def test_a_policy_is_of_one_lm(replug: CommandLine, folder, tmp_path):
    other = write_evaluation(tmp_path / "other", only(made_up_rows(60), "none", "bm25@1"), lm="large")
    done = replug("adapt", "fit", folder, other, "--out", tmp_path / "policy.json")
    assert done.status == 2 and "several LMs (tiny, large); expected one" in done.errors


# Reporting --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_report_shows_several_lms_with_the_papers_numbers_and_every_figure(replug: CommandLine, folder, tmp_path):
    rows = only(made_up_rows(60, knows=0.9, seed=1), "none", "bm25@1")
    other = write_evaluation(tmp_path / "large <b>", rows, lm="large <b>")
    out = tmp_path / "report"
    done = replug("adapt", "report", folder, other, "--out", out, "--price-in", "2", "--price-out", "6")
    assert done.status == 0, done.printed
    assert str(out / "report.html") in done.output
    page = (out / "report.html").read_text()
    for shown in ("tiny", "large &lt;b&gt;", "46.5%", "15%, 16% and 19%", "0.46, 3.08, 2.80, 3.25", "recall@1"):
        assert shown in page
    assert "<b>" not in page
    found = {path.stem for path in out.glob("*.svg")}
    shared = {"accuracy", "adaptive", "rarest", "retrieved", "relations", "correlation"}
    shared |= {"cost_seconds", "cost_prompt_tokens", "cost_dollars"}
    of_each = ("popularity", "relative_popularity", "adaptive_bm25_1", "policies_bm25_1", "thresholds_bm25_1")
    assert found == shared | {f"{name}_{lm}" for name in of_each for lm in ("tiny", "large__b_")}
    assert page.count("<svg") == len(found)


def test_the_reports_numbers_are_json(replug: CommandLine, folder, tmp_path):
    assert replug("adapt", "report", folder, "--out", tmp_path / "report").status == 0
    text = (tmp_path / "report" / "report.json").read_text()
    of = json.loads(text, parse_constant=pytest.fail)["tiny"]  # no NaN, which is no JSON
    cells = of["ways"]["bm25@1"]["help and harm"]
    assert sum(cell["n"] for cell in cells) == of["n"] == 60
    right = {(cell["closed_right"], cell["augmented_right"]): cell["share"] for cell in cells}
    assert right[True, True] + right[True, False] == pytest.approx(of["accuracy"]["none"]["value"])
    assert right[True, True] + right[False, True] == pytest.approx(of["accuracy"]["bm25@1"]["value"])
    for split in (of["popularity"], of["relative popularity"], of["relations"], of["ways"]["bm25@1"]["popularity"]):
        assert sum(one["n"] for one in split) == 60
    for ours, of_all in zip(of["ways"]["bm25@1"]["popularity"], of["popularity"], strict=True):
        accuracy = ours["accuracy"]
        policy = accuracy.pop("adaptive bm25@1")
        assert accuracy == of_all["accuracy"] and 0 <= policy <= 1
    policies = {(one["name"], one["thresholds"]) for one in of["ways"]["bm25@1"]["policies"]}
    assert {("never", None), ("popularity", "by relation"), ("popularity", "one for all"), ("oracle", None)} <= policies


def test_the_report_counts_documents_where_questions_tell_no_page_views(replug: CommandLine, tmp_path):
    rows = counted_in_documents(only(made_up_rows(24), "none", "bm25@1"))
    folder = write_evaluation(tmp_path / "counted", rows)
    done = replug("adapt", "report", folder, "--out", tmp_path / "report")
    assert done.status == 0, done.printed
    figure = (tmp_path / "report" / "thresholds_bm25_1_tiny.svg").read_text()
    assert "documents that name the subject; blue: retrieves" in figure
    done = replug("adapt", "fit", folder, "--out", tmp_path / "policy.json")
    assert done.status == 2 and "--signal: the outcomes hold no popularity; expected one of frequency" in done.errors


@pytest.mark.parametrize(
    ("methods", "drop", "message"),
    [
        (["none"], None, "expected none, and a method with documents"),
        (["none", "bm25@1"], "popularity", "no popularity"),
    ],
)
def test_outcomes_that_no_report_can_be_made_of_are_refused(replug: CommandLine, tmp_path, methods, drop, message):
    rows = only(made_up_rows(8), *methods)
    for row in rows:
        for outcome in row["methods"].values():
            outcome["numbers"].pop(drop, None)
    done = replug("adapt", "report", write_evaluation(tmp_path / "one", rows), "--out", tmp_path / "report")
    assert done.status == 2 and message in done.errors


# From an evaluation to an answer ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def evaluated(replug: CommandLine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """PopQA of eight people on stand-ins, whose documents say where they were born."""
    root = tmp_path_factory.mktemp("popqa")
    people = [{"subj": f"Person{n}", "prop": "place of birth", "obj": f"Town{n}", "s_pop": 3**n} for n in range(8)]
    questions = [{"id": one["subj"], **one, "possible_answers": [one["obj"]]} for one in people]
    documents = [{"id": f"d{n}", "text": f"{one['subj']} is of Town{n} " * 5} for n, one in enumerate(people)]
    for name, rows in (("questions", questions), ("corpus", documents)):
        (root / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = {
        "out": root / "out",
        "questions.path": root / "questions.jsonl",
        "questions.shots": 0,
        "questions.max_new_tokens": 2,
        "questions.latency_questions": 2,
        "data.corpus": root / "corpus.jsonl",
        "retriever.path": "stand_in",
        "lm.path": "stand_in",
        "index.dtype": "float32",
        "num_resamples": 200,
        "methods": "[none,bm25@1,replug@2,genread]",
    }
    done = replug("evaluate", ROOT / "configs/eval_popqa.yaml", *(f"{key}={value}" for key, value in keys.items()))
    assert done.status == 0, done.printed
    return root / "out"


@pytest.mark.slow
@pytest.mark.parametrize(
    "signal",
    [  # one of the question, one of the LM, one of the retriever; the others of each are nightly
        "popularity",
        "mean_entropy",
        "top_score",
        *(pytest.param(name, marks=pytest.mark.nightly) for name in ("frequency", "mean_logprob", "margin")),
    ],
)
def test_a_policy_of_an_evaluation_is_followed_with_its_index_and_lm(replug, evaluated, tmp_path, signal):
    typed = ["--augmented", "replug@2", "--signal", signal, "--out", tmp_path / "policy.json"]
    done = replug("adapt", "fit", evaluated, *typed)
    assert done.status == 0 and "seconds" in done.output, done.printed
    given = ["--popularity", "3"] if signal in ("popularity", "frequency") else []
    typed = ["lm.path=stand_in", "--index", evaluated / "found/index/replug", "--policy", tmp_path / "policy.json"]
    done = replug("ask", "Q: In what city was Person3 born? A:", *typed, "--json", *given)
    assert done.status == 0, done.printed
    row = json.loads(done.output.splitlines()[-1])
    assert row["policy"]["signal"] == signal and len(row["evidence"]) == 2 * row["policy"]["retrieves"]


def test_an_evaluation_is_reported_with_what_every_way_costs(replug: CommandLine, evaluated, tmp_path):
    done = replug("adapt", "report", evaluated, "--out", tmp_path / "report")
    assert done.status == 0, done.printed
    [of] = json.loads((tmp_path / "report" / "report.json").read_text()).values()
    assert set(of["ways"]) == {"bm25@1", "replug@2", "genread", "genread + bm25@1", "genread + replug@2"}
    page = (tmp_path / "report" / "report.html").read_text()
    assert "Closed book or genread" in page and "Genread or replug@2" in page
    for costs in of["costs"].values():
        assert all(value is not None for value in costs.values())
    assert of["costs"]["genread"]["lm_calls"] == 2 and of["costs"]["replug@2"]["retriever_calls"] == 1
