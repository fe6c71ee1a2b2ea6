"""What `replug ask` answers, with all that the answer is from: the record that table, JSON and page show.

A reply on a terminal: the answer, its evidence, its candidates. What others wrote is text there, never markup.

A reply as one page of HTML that loads nothing and runs nothing. What others wrote is escaped text.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from replug.answering.factors import (
    ANSWER_ALONE,
    ANSWER_GIVEN_QUESTION,
    PASSAGE,
    QUESTION_ALONE,
    QUESTION_GIVEN_ANSWER,
    Factors,
)
from replug.config.plain_text import plain_line, plain_text
from replug.data.files import replace_file
from replug.evals.tables import CSS
from replug.web.records import Passage

CLOSED_BOOK = "closed book"
TITLES = {
    ANSWER_GIVEN_QUESTION: "p(a|q,p)",
    QUESTION_GIVEN_ANSWER: "p(q|a,p)",
    ANSWER_ALONE: "p(a|p)",
    QUESTION_ALONE: "p(q|p)",
    PASSAGE: "p(p|q)",
}


@dataclass(frozen=True, slots=True)
class ScoredCandidate:
    """An answer of one passage (its number, from 0), and the logarithm of each of its factors, in nats."""

    answer: str
    passage: int
    factors: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class FollowedPolicy:
    """Say in a line what a policy decided, and why."""

    signal: str
    value: float | None
    threshold: float | str
    retrieves: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Reply:
    """`way` is replug, a reranker, or closed book. The weights of the passages are their `probability`.

    `sum_logprob` (nats) is of the answer of an ensemble or of a closed book; None of a reranker's, which has a score.
    `scores` are those of the distinct answers, the best first: logarithms of any scale, or closed book log-probs.
    """

    question: str
    answer: str
    way: str
    lm: str
    searched: str
    sum_logprob: float | None = None
    passages: tuple[Passage, ...] = ()
    failures: Mapping[str, int] = field(default_factory=dict)
    scores: Mapping[str, float] = field(default_factory=dict)
    candidates: tuple[ScoredCandidate, ...] = ()
    policy: FollowedPolicy | None = None

    def best_candidate(self, answer: str) -> ScoredCandidate | None:
        """The likeliest of an answer's candidates, given question and passage."""
        own = [one for one in self.candidates if one.answer == answer]
        return max(own, key=lambda one: one.factors[ANSWER_GIVEN_QUESTION], default=None)

    def passages_of(self, answer: str) -> list[int]:
        """The numbers, from 1, of the passages that gave an answer."""
        return sorted(one.passage + 1 for one in self.candidates if one.answer == answer)

    def as_json(self) -> dict[str, Any]:
        """Everything, of JSON's own types; a logarithm of nothing is null."""
        row: dict[str, Any] = {
            "question": self.question,
            "answer": self.answer,
            "way": self.way,
            "sum_logprob": self.sum_logprob,
            "lm": self.lm,
            "searched": self.searched,
            "evidence": [
                {
                    "id": passage.doc_id,
                    "title": passage.title,
                    "url": passage.url,
                    "fetched": passage.fetched,
                    "rank": passage.rank,
                    "similarity": passage.cosine,
                    "weight": passage.probability,
                    "text": passage.text,
                }
                for passage in self.passages
            ],
            "failures": dict(self.failures),
            "scores": [{"answer": answer, "score": _finite(score)} for answer, score in self.scores.items()],
            "candidates": [
                {
                    "answer": one.answer,
                    "passage": one.passage + 1,
                    "factors": {name: _finite(value) for name, value in one.factors.items()},
                }
                for one in self.candidates
            ],
        }
        if (followed := self.policy) is not None:
            row["policy"] = {
                "signal": followed.signal,
                "value": followed.value,
                "threshold": followed.threshold,
                "retrieves": followed.retrieves,
            }
        return row


def scored_candidates(factors: Factors) -> tuple[ScoredCandidate, ...]:
    """Every candidate with its factors, and those of its passage."""
    return tuple(
        ScoredCandidate(
            answer,
            int(passage),
            {
                ANSWER_GIVEN_QUESTION: float(factors.answer_given_question[row]),
                QUESTION_GIVEN_ANSWER: float(factors.question_given_answer[row]),
                ANSWER_ALONE: float(factors.answer_alone[row]),
                QUESTION_ALONE: float(factors.question_alone[passage]),
                PASSAGE: float(factors.passage[passage]),
            },
        )
        for row, (answer, passage) in enumerate(zip(factors.answers, factors.passages, strict=True))
    )


def best_first(scores: Mapping[str, float]) -> dict[str, float]:
    """Equal ones stay in their order, so that the first is what `rerankers.best_answer` takes."""
    return dict(sorted(scores.items(), key=lambda one: -one[1]))


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


SHOWN_CHARACTERS = 160
SHOWN_CANDIDATES = 10


def print_reply(reply: Reply) -> None:
    console = Console(highlight=False)
    console.print(Text(plain_text(reply.answer), "bold") if reply.answer else Text("no answer", "red"))
    for line in told(reply):
        console.print(Text(plain_line(line), "dim"), soft_wrap=True)
    if reply.passages:
        table = Table("", "weight", Column("evidence", overflow="fold"), "date", title="Evidence", title_justify="left")
        for place, passage in enumerate(reply.passages, start=1):
            table.add_row(str(place), f"{passage.probability:.1%}", _shown(passage), passage.fetched or "")
        console.print(table)
    if reply.scores:
        console.print(_candidates(reply))


def told(reply: Reply) -> list[str]:
    """How the answer came about: the way, the policy's reason, and what the search did not give."""
    lines = [f"{reply.way}; {reply.lm}; {reply.searched}"]
    if reply.sum_logprob is not None:
        lines[0] += f"; log p {reply.sum_logprob:.2f}"
    if reply.policy is not None:
        lines.append(reply.policy.reason)
    elif not reply.passages:
        lines.append("no evidence: the LM answers alone")
    if reply.failures:
        lines.append("missing: " + ", ".join(f"{name} {count}" for name, count in reply.failures.items()))
    return lines


def number(value: float) -> str:
    """A logarithm; of nothing it is a dash."""
    return f"{value:.2f}" if math.isfinite(value) else "–"


def _shown(passage: Passage) -> Text:
    """Title and address over the beginning of the text."""
    heads = [plain_line(part) for part in (passage.title, passage.url) if part]
    text = plain_line(passage.text)
    cut = text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}…"
    return Text.assemble((" · ".join(heads), "bold"), "\n", (cut, "dim"), overflow="fold")


def _candidates(reply: Reply) -> Table:
    """The best ones; factors are those of an answer's likeliest candidate."""
    more = len(reply.scores) - SHOWN_CANDIDATES
    title = f"Candidates{f', and {more} more' if more > 0 else ''}"
    factors = list(TITLES.values()) if reply.candidates else []
    numbers = [Column(name, justify="right") for name in ("score", *factors)]
    columns = [numbers[0], Column("answer", overflow="fold"), Column("from"), *numbers[1:]]
    table = Table(*columns, title=title, title_justify="left", caption="natural logarithms", caption_justify="left")
    for answer, score in list(reply.scores.items())[:SHOWN_CANDIDATES]:
        best = reply.best_candidate(answer)
        of_best = [number(best.factors[name]) for name in TITLES] if best else []
        places = ", ".join(map(str, reply.passages_of(answer)))
        table.add_row(number(score), Text(plain_line(answer)), places, *of_best)
    return table


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
    blocks = "".join(_evidence_block(place, passage) for place, passage in enumerate(reply.passages, start=1))
    evidence = f"<h2>Evidence</h2>{blocks}" if blocks else ""
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8>{NOTHING_ELSE}<title>{title}</title>"
        f"<style>{CSS}{OWN_CSS}</style><h1>{title}</h1>"
        f"<div class=answer>{_text(reply.answer) or 'no answer'}</div>{lines}"
        f"{evidence}{_candidates_section(reply)}</html>\n"
    )


def _evidence_block(place: int, passage: Passage) -> str:
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
    rows = ""
    for answer, score in reply.scores.items():
        best = reply.best_candidate(answer)
        numbers = [number(best.factors[name]) for name in TITLES] if best else []
        places = ", ".join(map(str, reply.passages_of(answer)))
        mark = " class=best" if answer == reply.answer else ""
        cells = "".join(f"<td>{cell}</td>" for cell in (number(score), places, *numbers))
        rows += f"<tr><td{mark}>{_text(answer)}</td>{cells}</tr>"
    note = f"<p class=muted>{FACTORS_NOTE}</p>" if reply.candidates else ""
    return f"<h2>Candidates</h2>{note}<table><tr><th>answer</th><th>score</th><th>from</th>{factors}</tr>{rows}</table>"


def _text(text: str) -> str:
    return escape(plain_text(text))
