"""What a search engine finds for every question, kept in the snapshot: an interrupted search asks it nothing twice."""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence

from replug.web.finder import EvidenceFinder

from replug.data.progress import Progress
from replug.web.records import FoundEvidence

log = logging.getLogger(__name__)


def find_for_all(finder: EvidenceFinder, queries: Mapping[str, str]) -> dict[str, FoundEvidence]:
    """By question id, given what is searched for by id. Raises what the finder does."""
    progress, found = Progress("search", len(queries)), {}
    for identifier, query in queries.items():
        found[identifier] = finder.find(query)
        progress.advance()
    _warn(list(found.values()))
    return found


def failures_of(found: Sequence[FoundEvidence]) -> Counter[str]:
    """How often each reason kept a page or an answer of the engine away."""
    return sum((Counter(one.failures) for one in found), Counter())


def _warn(found: Sequence[FoundEvidence]) -> None:
    without = sum(not one.passages for one in found)
    if without:
        reasons = ", ".join(f"{reason} {count}" for reason, count in failures_of(found).most_common())
        log.warning(
            f"{without} of {len(found)} questions have no passage, so methods that rerank answer them with nothing"
            f"{f'; what went wrong: {reasons}' if reasons else ''}"
        )
