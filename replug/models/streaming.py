"""An answer in pieces while it grows: what no further token changes is given out, and joined it is the answer."""

from collections.abc import Iterable, Iterator

from replug.config.errors import RunError
from replug.models.generation import Stop, stop_texts


def pieces(texts: Iterable[str], stop: Stop) -> Iterator[str]:
    """What is new in each text of a growing answer, as soon as it is settled; the last text counts whole.

    Raises RunError where a tokenizer writes what was given out in another way when more tokens come.
    """
    answer, whole = GrowingAnswer(stop), ""
    for whole in texts:
        if piece := answer.grow(whole):
            yield piece
    if piece := answer.end(whole):
        yield piece


class GrowingAnswer:
    """An answer that is given out while it grows. Both methods raise RunError where a text is written anew."""

    def __init__(self, stop: Stop) -> None:
        self._stop, self._given = stop, ""

    def grow(self, whole: str) -> str:
        """What is new and settled in the text so far; nothing in one that is told again."""
        if self._given.startswith(whole):
            return ""
        _require_longer(whole, self._given)
        return self._give(settled(whole, self._stop))

    def end(self, whole: str) -> str:
        """What of the whole answer was not given out."""
        _require_longer(whole, self._given)
        return self._give(whole)

    def _give(self, ready: str) -> str:
        piece = ready[len(self._given) :]
        self._given += piece
        return piece


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
