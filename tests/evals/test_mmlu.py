"""MMLU: files, golden prompts, prompts that fit the LM, and the mixture of letters."""

import math
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from replug.config.errors import RunError
from replug.config.evaluation_schema import EvaluationConfig, QuestionsConfig
from replug.config.methods import Method
from replug.evals.evidence import NOTHING, Evidence
from replug.evals.loop import Item
from replug.evals.mmlu import (
    CONTINUATIONS,
    Mmlu,
    MmluQuestion,
    mmlu_choice,
    read_mmlu,
)
from replug.models.ensemble import prior_log_weights
from tests.support.known_lm import KnownLM, opened, outcome_rows

DEV = "".join(f"shot {number}?,1,2,3,4,B\n" for number in range(5))
TEST = "asked?,1,2,3,4,B\n"


def question(text: str) -> MmluQuestion:
    return MmluQuestion(Item(text, text, "anatomy"), ("p", "q", "r", "s"), 0)


SERVER = SimpleNamespace(max_tokens=None)  # whose limit is unknown


def evidence(*texts: str) -> Evidence:
    return Evidence(texts, prior_log_weights(np.zeros(len(texts))))


@dataclass
class Book:
    """The nearest document of a place is called after it."""

    methods: tuple[Method, ...] = (Method("none", "none", 0, False), Method("bm25", "bm25", 1, False))

    def nearest(self, method: Method, row: int) -> str | None:
        return None if method.source == "none" else f"document {row}"


def test_the_demonstrations_of_a_set_are_searched_for_behind_its_questions(tmp_path) -> None:
    for split, rows in (("test", (TEST * 3, TEST * 2)), ("dev", (DEV, DEV))):
        (tmp_path / split).mkdir()
        for subject, content in zip(("anatomy", "virology"), rows, strict=True):
            (tmp_path / split / f"{subject}_{split}.csv").write_text(content.replace("asked?", f"{subject}?"))
    config = EvaluationConfig("mmlu", "out", questions=QuestionsConfig(path=str(tmp_path), max_questions=2, shots=2))
    task = Mmlu.of(config, None, SERVER)
    assert list(task.queries) == ["anatomy?"] * 2 + ["virology?"] * 2 + ["shot 0?", "shot 1?"] * 2
    config.questions.query = "{question} {choices}"
    first, *_ = Mmlu.of(config, None, SERVER).queries
    assert first.startswith("anatomy? A. ") and first.count("\n") == 3
    lm = KnownLM(lambda prefix, letter: [math.log(0.5 if letter == " B" else 0.1)])
    rows = outcome_rows(opened(task, lm, Book()), {"none": NOTHING, "bm25": evidence("own")})
    assert rows[2]["methods"]["bm25"]["numbers"]["shots"] == 2
    closed, with_documents = sorted(
        (some[0] for some in lm.prompts if "virology" in some[0]), key=lambda prompt: "Knowledge" in prompt
    )[1:3]
    assert "Knowledge" not in closed
    assert [line[11:] for line in with_documents.splitlines() if line.startswith("Knowledge: ")] == [
        "document 6",
        "document 7",
        "own",
    ]


GOLDEN = Path(__file__).parent / "golden"
OFFICIAL = 'Which is 1?,1,2,3,4,A\n"Which, of ""these"",\nis 4?",1,2,3,4,D\n'


def make_question(query: str, choices: str, answer: int) -> MmluQuestion:
    a, b, c, d = choices.split(", ")
    return MmluQuestion(Item("q", query, "high_school_geography"), (a, b, c, d), answer)


RIVER = make_question("Which is the longest river?", "Nile, Rhine, Thames, Seine", 0)
DESERT = make_question("Which of these is a desert?", "Alps, Baltic, Gobi, Rhine", 2)
MOUNTAIN = make_question("Which is the highest mountain?", "K2, Mont Blanc, Etna, Everest", 3)


def write_set(folder: Path, test: str, dev: str = OFFICIAL, subject: str = "anatomy") -> Path:
    for split, content in (("test", test), ("dev", dev)):
        (folder / split).mkdir(exist_ok=True)
        (folder / split / f"{subject}_{split}.csv").write_bytes(content.encode())
    return folder


def golden(name: str) -> str:
    return (GOLDEN / f"{name}.txt").read_text().removesuffix("\n")


@pytest.mark.parametrize("test", [OFFICIAL, "\ufeff" + OFFICIAL.replace("\n", "\r\n"), OFFICIAL + "\n"])
def test_official_files_are_read_with_any_line_ends(tmp_path: Path, test: str) -> None:
    questions, _ = read_mmlu(write_set(tmp_path, test), num_demonstrations=2)
    assert [question.answer for question in questions] == [0, 3]
    assert [question.choices for question in questions] == [("1", "2", "3", "4")] * 2
    assert questions[0].example == Item("anatomy/test/0", "Which is 1?", "anatomy")
    assert questions[1].example.query.replace("\r", "") == 'Which, of "these",\nis 4?'


def test_probabilities_are_mixed_and_not_logits_or_normalised_ones() -> None:
    # The first document is sure of B, but holds any letter improbable: as raw probabilities it hardly counts.
    probabilities = np.array([[1e-6, 1e-3, 1e-6, 1e-6], [0.3, 0.1, 0.2, 0.1]])
    choice = mmlu_choice(RIVER, np.log(probabilities), np.log([0.75, 0.25]))
    mixed = 0.75 * probabilities[0] + 0.25 * probabilities[1]
    assert choice == int(mixed.argmax()) == RIVER.answer == 0
    normalised = (probabilities / probabilities.sum(1, keepdims=True) * [[0.75], [0.25]]).sum(0)
    assert normalised.argmax() == 1  # what normalising each document first would have answered
    assert (np.log(probabilities) * [[0.75], [0.25]]).sum(0).argmax() == 1  # and what mixing logits would have


def test_the_likeliest_letters_of_documents_vote() -> None:
    probabilities = np.array([[0.3, 0.4, 0.1, 0.1], [0.3, 0.4, 0.1, 0.1], [0.6, 0.1, 0.1, 0.1]])
    weights = np.array([0.3, 0.3, 0.4])
    assert mmlu_choice(RIVER, np.log(probabilities), np.log(weights)) == 0  # 0.42 against 0.28 of B
    assert mmlu_choice(RIVER, np.log(probabilities), np.log([0.4, 0.4, 0.2]), votes=True) == 1  # A by the third alone


EVEREST = "Mount Everest\nMount Everest is 8,849 m high.\n\nIt lies between Nepal and China.\n"


def test_prompts_are_the_golden_ones() -> None:
    assert Mmlu.prompt(MOUNTAIN, [(RIVER, None), (DESERT, None)], EVEREST) == golden("mmlu_with_document")
    assert Mmlu.prompt(MOUNTAIN, []) == golden("mmlu_without_document")
    with_all = Mmlu.prompt(MOUNTAIN, [(RIVER, "The Nile is long."), (DESERT, None)], "Everest is high.")
    assert with_all == golden("mmlu_demonstrations_with_documents")
    assert CONTINUATIONS == (" A", " B", " C", " D")


def test_scores_that_are_no_numbers_are_refused() -> None:
    for bad in (np.nan, -np.inf):
        with pytest.raises(RunError, match="q: the LM gave a letter"):
            mmlu_choice(RIVER, np.array([[0.0, bad, 0.0, 0.0]]), np.zeros(1))
