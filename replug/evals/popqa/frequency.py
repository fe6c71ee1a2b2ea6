"""How many documents of a corpus name an entity: its words one after another, by DPR's tokens (`evals.answers`)."""

from collections.abc import Iterable, Sequence

from replug.data.progress import Progress
from replug.evals.answers import answer_tokens

Words = tuple[str, ...]


def document_frequencies(entities: Iterable[str], texts: Iterable[str], num_texts: int) -> dict[str, int]:
    """By entity, the number of texts that hold its words, whatever their case; one pass over the texts for all.

    An entity without a word is held by none.
    """
    words_of = {entity: tuple(answer_tokens(entity)) for entity in dict.fromkeys(entities)}
    lengths = _lengths_by_first_word([words for words in words_of.values() if words])
    counts = dict.fromkeys(words_of.values(), 0)
    progress = Progress(f"documents that name {len(words_of)} subjects", num_texts)
    for text in texts:
        for words in _held(answer_tokens(text), lengths, counts):
            counts[words] += 1
        progress.advance()
    return {entity: counts[words] for entity, words in words_of.items()}


def _lengths_by_first_word(entities: Iterable[Words]) -> dict[str, list[int]]:
    """How many words the entities have that begin with a word."""
    lengths: dict[str, set[int]] = {}
    for words in entities:
        lengths.setdefault(words[0], set()).add(len(words))
    return {word: sorted(of) for word, of in lengths.items()}


def _held(tokens: Sequence[str], lengths: dict[str, list[int]], entities: dict[Words, int]) -> set[Words]:
    """The entities that a text's tokens hold."""
    spans = (
        tuple(tokens[place : place + length]) for place, token in enumerate(tokens) for length in lengths.get(token, ())
    )
    return {span for span in spans if span in entities}
