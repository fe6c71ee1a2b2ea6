"""Questions about the documents: how they are made and dealt, judge a run, train it, and choose its weights."""

import json
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest

from replug.config.errors import UserError
from replug.config.load import load_config
from replug.data.records import Document
from replug.data.sources.built_in_texts import stand_in_vocabulary
from replug.data.store import PreparedSet
from replug.evals.evidence import RetrievedDocuments
from replug.evals.loop import Item
from replug.evals.questions import OpenQuestion
from replug.models.black_box_lm import ContinuationScore
from replug.models.build import load_encoder
from replug.models.generation import Generated
from replug.models.local.stand_in_lm import StandInLM
from replug.models.preparing import prepared_set
from replug.train.development import DevQuestions
from replug.train.evaluation import judge_by_questions
from replug.train.questions import make_questions, training_questions, write_questions
from tests.support.command_line import ROOT, CommandLine, start_process
from tests.support.evaluating import without_ray
from tests.support.preparing import debug_set
from tests.support.runs import metrics, wait_for_step, what_must_be_equal

DEBUG = ROOT / "configs/debug.yaml"
NUM_DOCUMENTS = 240
ON_QUESTIONS = (
    *("train.examples=questions", "data.questions=rule", "loss.contrastive=1"),
    *("train.max_steps=30", "train.batch_size=16", "train.lr=0.003", "loss.gamma=0.05", "evaluate.heldout=false"),
    *("data.source=null", "data.num_queries=1000", "data.num_heldout=100", "refresh.every_steps=3000"),
    "refresh.lag_steps=null",
)


def text_of(words: list[str], year: int) -> str:
    return f"{' '.join(words).capitalize()} were built in {year}."


def write_rows(folder: Path, rows: dict[str, list[dict]]) -> list[str]:
    """Write a file of each name, and return the keys that name them."""
    for name, content in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    return [f"data.{name}={folder / name}.jsonl" for name in rows]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The keys that name a corpus of made-up sentences, each with a year, and texts that nothing reads."""
    folder, rng = tmp_path_factory.mktemp("rows"), np.random.default_rng(4)
    vocabulary = [word for topic in stand_in_vocabulary() for word in topic]
    documents = [
        {"id": f"d{number}", "text": text_of(rng.choice(vocabulary, 8).tolist(), 1500 + number), "source": f"s{number}"}
        for number in range(NUM_DOCUMENTS)
    ]
    texts = {
        split: [{"id": f"{split}{row}", "context": f"{split} {row}", "continuation": " x"} for row in range(20)]
        for split in ("train", "heldout")
    }
    return write_rows(folder, {"corpus": documents, **texts})


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, rows: list[str]) -> Path:
    """A run on questions alone, for which no LM is named."""
    run = tmp_path_factory.mktemp("on-questions") / "run"
    with without_ray() as here:
        here.finish(run, *ON_QUESTIONS, *rows, "lm.path=null")
    return run


def read(run: Path, split: str) -> list[dict]:
    return [json.loads(line) for line in (run / f"questions/{split}.jsonl").read_text().splitlines()]


def test_training_on_questions_asks_no_lm_and_finds_documents_that_it_was_not_trained_on(trained: Path) -> None:
    results = json.loads((trained / "results.json").read_text())
    assert not (trained / "scores.sqlite").exists() and "language_modelling" not in results
    before, after = (results["questions"][name] for name in ("replug", "lsr"))
    assert after["MRR@20"]["value"] > before["MRR@20"]["value"] + 0.1
    assert {f"Success@{k} - replug" for k in (1, 5, 20)} < after.keys()
    assert results["verdict"]["verdict"] == results["verdict"]["questions"] == "HELPED"
    assert results["weights"]["best"]["mrr"] > results["weights"]["first"]["mrr"]
    assert metrics(trained)[-1]["train/loss"] < metrics(trained)[0]["train/loss"]
    assert "held-out questions" in (trained / "report.html").read_text()


def test_questions_are_made_once_of_splits_that_share_no_source_by_documents_that_answer_them(trained: Path) -> None:
    data, splits = PreparedSet(trained / "data"), {name: read(trained, name) for name in ("train", "dev", "heldout")}
    sources = [{row["source"] for row in questions} for questions in splits.values()]
    assert all(sources) and len(set.union(*sources)) == sum(map(len, sources))
    texts = {document.id: document.text for document in data.corpus.iterate()}
    for row in (row for questions in splits.values() for row in questions):
        assert row["answers"][0] in texts[row["gold"][0]] and row["answers"][0] not in row["question"]
    folder, keys = trained / "questions", ["run_dir=x", *ON_QUESTIONS]
    again = make_questions(load_config(DEBUG, keys), data, folder, training_questions(load_config(DEBUG, keys), data))
    assert [of.example.id for of in again.dev] == [row["id"] for row in splits["dev"]]
    with pytest.raises(UserError, match="seed"):
        make_questions(load_config(DEBUG, [*keys, "seed=7"]), data, folder)


def test_own_questions_judge_by_the_passages_that_hold_an_answer(trained: Path, tmp_path: Path) -> None:
    file, data = tmp_path / "mine.jsonl", PreparedSet(trained / "data")
    file.write_text('{"question": "when?", "answers": ["1501"]}\n{"question": "who?", "answers": ["nobody at all"]}\n')
    config = load_config(DEBUG, ["run_dir=x", *ON_QUESTIONS, f"data.questions={file}"])
    questions = make_questions(config, data, tmp_path / "questions")
    assert len(questions.heldout) == 2 and questions.dev, "so few judge alone; the rule's choose"
    found = {"replug": np.array([[5, 1, 2], [1, 2, 3]]), "lsr": np.array([[1, 2, 3], [1, 2, 3]])}
    retrieved = {name: RetrievedDocuments(rows, np.zeros(rows.shape)) for name, rows in found.items()}
    results = judge_by_questions(config, data, questions.heldout, retrieved, tmp_path / "outcomes")
    assert [results[name]["MRR@20"]["value"] for name in ("replug", "lsr")] == [0.25, 0.5]
    file.write_text('{"question": "when?"}\n')
    with pytest.raises(UserError, match="neither answers nor gold"):
        make_questions(config, data, tmp_path / "others")


def test_own_training_rows_are_trained_on_and_own_heldout_rows_judge(
    rows: list[str], trained: Path, tmp_path: Path
) -> None:
    questions = {
        "train": [
            {"id": "a", "question": "when were they built?", "answers": ["1501"], "gold": ["d7"]},
            {"id": "b", "question": text_of([], 1511), "answers": ["none", "1511"]},  # d11 holds the second
            {"id": "c", "question": "who built nothing?", "answers": ["nobody at all"]},
        ],
        "heldout": [{"id": "d", "question": "when?", "answers": ["never", "1503"]}],
    }
    own = [rows[0], *write_rows(tmp_path, questions)]
    config = load_config(DEBUG, ["run_dir=x", *ON_QUESTIONS, *own])
    data = prepared_set(config, tmp_path / "set")
    training = training_questions(config, data)
    assert [(of.example.id, of.example.gold[0]) for of in training[:2]] == [("a", "d7"), ("b", "d11")]
    assert len(training) > 100, "the rule's fill up the steps"
    made = make_questions(config, data, tmp_path / "questions", training)
    assert [(of.example.query, of.answers) for of in made.heldout] == [("when?", ("never", "1503"))]
    assert {"s7", "s11"}.isdisjoint(of.example.source for of in made.dev) and made.dev
    config = load_config(DEBUG, ["run_dir=x", *ON_QUESTIONS, *own, f"data.questions={tmp_path}/train.jsonl"])
    with pytest.raises(UserError, match=r"question a .* is trained on too"):
        make_questions(config, data, tmp_path / "others", training)


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("data.questions=null", "data.questions"),
        ("train.labels=auto", "train.labels"),
        ("train.epochs=1", "train.epochs"),
        ("loss.contrastive=0", "loss.contrastive"),
        ("train.batch_size=1", "train.batch_size"),
        ("resources.train=2", "resources.train"),
    ],
)
def test_keys_that_do_not_go_with_questions_are_refused(override: str, named: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=named):
        load_config(DEBUG, [f"run_dir={tmp_path}", *ON_QUESTIONS, override])


def test_reciprocal_ranks_are_those_of_a_naive_search(trained: Path) -> None:
    corpus, encoder = PreparedSet(trained / "data").corpus, load_encoder(load_config(DEBUG).retriever)
    questions = [
        OpenQuestion(Item("a", "when were they built", "all", ("d3", "d7")), ()),
        OpenQuestion(Item("b", "in which year", "all"), ("1511",)),
        OpenQuestion(Item("c", "where", "all"), ("nowhere",)),
    ]
    ranks = DevQuestions(questions, corpus, seed=0).reciprocal_ranks(encoder)
    documents = encoder.encode_document(corpus.texts(range(NUM_DOCUMENTS))).numpy()
    similarities = encoder.encode_query([question.example.query for question in questions]).numpy() @ documents.T
    order = [[corpus.documents([row])[0].id for row in np.argsort(-of, kind="stable")] for of in similarities]
    best = min(order[0].index(name) for name in ("d3", "d7"))
    assert ranks.tolist() == pytest.approx([1 / (best + 1), 1 / (order[1].index("d11") + 1), 0], rel=0.05)


# Questions by the LM --------------------------------------------------------------------------------------------


class WritingLM(StandInLM):
    """Words questions as it is told, and finds the answer likelier wherever `helps` stands before it."""

    def __init__(self, worded: dict[str, str], helps: str) -> None:
        super().__init__()
        self._worded, self._helps = worded, helps

    def submit_samples(self, prompts, options):
        texts = [next(text for answer, text in self._worded.items() if f"Answer: {answer}\n" in of) for of in prompts]
        done: Future = Future()
        done.set_result([[Generated(text, np.zeros(1))] for text in texts])
        return done

    def score(self, prefixes, continuations, **more):
        return [ContinuationScore(np.array([-1.0 if self._helps in prefix else -3.0])) for prefix in prefixes]


def test_written_questions_are_kept_by_their_form_by_bm25_and_by_what_the_document_adds() -> None:
    worded = {
        "1887": " when was the tower of Basel begun? More",
        "1889": " it was finished.",  # no question
        "1890": " was it in 1890?",  # holds its answer
        "Nantes": " what does nobody here write about anything?",  # BM25 finds another
    }
    pairs = [
        (
            OpenQuestion(Item(answer, "", "all", (answer,), answer), (answer,)),
            Document(answer, f"The tower of Basel and {answer} {place}", "all", answer),
        )
        for place, answer in enumerate(worded)
    ]
    others = ["nobody here ever does write about anything what"] * 30
    kept = write_questions(WritingLM(worded, "The tower"), 0, True, lambda: None, pairs, others, 5)  # type: ignore[arg-type]
    assert [(of.example.query, of.example.gold) for of in kept] == [("when was the tower of Basel begun?", ("1887",))]
    without = write_questions(WritingLM(worded, "no such"), 0, True, lambda: None, pairs, others, 5)  # type: ignore[arg-type]
    assert without == []


def test_documents_without_sentences_judge_by_texts_alone_and_are_refused_for_training(tmp_path: Path) -> None:
    keys, data = [f"run_dir={tmp_path / 'run'}", "data.questions=rule"], debug_set(tmp_path)
    assert make_questions(load_config(DEBUG, keys), data, tmp_path / "questions").heldout == []
    with pytest.raises(UserError, match="no question could be made"):
        training_questions(load_config(DEBUG, [*keys, *ON_QUESTIONS]), data)


@pytest.mark.slow
def test_a_killed_training_on_questions_goes_on_to_the_last_bit(
    trained: Path, tmp_path: Path, rows: list[str], here: CommandLine
) -> None:
    run = tmp_path / "run"
    command = ["train", str(DEBUG), f"run_dir={run}", *ON_QUESTIONS, *rows, "lm.path=null", "checkpoint.every_steps=4"]
    process = start_process(*command)
    wait_for_step(run, 14, process)
    process.kill()
    process.wait()
    assert here(*command).status == 0
    assert what_must_be_equal(run) == what_must_be_equal(trained)
    outcomes = [(path / "evaluation/questions/outcomes.jsonl").read_text() for path in (run, trained)]
    assert outcomes[0] == outcomes[1]


def test_a_training_on_labels_is_chosen_by_questions_and_judged_by_texts_questions_and_answers(
    tmp_path: Path, here: CommandLine, rows: list[str]
) -> None:
    keys = [key for key in ON_QUESTIONS if not key.startswith(("train.examples", "evaluate", "train.max_steps"))]
    here.finish(tmp_path / "run", *keys, *rows, "train.labels=auto", "train.max_steps=6", "label.dense=4")
    results = json.loads((tmp_path / "run/results.json").read_text())
    assert {"mrr", "share"} < results["weights"]["best"].keys()
    assert results["questions"]["lsr"]["MRR@20"]["n"] == results["answers"]["lsr/posterior"]["bpb"]["n"] == 18
    assert results["verdict"]["texts"] and results["verdict"]["questions"]
    assert "answers to held-out questions" in (tmp_path / "run/report.html").read_text()


@pytest.mark.parametrize("side", ["both", pytest.param("query", marks=pytest.mark.nightly)])
def test_a_live_training_is_chosen_by_questions(side: str, tmp_path: Path, here: CommandLine, rows: list[str]) -> None:
    keys = [key for key in ON_QUESTIONS if not key.startswith(("train.examples", "evaluate", "train.max", "refresh"))]
    keys += ["train.max_steps=6", "refresh.every_steps=3", "refresh.lag_steps=null", f"retriever.train={side}"]
    here.finish(tmp_path / "run", *keys, *rows)
    weights = json.loads((tmp_path / "run/results.json").read_text())["weights"]
    assert weights["best"]["mrr"] >= weights["first"]["mrr"] and weights["best"]["bpb"] is None
    looks = {row["dev/least_gain"] for row in metrics(tmp_path / "run") if "dev/least_gain" in row}
    assert len(looks) > 1 and max(looks) <= weights["best"]["least_gain"] + 1e-6
