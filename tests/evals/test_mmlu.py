"""MMLU: files, golden prompts, prompts that fit the LM, and the mixture of letters."""

import math
from dataclasses import dataclass, replace
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
from replug.models.ensemble import MovingWeights, Weighting, prior_log_weights
from tests.support.known_lm import ImmediateLM, KnownLM, opened, outcome_rows

DEV = "".join(f"shot {number}?,1,2,3,4,B\n" for number in range(5))
TEST = "asked?,1,2,3,4,B\n"


def question(text: str) -> MmluQuestion:
    return MmluQuestion(Item(text, text, "anatomy"), ("p", "q", "r", "s"), 0)


SHOTS = [(question(f"shot {number}"), None) for number in range(5)]
SERVER = SimpleNamespace(max_tokens=None)  # whose limit is unknown
ASKED = question("asked")


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


def test_the_question_moves_the_weights_of_documents_before_the_letter() -> None:
    lm, texts, similarities = ImmediateLM(), ("p q r s", "asked asked asked", "no"), np.array([2.0, 0.0, 1.0])
    fixed = Evidence(texts, prior_log_weights(similarities))
    moved = replace(fixed, weighting=Weighting(0.1, read=3))
    task = opened(Mmlu([ASKED], {"anatomy": [shot for shot, _ in SHOTS]}), lm, methods="mn")
    outcomes = task.submit(0, {"m": fixed, "n": moved})()
    prompts, end = [Mmlu.prompt(ASKED, SHOTS, text) for text in texts], "\nD. s\nAnswer:"
    assert all(prompt.endswith(end) for prompt in prompts)
    scores = lm.score([prompt.removesuffix(end) for prompt in prompts], [end] * 3)
    read = np.stack([score.token_logprobs for score in scores])
    weights = MovingWeights(moved.log_prior, Weighting(0.1), read)
    letters = np.array([[lm.score([p], [letter])[0].sum_logprob for letter in CONTINUATIONS] for p in prompts])
    for name, log_weights in (("m", fixed.log_prior), ("n", weights.log_weights)):
        right = mmlu_choice(ASKED, letters, log_weights)[1]
        assert outcomes[name].numbers["right_probability"] == pytest.approx(right)
    assert outcomes["n"].detail["final_weights"] == pytest.approx(weights.weights, abs=1e-6)
    assert "final_weights" not in outcomes["m"].detail
    assert len(lm.calls) == 2, "letters of all methods, and what is read"


GOLDEN = Path(__file__).parent / "golden"
OFFICIAL = 'Which is 1?,1,2,3,4,A\n"Which, of ""these"",\nis 4?",1,2,3,4,D\n'
WITH_HEADER = "question,choice0,choice1,choice2,choice3,answer\n" + OFFICIAL.replace(",A\n", ",0\n").replace(
    ",D\n", ",3\n"
)


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


@pytest.mark.parametrize("test", [OFFICIAL, WITH_HEADER, "\ufeff" + OFFICIAL.replace("\n", "\r\n"), OFFICIAL + "\n"])
def test_official_files_and_files_with_a_header_give_the_same_questions(tmp_path: Path, test: str) -> None:
    questions, _ = read_mmlu(write_set(tmp_path, test), num_demonstrations=2)
    assert [question.answer for question in questions] == [0, 3]
    assert [question.choices for question in questions] == [("1", "2", "3", "4")] * 2
    assert questions[0].example == Item("anatomy/test/0", "Which is 1?", "anatomy")
    assert questions[1].example.query.replace("\r", "") == 'Which, of "these",\nis 4?'


def test_probabilities_are_mixed_and_not_logits_or_normalised_ones() -> None:
    # The first document is sure of B, but holds any letter improbable: as raw probabilities it hardly counts.
    probabilities = np.array([[1e-6, 1e-3, 1e-6, 1e-6], [0.3, 0.1, 0.2, 0.1]])
    choice, right_probability = mmlu_choice(RIVER, np.log(probabilities), np.log([0.75, 0.25]))
    mixed = 0.75 * probabilities[0] + 0.25 * probabilities[1]
    assert choice == int(mixed.argmax()) == RIVER.answer == 0
    assert right_probability == pytest.approx(mixed[0] / mixed.sum())
    normalised = (probabilities / probabilities.sum(1, keepdims=True) * [[0.75], [0.25]]).sum(0)
    assert normalised.argmax() == 1  # what normalising each document first would have answered
    assert (np.log(probabilities) * [[0.75], [0.25]]).sum(0).argmax() == 1  # and what mixing logits would have


def test_the_likeliest_letters_of_documents_vote() -> None:
    probabilities = np.array([[0.3, 0.4, 0.1, 0.1], [0.3, 0.4, 0.1, 0.1], [0.6, 0.1, 0.1, 0.1]])
    weights = np.array([0.3, 0.3, 0.4])
    assert mmlu_choice(RIVER, np.log(probabilities), np.log(weights))[0] == 0  # 0.42 against 0.28 of B
    choice, right_probability = mmlu_choice(RIVER, np.log(probabilities), np.log([0.4, 0.4, 0.2]), votes=True)
    assert choice == 1 and right_probability == pytest.approx(0.12 / (0.12 + 0.32))  # of A, by the third alone


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
