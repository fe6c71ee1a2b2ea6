"""GenRead: the LM writes a document for a question, and reads it as if it was retrieved (Yu et al. 2023).

The prompt and what is kept of the answer are those of the official code of PopQA (Mallen et al. 2023).
"""

from dataclasses import dataclass

from replug.answering.prompts import BETWEEN_BLOCKS
from replug.data.rows import one_line
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
