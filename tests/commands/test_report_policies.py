"""`replug report --policies` as a user types it, and `replug ask` with what it wrote."""

import json
from pathlib import Path

import pytest

from replug.data.prepare.sets import import_corpus
from replug.models.policy import load_policy
from tests.support.command_line import ROOT, CommandLine
from tests.support.outcome_folders import counted_in_documents, made_up_rows, write_evaluation

MOVING = "replug@2/posterior"


def only(rows: list[dict], *methods: str) -> list[dict]:
    return [{**row, "methods": {name: row["methods"][name] for name in methods}} for row in rows]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Outcomes of two LMs, closed book and with BM25's first document; of the second its documents are gone."""
    root = tmp_path_factory.mktemp("policies")
    rows = only(made_up_rows(60), "none", "bm25@1")
    tiny = write_evaluation(root / "tiny", rows, seconds={"none": 0.2, "bm25@1": 0.5})
    (root / "corpus.jsonl").write_text('{"id": "d", "text": "some words"}\n')
    import_corpus(root / "corpus.jsonl", tiny / "data" / "corpus")
    rows = only(made_up_rows(60, knows=0.9, seed=1), "none", "bm25@1")
    return [tiny, write_evaluation(root / "large <b>", rows, lm="large <b>")]


@pytest.fixture(scope="module")
def written(replug: CommandLine, folders: list[Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    out = tmp_path_factory.mktemp("report") / "report"
    done = replug("report", *folders, "--policies", out, "--price-in", "2", "--price-out", "6")
    assert done.status == 0, done.printed
    return out, done.printed


def test_every_signal_is_compared_and_its_policy_written(written: tuple[Path, str]):
    out, printed = written
    for shown in (
        "tiny: none or bm25@1",
        "p (Holm)",
        "may gain nothing",
        "oracle",
        "AUROC",
        "dollars",
        "by relation",
        str(out),
    ):
        assert shown in printed
    signals = ("popularity", "frequency", "mean_logprob", "mean_entropy", "top_score")
    names = {str(path.relative_to(out)) for path in out.glob("policies/*/*.json")}
    assert names == {f"policies/tiny/bm25_1_{signal}.json" for signal in signals}
    assert "no policy of bm25@1 is written: the documents are gone" in printed, "of the other LM"
    policy = load_policy(out / "policies/tiny/bm25_1_mean_entropy.json")
    assert (policy.signal, policy.augmented, policy.lm) == ("mean_entropy", "bm25@1", "tiny:float32")
    assert policy.retriever.startswith("bm25:") and policy.fitted["questions"] == 60


def test_the_page_shows_several_lms_with_the_papers_numbers_and_every_figure(written: tuple[Path, str]):
    out, _ = written
    page = (out / "report.html").read_text()
    for shown in ("tiny", "large &lt;b&gt;", "46.5%", "0.46, 3.08, 2.80, 3.25", "recall@1"):
        assert shown in page
    assert "<b>" not in page
    found = {path.stem for path in out.glob("*.svg")}
    shared = {"accuracy", "adaptive", "relations", "correlation"}
    shared |= {"cost_seconds", "cost_prompt_tokens", "cost_dollars"}
    of_each = ("popularity", "adaptive_bm25_1", "policies_bm25_1")
    assert found == shared | {f"{name}_{lm}" for name in of_each for lm in ("tiny", "large__b_")}
    assert page.count("<svg") == len(found)


def test_the_pages_numbers_are_json(written: tuple[Path, str]):
    of = json.loads((written[0] / "report.json").read_text(), parse_constant=pytest.fail)["tiny"]
    cells = of["ways"]["bm25@1"]["help and harm"]
    assert sum(cell["n"] for cell in cells) == of["n"] == 60
    right = {(cell["closed_right"], cell["augmented_right"]): cell["share"] for cell in cells}
    assert right[True, True] + right[True, False] == pytest.approx(of["accuracy"]["none"]["value"])
    assert right[True, True] + right[False, True] == pytest.approx(of["accuracy"]["bm25@1"]["value"])
    for split in (of["popularity"], of["relations"], of["ways"]["bm25@1"]["popularity"]):
        assert sum(one["n"] for one in split) == 60
    for ours, of_all in zip(of["ways"]["bm25@1"]["popularity"], of["popularity"], strict=True):
        policy = ours["accuracy"].pop("adaptive bm25@1")
        assert ours["accuracy"] == of_all["accuracy"] and 0 <= policy <= 1


def test_documents_are_counted_where_questions_have_no_page_views(replug: CommandLine, tmp_path):
    folder = write_evaluation(tmp_path / "counted", counted_in_documents(only(made_up_rows(24), "none", "bm25@1")))
    done = replug("report", folder, "--policies", tmp_path / "report")
    assert done.status == 0, done.printed
    assert "documents that name the subject" in (tmp_path / "report" / "popularity_tiny.svg").read_text()


def test_one_price_alone_is_refused(replug: CommandLine, folders: list[Path], tmp_path):
    done = replug("report", *folders, "--policies", tmp_path / "report", "--price-in", "1")
    assert done.status == 2 and "--price-out is missing; expected both prices, or none" in done.errors


# From an evaluation to an answer ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def evaluated(replug: CommandLine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """PopQA of eight people on stand-ins, whose documents say where they were born, and its policies."""
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
        "methods": f"[none,bm25@1,{MOVING},genread]",
    }
    done = replug("evaluate", ROOT / "configs/eval_popqa.yaml", *(f"{key}={value}" for key, value in keys.items()))
    assert done.status == 0, done.printed
    done = replug("report", root / "out", "--policies", root / "policies")
    assert done.status == 0, done.printed
    return root


@pytest.mark.slow
@pytest.mark.parametrize(
    "signal",
    [  # one of the question, one of the LM, one of the retriever; the others of each are nightly
        "popularity",
        "mean_entropy",
        "top_score",
        *(pytest.param(name, marks=pytest.mark.nightly) for name in ("frequency", "mean_logprob")),
    ],
)
def test_a_policy_of_an_evaluation_is_followed_with_its_index_and_lm(replug, evaluated, signal):
    policy = evaluated / f"policies/policies/stand_in/replug_2_posterior_{signal}.json"
    given = ["--popularity", "3"] if signal in ("popularity", "frequency") else []
    typed = ["lm.path=stand_in", "--index", evaluated / "out/found/index/replug", "--policy", policy]
    done = replug("ask", "In what city was Person3 born?", *typed, "--json", *given)
    assert done.status == 0, done.printed
    row = json.loads(done.output.splitlines()[-1])
    outcomes = [json.loads(line) for line in (evaluated / "out/outcomes.jsonl").read_text().splitlines()]
    [of] = [one["methods"] for one in outcomes if one["id"] == "Person3"]
    method = MOVING if row["policy"]["retrieves"] else "none"
    assert row["answer"] == of[method]["detail"]["answer"], "as in the evaluation"
    assert row["policy"]["signal"] == signal and len(row["evidence"]) == 2 * row["policy"]["retrieves"]


def test_an_evaluation_is_reported_with_the_costs_of_every_method(evaluated):
    [of] = json.loads((evaluated / "policies" / "report.json").read_text()).values()
    assert set(of["ways"]) == {"bm25@1", MOVING, "genread", "genread + bm25@1", f"genread + {MOVING}"}
    page = (evaluated / "policies" / "report.html").read_text()
    assert "none or genread" in page and f"genread or {MOVING}" in page
    for costs in of["costs"].values():
        assert all(value is not None for value in costs.values())
    assert of["costs"]["genread"]["lm_calls"] == 2 and of["costs"][MOVING]["retriever_calls"] == 1
