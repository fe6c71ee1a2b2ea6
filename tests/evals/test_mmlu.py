"""MMLU: both forms of its files, the prompt against golden files, the mixture and the averages by hand."""

import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from replug.config.errors import RunError, UserError
from replug.evals.loop import Example
from replug.evals.mmlu import (
    CATEGORIES,
    CATEGORY_OF,
    CONTINUATIONS,
    SUBCATEGORIES,
    MmluQuestion,
    mmlu_choice,
    mmlu_prompt,
    read_mmlu,
)
from tests.support.shared_data import shared

GOLDEN = Path(__file__).parent / "golden"
OFFICIAL = 'Which is 1?,1,2,3,4,A\n"Which, of ""these"",\nis 4?",1,2,3,4,D\n'
WITH_HEADER = "question,choice0,choice1,choice2,choice3,answer\n" + OFFICIAL.replace(",A\n", ",0\n").replace(
    ",D\n", ",3\n"
)


def make_question(query: str, choices: str, answer: int) -> MmluQuestion:
    a, b, c, d = choices.split(", ")
    return MmluQuestion(Example("q", query, "high_school_geography"), (a, b, c, d), answer)


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


def test_the_57_subjects_are_each_in_one_category() -> None:
    members = Counter(subject for subjects in SUBCATEGORIES.values() for subject in subjects)
    assert len(members) == 57 and set(members.values()) == {1}
    used = Counter(name for names in CATEGORIES.values() for name in names)
    assert used == dict.fromkeys(SUBCATEGORIES, 1)
    assert set(CATEGORY_OF) == set(members)
    sizes = Counter(CATEGORY_OF.values())
    assert sizes == {"STEM": 18, "humanities": 13, "social sciences": 12, "other": 14}
    assert CATEGORY_OF["machine_learning"] == "STEM"
    assert CATEGORY_OF["prehistory"] == "humanities"
    assert CATEGORY_OF["econometrics"] == "social sciences"
    assert CATEGORY_OF["professional_accounting"] == "other"


@pytest.mark.parametrize("test", [OFFICIAL, WITH_HEADER, "\ufeff" + OFFICIAL.replace("\n", "\r\n"), OFFICIAL + "\n"])
def test_official_files_and_files_with_a_header_give_the_same_questions(tmp_path: Path, test: str) -> None:
    questions = read_mmlu(write_set(tmp_path, test), num_demonstrations=2).questions
    assert [question.answer for question in questions] == [0, 3]
    assert [question.choices for question in questions] == [("1", "2", "3", "4")] * 2
    assert questions[0].example == Example("anatomy/test/0", "Which is 1?", "anatomy")
    assert questions[1].example.query.replace("\r", "") == 'Which, of "these",\nis 4?'


def test_demonstrations_are_the_first_of_dev_in_order_and_never_of_test(tmp_path: Path) -> None:
    dev = "".join(f"Question {i}?,1,2,3,4,B\n" for i in range(7))
    found = read_mmlu(write_set(tmp_path, OFFICIAL, dev))
    assert [shot.example.query for shot in found.demonstrations["anatomy"]] == [f"Question {i}?" for i in range(5)]
    asked = {question.example.id for question in found.questions}
    assert not asked & {shot.example.id for shots in found.demonstrations.values() for shot in shots}


def test_without_demonstrations_no_dev_file_is_read(tmp_path: Path) -> None:
    write_set(tmp_path, OFFICIAL)
    (tmp_path / "dev" / "anatomy_dev.csv").unlink()
    assert read_mmlu(tmp_path, num_demonstrations=0).demonstrations == {"anatomy": ()}


@pytest.mark.parametrize(
    ("test", "message"),
    [
        ("Which?,1,2,3,A\n", "test/anatomy_test.csv:1: expected 6 fields (question, A, B, C, D, answer), found 5"),
        (OFFICIAL + "Which?,1,2,3,4,E\n", ":4: expected as answer one of A, B, C, D, found 'E'"),
        (OFFICIAL + "Which?,1,2,3,4,0\n", ":4: expected as answer one of A, B, C, D, found '0'"),
        (WITH_HEADER + "Which?,1,2,3,4,4\n", ":5: expected as answer one of A, B, C, D, 0, 1, 2, 3, found '4'"),
        (OFFICIAL + " ,1,2,3,4,A\n", ":4: the question is empty"),
        (OFFICIAL + '"Which?,1,2,3,4,A\n', ":4: not valid CSV"),
        ("", "holds no questions"),
        ("question,a,b,c,d,answer\n", "holds no questions"),
    ],
)
def test_a_wrong_file_is_named_with_its_line_and_what_was_expected(tmp_path: Path, test: str, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        read_mmlu(write_set(tmp_path, test), num_demonstrations=2)


def test_text_that_is_not_utf_8_is_named(tmp_path: Path) -> None:
    write_set(tmp_path, OFFICIAL)
    (tmp_path / "test" / "anatomy_test.csv").write_bytes(b"caf\xe9?,1,2,3,4,A\n")
    with pytest.raises(UserError, match=r"anatomy_test\.csv: not UTF-8"):
        read_mmlu(tmp_path, 2)


def test_missing_and_unknown_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no MMLU"):
        read_mmlu(tmp_path)
    with pytest.raises(UserError, match=r"anatomy_dev\.csv holds 2 questions, 5 demonstrations are asked for"):
        read_mmlu(write_set(tmp_path, OFFICIAL))
    (tmp_path / "dev" / "anatomy_dev.csv").unlink()
    with pytest.raises(UserError, match=r"anatomy_dev\.csv does not exist"):
        read_mmlu(tmp_path)
    write_set(tmp_path, OFFICIAL, subject="alchemy")
    with pytest.raises(UserError, match="'alchemy' is none of MMLU's 57 subjects"):
        read_mmlu(tmp_path, 2)


def test_the_prompt_with_a_document_is_the_golden_one() -> None:
    document = "Mount Everest\nMount Everest is 8,849 m high.\n\nIt lies between Nepal and China.\n"
    assert mmlu_prompt(MOUNTAIN, [RIVER, DESERT], document) == golden("mmlu_with_document")
    assert CONTINUATIONS == (" A", " B", " C", " D")


def test_the_prompt_without_document_or_demonstrations_is_the_golden_one() -> None:
    assert mmlu_prompt(MOUNTAIN, []) == golden("mmlu_without_document")


def test_demonstrations_have_a_document_only_where_one_is_given() -> None:
    prompt = mmlu_prompt(MOUNTAIN, [RIVER, DESERT], "Everest is high.", ["The Nile is long.", None])
    assert prompt == golden("mmlu_demonstrations_with_documents")
    with pytest.raises(ValueError, match="2 demonstrations but 1 documents"):
        mmlu_prompt(MOUNTAIN, [RIVER, DESERT], None, ["The Nile is long."])


def test_the_prompts_of_all_documents_begin_with_the_same_demonstrations() -> None:
    prompts = [mmlu_prompt(MOUNTAIN, [RIVER, DESERT], text) for text in ("one", "two", None)]
    start = mmlu_prompt(MOUNTAIN, [RIVER, DESERT]).rpartition("Question:")[0]
    assert all(prompt.startswith(start) for prompt in prompts)


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


def test_of_equal_letters_the_first_is_taken() -> None:
    logprobs = np.log([[0.1, 0.3, 0.3, 0.3]])
    assert mmlu_choice(DESERT, logprobs, np.zeros(1))[0] == 1
    assert mmlu_choice(DESERT, np.zeros((2, 4)), np.zeros(2))[0] == 0


def test_a_document_without_its_scores_and_scores_that_are_no_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="for 2 documents"):
        mmlu_choice(RIVER, np.zeros((1, 4)), np.zeros(2))
    for bad in (np.nan, -np.inf):
        with pytest.raises(RunError, match="q: the LM gave a letter"):
            mmlu_choice(RIVER, np.array([[0.0, bad, 0.0, 0.0]]), np.zeros(1))


def test_the_real_files_are_read() -> None:
    found = read_mmlu(shared("mmlu"))
    counts = Counter(question.example.group for question in found.questions)
    assert counts["abstract_algebra"] == 100 and counts["global_facts"] == 100 and len(counts) == 8
    assert {len(shots) for shots in found.demonstrations.values()} == {5}
    first = found.questions[0]
    assert first.example.query.startswith("Find the degree for the given field extension")
    assert first.choices == ("0", "4", "2", "6") and first.answer == 1
    prompt = mmlu_prompt(first, found.demonstrations["abstract_algebra"], "A field\nextension.")
    assert prompt.startswith("The following are multiple choice questions (with answers) about abstract algebra.\n\n")
    assert prompt.count("\nAnswer: ") == 5 and prompt.count("Knowledge: ") == 1 and prompt.endswith("\nAnswer:")
