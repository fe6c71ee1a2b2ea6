"""Why a page was not read: a short name that is counted, the same for every page that fails so."""


class FetchFailed(Exception):
    """A page that gives nothing. `reason` is counted; it holds nothing of the page's own words but a status."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
