"""MMLU's demonstrations: each with its document, and fewer of them where the LM holds fewer tokens."""

import math
from dataclasses import dataclass

import numpy as np
import pytest

from replug.config.evaluation_schema import EvaluationConfig, QuestionsConfig
from replug.config.methods import Method
from replug.evals.evidence import NOTHING, Evidence
from replug.evals.kinds import Finished, PromptedLM
from replug.evals.loop import Example
from replug.evals.mmlu import ROOM, MmluPrompts, MmluQuestion
from replug.evals.tasks.mmlu import dropped_shots, mmlu_dataset
from replug.models.black_box_lm import UnscorableText
from replug.models.prompt import PromptTemplate
from tests.support.known_lm import KnownLM, outcome_rows

DEV = "".join(f"shot {number}?,1,2,3,4,B\n" for number in range(5))
TEST = "asked?,1,2,3,4,B\n"


def question(text: str) -> MmluQuestion:
    return MmluQuestion(Example(text, text, "anatomy"), ("p", "q", "r", "s"), 0)


SHOTS = [question(f"shot {number}") for number in range(5)]
DOCUMENTS = [f"knows {number}" for number in range(5)]
ASKED = question("asked")


class Letters:
    """A tokenizer of one token a character."""

    eos_token_id, bos_token_id = 0, None

    def __call__(self, text, **options):
        one = isinstance(text, str)
        ids = [[1] * len(some) for some in ([text] if one else text)]
        spans = [[(i, i + 1) for i in range(len(some))] for some in ([text] if one else text)]
        return {"input_ids": ids[0] if one else ids, "offset_mapping": spans[0] if one else spans}


def prompts(limit: int | None = None, cuts: bool = False, documents=DOCUMENTS) -> MmluPrompts:
    counting = PromptTemplate("", Letters(), limit) if limit else PromptTemplate("")
    template = counting if cuts else PromptTemplate("")
    return MmluPrompts(template, counting, {"anatomy": SHOTS}, {"m": {"anatomy": documents}})


def evidence(*texts: str) -> Evidence:
    return Evidence(texts, np.zeros(len(texts)))


def test_each_demonstration_has_its_own_document_before_it() -> None:
    [prompt] = prompts().of(ASKED, "m", evidence("of the question")).prompts
    knowledge = [line for line in prompt.splitlines() if line.startswith("Knowledge: ")]
    assert knowledge == [f"Knowledge: {text}" for text in [*DOCUMENTS, "of the question"]]
    assert "Knowledge" not in prompts(documents=None).of(ASKED, "m", NOTHING).prompts[0]


def test_the_last_demonstrations_are_dropped_until_every_document_fits() -> None:
    whole = prompts().of(ASKED, "m", evidence("short", "a longer document"))
    longest = max(map(len, whole.prompts)) + ROOM + 1  # and the token that an empty prefix would begin with
    assert prompts(longest).of(ASKED, "m", evidence("short", "a longer document")) == whole
    fewer = prompts(longest - 2).of(ASKED, "m", evidence("short", "a longer document"))
    assert fewer.num_shots == 4
    assert all("shot 3" in prompt and "shot 4" not in prompt for prompt in fewer.prompts), "also before the short one"
    assert all(prompt.startswith(fewer.opening) for prompt in fewer.prompts)


def test_without_any_demonstration_a_document_is_cut_where_that_is_allowed() -> None:
    limit = len(prompts().of(ASKED, "m", NOTHING).prompts[0]) // 2
    cut = prompts(limit, cuts=True).of(ASKED, "m", evidence("a document " * 50))
    assert cut.num_shots == 0 and len(cut.prompts[0]) + ROOM <= limit and "a document" in cut.prompts[0]
    whole = prompts(limit).of(ASKED, "m", evidence("a document " * 50))
    assert whole.num_shots == 0 and len(whole.prompts[0]) > limit, "the LM itself refuses it"
    with pytest.raises(UnscorableText, match="tokens too long without any document"):
        prompts(60, cuts=True).of(ASKED, "m", NOTHING)


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
            (tmp_path / split / f"{subject}_{split}.csv").write_text(content)
    config = EvaluationConfig("mmlu", "out", questions=QuestionsConfig(path=str(tmp_path), max_questions=2, shots=2))
    dataset = mmlu_dataset(config, None)
    assert list(dataset.queries) == ["asked?"] * 4 + ["shot 0?", "shot 1?"] * 2
    lm = KnownLM(lambda prefix, letter: [math.log(0.5 if letter == " B" else 0.1)])
    task = dataset.make_task(PromptedLM(lm, PromptTemplate("\n"), lm), Book())
    rows = outcome_rows(task, {"none": NOTHING, "bm25": evidence("own")})
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
    config.questions.documents_in_shots = False
    lm.prompts.clear()
    mmlu_dataset(config, None).make_task(PromptedLM(lm, PromptTemplate("\n"), lm), Book()).submit(0, {"bm25": NOTHING})
    assert "Knowledge" not in lm.prompts[0][0]


def test_questions_with_fewer_demonstrations_are_counted_by_method() -> None:
    rows = [{"methods": {"none": {"numbers": {"shots": 5}}, "bm25": {"numbers": {"shots": n}}}} for n in (5, 3, 4)]
    said = dropped_shots(Finished(EvaluationConfig("mmlu", "out"), None, rows, Book(), {}))
    assert "bm25: 2 of 3 questions had fewer than 5 demonstrations" in said and "none" not in said
