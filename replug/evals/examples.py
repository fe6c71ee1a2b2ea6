"""The record that every evaluation set shares: what is asked, and what a document is retrieved for."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Example:
    """One item of an evaluation set.

    Documents are retrieved for `query`. `group` is the domain or subject that figures are given by. `gold` are ids of
    documents known to be right; they only ever measure. `source` names the text it was cut from, where there is one.
    """

    id: str
    query: str
    group: str
    gold: tuple[str, ...] = ()
    source: str | None = None
