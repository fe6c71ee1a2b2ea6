"""GenRead: the LM writes a document for a question, and reads it as if it was retrieved (Yu et al. 2023).

The prompt and what is kept of the answer are those of the official code of PopQA (Mallen et al. 2023).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from replug.answering.prompts import BETWEEN_BLOCKS
from replug.config.methods import GENREAD
from replug.data.rows import one_line
from replug.models.black_box_lm import BlackBoxLM
from replug.models.ensemble import Retrieved
from replug.models.generation import Generated, GenerationOptions
from replug.models.prompt import PromptTemplate

WRITING = GenerationOptions(150)  # tokens of a document
TEMPLATE = "Generate a background document from Wikipedia to answer the given question. {}"


@dataclass(frozen=True, slots=True)
class WrittenDocument:
    """A document that an LM wrote for a question; `text` is None where it wrote nothing. The LM counted the tokens."""

    text: str | None
    prompt_tokens: int | None
    generated_tokens: int


def genread_prompt(question: str) -> str:
    """Return what the LM continues by a document of its own."""
    return TEMPLATE.format(one_line(question))


def first_line(generated: str) -> str:
    """Return the first line of the answer, after a blank line that it may begin with, as the official code cuts it."""
    return generated.removeprefix(BETWEEN_BLOCKS).partition("\n")[0].strip()


def writing_prompt(question: str, template: PromptTemplate) -> str:
    """Return `genread_prompt` as the LM is to be asked. Raises UnscorableText for one that the LM does not hold."""
    return template.fit(None, template.around(lambda _: genread_prompt(question)), WRITING.max_new_tokens)


def written_document(generated: Generated) -> WrittenDocument:
    """Return the document that an answer to `writing_prompt` holds."""
    return WrittenDocument(first_line(generated.text) or None, generated.prompt_tokens, generated.num_tokens)


class GenRead:
    """A `Retriever` whose one document for a question the LM writes; none for a blank question, or where it is empty.

    `template` says how the LM is asked; a policy to `genread` knows the retriever by its `identity`.
    """

    identity = GENREAD

    def __init__(self, lm: BlackBoxLM, template: PromptTemplate | None = None) -> None:
        self._lm, self._template = lm, template or PromptTemplate()

    def retrieve(self, queries: Sequence[str], k: int) -> list[list[Retrieved]]:
        """Return the document of each question, which has no similarity."""
        asked = [query for query in queries if query.strip() and k]
        prompts = [writing_prompt(question, self._template) for question in asked]
        answers = self._lm.generate(prompts, WRITING) if asked else []
        texts = {question: written_document(answer).text for question, answer in zip(asked, answers, strict=True)}
        found = ([Retrieved(text, 0.0, GENREAD)] if (text := texts.get(query)) else [] for query in queries)
        return list(found)
