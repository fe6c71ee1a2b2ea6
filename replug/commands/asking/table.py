"""A reply on a terminal: the answer, its evidence, its candidates. What others wrote is text there, never markup."""

import math

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from replug.commands.asking.reply import TITLES, Reply
from replug.config.plain_text import plain_line, plain_text
from replug.web.records import Passage

SHOWN_CHARACTERS = 160
SHOWN_CANDIDATES = 10


def print_reply(reply: Reply) -> None:
    console = Console(highlight=False)
    console.print(Text(plain_text(reply.answer), "bold") if reply.answer else Text("no answer", "red"))
    for line in told(reply):
        console.print(Text(plain_line(line), "dim"), soft_wrap=True)
    if reply.passages:
        console.print(_evidence(reply))
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


def _evidence(reply: Reply) -> Table:
    table = Table("", "weight", Column("evidence", overflow="fold"), "date", title="Evidence", title_justify="left")
    for place, passage in enumerate(reply.passages, start=1):
        table.add_row(str(place), f"{passage.probability:.1%}", _shown(passage), passage.fetched or "")
    return table


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
