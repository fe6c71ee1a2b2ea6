"""Which pairs are worth scoring together: of similar length, so many tokens by their bytes.

Follows from the texts alone. The longest texts come first, and every unit is full but the last. Their size does not
follow from that of the call: taking some out would change the others.
"""

from collections.abc import Sequence

from replug.models.batching import token_budget_batches

BYTES_PER_TOKEN = 4  # of English and code; a guess, which costs padding where it is wrong and nothing else
CHOICE_CHARACTERS = 8  # a continuation so short is most likely one token, as the letters of a question are


def units_of_similar_length(prefixes: Sequence[str], continuations: Sequence[str], num_tokens: int) -> list[list[int]]:
    """Every row once. Lengths are bytes: no tokenizer is needed here, and an LM sorts its unit by tokens.

    Choices after one prefix stay together: the LM reads their prefix once.
    """
    num_bytes = BYTES_PER_TOKEN * num_tokens
    together: dict[tuple, list[int]] = {}
    for row, (prefix, continuation) in enumerate(zip(prefixes, continuations, strict=True)):
        is_choice = len(continuation) <= CHOICE_CHARACTERS
        together.setdefault((prefix,) if is_choice else (prefix, row), []).append(row)
    groups = list(together.values())
    lengths = [
        len(prefixes[rows[0]].encode()) + sum(len(continuations[row].encode()) for row in rows) for rows in groups
    ]
    return [[row for group in batch for row in groups[group]] for batch in token_budget_batches(lengths, num_bytes)]
