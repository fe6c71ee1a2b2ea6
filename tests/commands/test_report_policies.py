"""`replug report --policies` as a user types it, and `replug ask` with what it wrote."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from replug.data.prepare.sets import import_corpus
from replug.evals.adaptive import pair_name
from replug.evals.adaptive_figures import slug
from replug.evals.popqa_sets import question_of
from replug.models.policy import load_policy
from tests.support.command_line import ROOT, CommandLine
from tests.support.outcome_folders import counted_in_documents, made_up_rows, write_evaluation
from tests.support.small_index import write_small_index

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
    shared |= {"cost_seconds", "cost_prompt_tokens", "cost_dollars", "subjects"}
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
    index = evaluated / "out" if signal == "popularity" else evaluated / "out/found/index/replug"
    typed = ["lm.path=stand_in", "--index", index, "--policy", policy]
    done = replug("ask", "In what city was Person3 born?", *typed, "--json", *given)
    assert done.status == 0, done.printed
    row = json.loads(done.output.splitlines()[-1])
    outcomes = [json.loads(line) for line in (evaluated / "out/outcomes.jsonl").read_text().splitlines()]
    [of] = [one["methods"] for one in outcomes if one["id"] == "Person3"]
    method = MOVING if row["policy"]["retrieves"] else "none"
    assert row["answer"] == of[method]["detail"]["answer"], "as in the evaluation"
    assert row["policy"]["signal"] == signal and len(row["evidence"]) == 2 * row["policy"]["retrieves"]


WORK = ["writer", "baker", "singer"]


@pytest.fixture(scope="module")
def asked_with_shots(replug: CommandLine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """PopQA after two shots with passages, from BM25 and from the LM's own documents; no index is built."""
    root = tmp_path_factory.mktemp("shots")
    people = [f"Person{number}" for number in range(6)]
    questions = [
        {"id": f"{name} {prop}", "subj": name, "prop": prop, "obj": obj, "s_pop": 3**number, "possible_answers": [obj]}
        for number, name in enumerate(people)
        for prop, obj in (("occupation", WORK[number % 3]), ("place of birth", f"Town{number}"))
    ]
    texts = [f"{name} is a {WORK[number % 3]} of{f' Town{number}' * 9}" for number, name in enumerate(people[:4])]
    documents = [{"id": f"d{number}", "text": text} for number, text in enumerate(["nothing at all", *texts])]
    for name, rows in (("questions", questions), ("corpus", documents)):
        (root / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = {
        "out": root / "out",
        "questions.path": root / "questions.jsonl",
        "questions.shots": 2,
        "questions.max_new_tokens": 2,
        "questions.max_questions": 5,
        "questions.query": "who or what is {question}",
        "data.corpus": root / "corpus.jsonl",
        "lm.path": "stand_in",
        "num_resamples": 50,
        "methods": "[none,bm25@1,genread]",
    }
    done = replug("evaluate", ROOT / "configs/eval_popqa.yaml", *(f"{key}={value}" for key, value in keys.items()))
    assert done.status == 0, done.printed
    done = replug("report", root / "out", "--policies", root / "policies")
    assert done.status == 0, done.printed
    return root


@pytest.mark.parametrize("signal", ["popularity", "mean_logprob"])
@pytest.mark.parametrize("pair", [("none", "bm25@1"), ("none", "genread"), ("genread", "bm25@1")], ids=" + ".join)
def test_ask_answers_as_the_evaluation_by_every_method_of_a_policy(replug, asked_with_shots, tmp_path, pair, signal):
    folder = asked_with_shots / "out"
    rows = [json.loads(line) for line in (folder / "outcomes.jsonl").read_text().splitlines()]
    name = slug(pair_name(pair))
    fitted = load_policy(asked_with_shots / f"policies/policies/stand_in/{name}_{signal}.json")
    assert len({row["methods"]["bm25@1"]["detail"]["answer"] for row in rows}) > 1
    for threshold, method in (("never", pair[0]), ("always", pair[1])):
        replace(fitted, thresholds={}, pooled=threshold).save(tmp_path / "policy.json")
        for row in rows:
            relation, subject = row["group"], row["id"].split()[0]
            given = ["--popularity", "7"] if signal == "popularity" else []
            typed = ["--index", folder, "--policy", tmp_path / "policy.json", "--relation", relation, *given]
            done = replug("ask", question_of(relation, subject), *typed, "--json")
            assert done.status == 0, done.printed
            reply, expected = json.loads(done.output.splitlines()[-1]), row["methods"][method]
            assert reply["answer"] == expected["detail"]["answer"]
            assert reply["method"] == {"none": "closed book"}.get(method, method)
            if method != "none":
                assert reply["sum_logprob"] is not None and reply["evidence"]
            if signal == "mean_logprob":
                assert reply["policy"]["value"] == pytest.approx(row["methods"][pair[0]]["numbers"][signal])


def test_questions_that_documents_help_are_shown_with_the_answers_marked(asked_with_shots):
    page = (asked_with_shots / "policies" / "report.html").read_text()
    assert "bm25@1 helps" in page and "first document; answers are marked" in page
    helped = re.findall(
        r"<tr><td>In what city was (Person\d) born\? \((Town\d)\)</td>.*?<td class=text>(.*?)</td>", page
    )
    assert helped and all(name in text and f"<mark>{town}</mark>" in text for name, town, text in helped)


def test_a_policy_to_bm25_refuses_other_documents_and_none(replug, asked_with_shots, tmp_path):
    policy = asked_with_shots / "policies/policies/stand_in/bm25_1_popularity.json"
    typed = ["ask", "In what city was Person2 born?", "--policy", policy, "--popularity", "1", "lm.path=stand_in"]
    done = replug(*typed, "--index", write_small_index(tmp_path, ["Person2 is of Town1"]))
    assert done.status == 2 and "fitted to another retriever or to other documents (bm25:" in done.errors
    done = replug(*typed)
    assert done.status == 2 and "--index is missing: the policy retrieves by bm25@1; expected --index" in done.errors


def test_an_evaluation_is_reported_with_the_costs_of_every_method(evaluated):
    [of] = json.loads((evaluated / "policies" / "report.json").read_text()).values()
    assert set(of["ways"]) == {"bm25@1", MOVING, "genread", "genread + bm25@1", f"genread + {MOVING}"}
    page = (evaluated / "policies" / "report.html").read_text()
    assert "none or genread" in page and f"genread or {MOVING}" in page
    for costs in of["costs"].values():
        assert all(value is not None for value in costs.values())
    assert of["costs"]["genread"]["lm_calls"] == 2 and of["costs"][MOVING]["retriever_calls"] == 1
