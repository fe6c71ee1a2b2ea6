"""Prompts of PopQA as its official code builds them (Mallen et al. 2023, `run_model.py`). Pure.

A question is `Q: ... A:`, with its passage and a blank line before it where there is one. Shots are such questions
with their answers, a blank line between them. GenRead's prompt asks the LM to write the passage (Yu et al. 2023).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from replug.evals.prompts import BETWEEN_BLOCKS, one_line

# Subjects stand where the braces are. The relations' names are those of the field `prop`.
POPQA_TEMPLATES = {
    "occupation": "What is {}'s occupation?",
    "place of birth": "In what city was {} born?",
    "genre": "What genre is {}?",
    "father": "Who is the father of {}?",
    "country": "In what country is {}?",
    "producer": "Who was the producer of {}?",
    "director": "Who was the director of {}?",
    "capital of": "What is {} the capital of?",
    "screenwriter": "Who was the screenwriter for {}?",
    "composer": "Who was the composer of {}?",
    "color": "What color is {}?",
    "religion": "What is the religion of {}?",
    "sport": "What sport does {} play?",
    "author": "Who is the author of {}?",
    "mother": "Who is the mother of {}?",
    "capital": "What is the capital of {}?",
}
# EntityQuestions (Sciavolino et al. 2021), whose files are named by Wikidata's properties.
ENTITY_QUESTIONS_TEMPLATES = {
    "P17": "Which country is {} located in?",
    "P19": "Where was {} born?",
    "P20": "Where did {} die?",
    "P26": "Who is {} married to?",
    "P36": "What is the capital of {}?",
    "P40": "Who is {}'s child?",
    "P50": "Who is the author of {}?",
    "P69": "Where was {} educated?",
    "P106": "What kind of work does {} do?",
    "P112": "Who founded {}?",
    "P127": "Who owns {}?",
    "P131": "Where is {} located?",
    "P136": "What type of music does {} play?",
    "P159": "Where is the headquarter of {}?",
    "P170": "Who was {} created by?",
    "P175": "Who performed {}?",
    "P176": "Which company is {} produced by?",
    "P264": "What music label is {} represented by?",
    "P276": "Where is {} located?",
    "P407": "Which language was {} written in?",
    "P413": "What position does {} play?",
    "P495": "Which country was {} created in?",
    "P740": "Where was {} founded?",
    "P800": "What is {} famous for?",
}
TEMPLATES = POPQA_TEMPLATES | ENTITY_QUESTIONS_TEMPLATES
GENREAD_TEMPLATE = "Generate a background document from Wikipedia to answer the given question. {}"


@dataclass(frozen=True, slots=True)
class PopShot:
    """A question that is shown with its answer, and with its own passage where the method has passages."""

    question: str
    answer: str
    passage: str | None = None


def question_of(relation: str, subject: str) -> str:
    """The question that asks a subject's relation, a key of TEMPLATES."""
    before, after = TEMPLATES[relation].split("{}")
    return f"{before}{subject}{after}"


def subject_of(relation: str, question: str) -> str | None:
    """The subject of a question that was made by the relation's template; None where it was not."""
    before, after = TEMPLATES[relation].split("{}")
    subject = question[len(before) : len(question) - len(after)]
    return subject if subject.strip() and question == f"{before}{subject}{after}" else None


def popqa_prompt(question: str, passage: str | None, shots: Sequence[PopShot] = ()) -> str:
    """What the LM continues: the shots, the passage, the question."""
    return popqa_opening(shots) + _block(question, passage)


def popqa_opening(shots: Sequence[PopShot]) -> str:
    """What the prompts of all questions of a relation begin with."""
    return "".join(f"{_block(shot.question, shot.passage)} {one_line(shot.answer)}{BETWEEN_BLOCKS}" for shot in shots)


def genread_prompt(question: str) -> str:
    """What the LM continues by a document of its own."""
    return GENREAD_TEMPLATE.format(one_line(question))


def first_line(generated: str) -> str:
    """The first line of what the LM wrote, after a blank line that it may begin with, as the official code cuts it."""
    return generated.removeprefix(BETWEEN_BLOCKS).partition("\n")[0].strip()


def _block(question: str, passage: str | None) -> str:
    return f"{'' if passage is None else passage.strip() + BETWEEN_BLOCKS}Q: {one_line(question)} A:"
