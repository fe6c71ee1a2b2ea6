"""The pieces that the prompts of the tasks share (REPLUG, appendix: prompts for MMLU and open-domain QA). Pure.

Demonstrations come first and the retrieved document after them, so the prompts of one question begin alike whatever
document they hold: a server that keeps prefixes computes the demonstrations once.
"""

from collections.abc import Sequence

BETWEEN_BLOCKS = "\n\n"


def one_line(text: str) -> str:
    """Every run of white space as one space: a line of a prompt must not become several."""
    return " ".join(text.split())


def knowledge_line(document: str | None) -> str:
    """`Knowledge: ...` with its newline; nothing where there is no document."""
    return "" if document is None else f"Knowledge: {one_line(document)}\n"


def documents_or_none(documents: Sequence[str | None] | None, num_demonstrations: int) -> Sequence[str | None]:
    """A document or None for each demonstration; ValueError where there are not as many as demonstrations."""
    if documents is None:
        return [None] * num_demonstrations
    if len(documents) != num_demonstrations:
        raise ValueError(f"{num_demonstrations} demonstrations but {len(documents)} documents for them")
    return documents
