"""An answer in pieces while it grows: what no further token changes is given out, and joined it is the answer."""

from collections.abc import Iterable, Iterator

from replug.configs.errors import RunError
from replug.models.generation import Stop, stop_texts


def pieces(texts: Iterable[str], stop: Stop) -> Iterator[str]:
    """What is new in each text of a growing answer, as soon as it is settled; the last text counts whole.

    Raises RunError where a tokenizer writes what was given out in another way when more tokens come.
    """
    given = whole = ""
    for whole in texts:
        _require_longer(whole, given)
        ready = settled(whole, stop)
        if len(ready) > len(given):
            yield ready[len(given) :]
            given = ready
    if whole != given:
        yield whole[len(given) :]


def _require_longer(whole: str, given: str) -> None:
    if not whole.startswith(given):
        raise RunError(
            f"the answer cannot be streamed: {given[-40:]!r} was given out, and the tokenizer has written the text "
            "anew with later tokens; ask for the whole answer (generate, answer) instead"
        )


def settled(text: str, stop: Stop) -> str:
    """What of an unfinished answer no further token changes: no half character, and nothing that may begin a stop."""
    whole = text.rstrip("\ufffd")  # which stands for the bytes of a character that are there already
    begun = [one[:length] for one in stop_texts(stop) for length in range(1, len(one))]
    return whole[: len(whole) - max((len(part) for part in begun if whole.endswith(part)), default=0)]
