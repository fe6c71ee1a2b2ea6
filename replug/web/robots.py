"""What robots.txt lets us read, as RFC 9309 has it: none there allows all, one that cannot be read allows nothing.

The rules are kept in memory for a day. `protego` reads them, which knows wildcards and the longest match;
`urllib.robotparser` takes the first line that fits.
"""

import time
from dataclasses import dataclass

from protego import Protego

AGENT = "replug"  # what rules may name us by
MAX_BYTES = 512_000  # RFC 9309 asks for 500 KiB at least
SECONDS_KEPT = 86_400.0
ALLOW_ALL, ALLOW_NOTHING = "", "User-agent: *\nDisallow: /"


@dataclass(frozen=True, slots=True)
class RobotsRules:
    """Of one origin. `is_known` is False where they could not be read."""

    rules: Protego
    is_known: bool
    read_at: float

    @property
    def are_old(self) -> bool:
        return time.monotonic() - self.read_at > SECONDS_KEPT

    def refusal(self, url: str) -> str | None:
        """The reason why a URL is not read, None where it may be."""
        if self.rules.can_fetch(url, AGENT):
            return None
        return "robots" if self.is_known else "robots_unreadable"

    @property
    def crawl_delay(self) -> float:
        """Seconds between two requests that the site asks for; 0 where it asks for none."""
        return max(0.0, float(self.rules.crawl_delay(AGENT) or 0.0))


def robots_of(status: int | None, body: bytes) -> RobotsRules:
    """From what was answered to a request for robots.txt; a status of None is no answer."""
    if status is not None and 200 <= status < 300:
        return RobotsRules(Protego.parse(body.decode("utf-8", errors="replace")), True, time.monotonic())
    is_absent = status is not None and 400 <= status < 500
    return RobotsRules(Protego.parse(ALLOW_ALL if is_absent else ALLOW_NOTHING), is_absent, time.monotonic())
