"""What one request may ask for, and how many may be under way at once."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from replug.serving.errors import overloaded, refused


@dataclass(frozen=True, slots=True)
class ServingLimits:
    """Of requests; what is beyond is refused by name.

    `max_texts` are inputs of an embedding, queries of a search, or prompts. `max_prompt_tokens` are of a prompt with a
    document and the answer, and at most what the LM holds. `max_batch` texts or prompts are computed in one call.
    """

    max_body_bytes: int = 1_000_000
    max_texts: int = 256
    max_documents: int = 100
    max_prompt_tokens: int = 4096
    max_new_tokens: int = 512
    max_concurrency: int = 64
    max_batch: int = 16
    timeout_seconds: float = 300.0

    def require_texts(self, param: str, number: int) -> None:
        if not 0 < number <= self.max_texts:
            raise refused(param, f"{number} texts; expected 1 to {self.max_texts}")

    def require_documents(self, param: str, k: int, least: int = 1) -> None:
        if not least <= k <= self.max_documents:
            raise refused(param, f"{k} documents; expected {least} to {self.max_documents}")


class Admission:
    """Counts the requests under way; one too many is refused with when to come again, and never waits unseen."""

    def __init__(self, at_most: int) -> None:
        self._at_most, self.under_way = at_most, 0

    @contextmanager
    def admitted(self) -> Iterator[None]:
        if self.under_way >= self._at_most:
            raise overloaded(self._at_most)
        self.under_way += 1
        try:
            yield
        finally:
            self.under_way -= 1
