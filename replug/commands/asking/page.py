"""A reply as one page of HTML that loads nothing and runs nothing. What others wrote is escaped text."""

from html import escape
from pathlib import Path

from replug.commands.asking.reply import TITLES, Reply
from replug.commands.asking.table import number, told
from replug.config.plain_text import plain_line, plain_text
from replug.data.files import replace_file
from replug.evals.page import CSS
from replug.web.records import Passage

NOTHING_ELSE = "<meta http-equiv=Content-Security-Policy content=\"default-src 'none'; style-src 'unsafe-inline'\">"
OWN_CSS = """
.answer { font-size: 1.4rem; font-weight: 600; white-space: pre-wrap; margin: .6rem 0; }
.evidence { border-bottom: 1px solid #ddd; padding: .6rem 0; overflow-wrap: anywhere; } .evidence p { margin: .3rem 0; }
"""
FACTORS_NOTE = (
    "Natural logarithms. a: answer, q: question, p: passage. Factors are those of an answer's likeliest candidate."
)


def write_page(path: Path, reply: Reply) -> None:
    replace_file(path, page_of(reply).encode())


def page_of(reply: Reply) -> str:
    title = escape(plain_line(reply.question))
    lines = "".join(f"<p class=muted>{_text(line)}</p>" for line in told(reply))
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8>{NOTHING_ELSE}<title>{title}</title>"
        f"<style>{CSS}{OWN_CSS}</style><h1>{title}</h1>"
        f"<div class=answer>{_text(reply.answer) or 'no answer'}</div>{lines}"
        f"{_evidence_section(reply)}{_candidates_section(reply)}</html>\n"
    )


def _evidence_section(reply: Reply) -> str:
    blocks = "".join(_evidence(place, passage) for place, passage in enumerate(reply.passages, start=1))
    return f"<h2>Evidence</h2>{blocks}" if blocks else ""


def _evidence(place: int, passage: Passage) -> str:
    date = f" · {escape(passage.fetched)}" if passage.fetched else ""
    title = f"<b>{_text(passage.title)}</b> " if passage.title else ""
    return (
        f"<div class=evidence><p>[{place}] {passage.probability:.1%} · {title}{_link(passage.url)}"
        f"<span class=muted>{date}</span></p><p>{_text(passage.text)}</p></div>"
    )


def _link(url: str) -> str:
    """Only what a browser fetches by http is a link."""
    shown = _text(url)
    if not url.lower().startswith(("http://", "https://")):
        return f"<span class=muted>{shown}</span>"
    return f'<a href="{escape(plain_line(url))}" rel="noreferrer noopener">{shown}</a>'


def _candidates_section(reply: Reply) -> str:
    if not reply.scores:
        return ""
    factors = "".join(f"<th>{escape(title)}</th>" for title in TITLES.values()) if reply.candidates else ""
    rows = "".join(_candidate_row(reply, answer, score) for answer, score in reply.scores.items())
    note = f"<p class=muted>{FACTORS_NOTE}</p>" if reply.candidates else ""
    return f"<h2>Candidates</h2>{note}<table><tr><th>answer</th><th>score</th><th>from</th>{factors}</tr>{rows}</table>"


def _candidate_row(reply: Reply, answer: str, score: float) -> str:
    best = reply.best_candidate(answer)
    numbers = [number(best.factors[name]) for name in TITLES] if best else []
    places = ", ".join(map(str, reply.passages_of(answer)))
    mark = " class=best" if answer == reply.answer else ""
    cells = "".join(f"<td>{cell}</td>" for cell in (number(score), places, *numbers))
    return f"<tr><td{mark}>{_text(answer)}</td>{cells}</tr>"


def _text(text: str) -> str:
    return escape(plain_text(text))
