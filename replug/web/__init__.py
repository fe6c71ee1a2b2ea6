"""From a question to passages: search engines, pages fetched behind a guard, snapshots of both, and passages."""

from replug.config.errors import require_extra


def require_web(what: str) -> None:
    """Raise UserError if a module of the extra `web` is missing. Call it before importing web/evidence.py."""
    modules = ("trafilatura", "lxml_html_clean", "charset_normalizer", "protego", "sentencex", "sklearn", "httpcore")
    require_extra("web", *modules, what=what)
