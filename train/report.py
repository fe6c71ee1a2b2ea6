"""`report.html`: one self-contained page with the table, the curves, and what each retriever finds."""

import json
from collections.abc import Sequence
from functools import partial
from html import escape
from pathlib import Path

from replug.data.files import replace_file
from replug.evals.figures import to_svg
from replug.evals.page import CSS
from replug.evals.retrieval import RECALL_AT
from replug.train import figures
from replug.train.figures import totals
from replug.train.results import METHODS, label_lines, result_lines

# Of the metrics under `scoring/`, those that say how the LM was used, with how they read.
SCORING_MEANS = [
    ("tokens_per_second", "{:,.0f} tokens a second"),
    ("busy_share", "busy {:.0%} of the time"),
    ("batch_fill", "{:.1%} of what it computed was text, the rest padding"),
]
SCORING_COUNTS = [
    ("misses", "pairs scored"),
    ("hits", "pairs found in the cache"),
    ("requests", "requests"),
    ("tokens_sent", "tokens sent"),
    ("retries", "calls done again"),
    ("respawns", "replicas replaced"),
    ("truncated", "inputs truncated"),
]

INDEX_COLUMNS = [
    ("version", "index/live_version", "v{:.0f}"),
    ("first seen at step", "step", "{:.0f}"),
    ("weights of step", "index/live_step", "{:.0f}"),
    ("recall", "index/recall", "{:.3f}"),
    ("overlap", "index/overlap", "{:.3f}"),
    ("drift", "index/drift", "{:.4f}"),
    ("documents / s", "index/swap_documents_per_second", "{:,.0f}"),
    ("build, s", "index/swap_build_seconds", "{:.1f}"),
    ("waited, s", "index/swap_wait_seconds", "{:.2f}"),
    ("switch, ms", "index/swap_ms", "{:.1f}"),
]
INDEX_NOTE = (
    "Recall: the share of the exact top documents that the index finds. Overlap: the share of what it finds that the "
    "version before found for the same queries. Drift: 1 − mean cosine of a document's vectors in both. "
    "Waited: how long training stood still for the refresh."
)


HEADROOM_NOTE = (
    "Headroom: what the documents that were found could give. The LM's own scores as weights are what training draws "
    "the retriever towards; both oracles know the text that they predict, which no retriever does."
)


DEVICES_NOTE = (
    "Shares of the time of all steps in which a device worked for each role; a node's cpu is all of its processors. "
    "Processes that take turns on a device are each busy until their work is done, so shares may add up above 1. "
    "What came before the first step and after the last does not count."
)


def write_report(
    path: Path,
    results: dict,
    *,
    metrics: Sequence[dict],
    device_use: Sequence[dict] = (),
    examples_path: Path,
    config_path: Path,
    made_by: Sequence[str] = (),
) -> None:
    """Write the page; it loads nothing from elsewhere.

    `metrics` and `device_use` are the rows of these files. `made_by` are lines that say how the run was made.
    """
    examples = json.loads(examples_path.read_text()) if examples_path.exists() else []
    sections = [
        "".join(f"<p class=muted>{escape(line)}</p>" for line in made_by),
        "".join(f"<p>{escape(line)}</p>" for line in label_lines(results)),
        _bpb_section(results) if "bpb" in results else "",
        _retrieval_section(results),
        _curves_section(metrics, is_online="labels" not in results),
        _devices_section(device_use),
        _index_section(metrics),
        _examples_section(examples),
        f"<h2>Configuration</h2><details><summary>resolved</summary><pre>{escape(config_path.read_text())}</pre></details>",
    ]
    title = f"REPLUG LSR: {escape(path.parent.name)}"
    page = (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title><style>{CSS}</style><h1>{title}</h1>"
    )
    replace_file(path, (page + "".join(sections) + "</html>\n").encode())


def _bpb_section(results: dict) -> str:
    methods = [method for method in METHODS if method in results["bpb"]["all"]]
    head = "".join(f"<th>{escape(METHODS[method])}</th>" for method in methods)
    rows = ""
    for name, values in results["bpb"].items():
        best = min(values[method] for method in methods)
        marked = (f"<td{' class=best' if values[of] == best else ''}>{values[of]:.4f}</td>" for of in methods)
        rows += f"<tr><td>{escape(name)}</td>{''.join(marked)}</tr>"
    drawings = to_svg(partial(figures.draw_bpb, results=results), width=9)
    if results["intervals"]:
        drawings += to_svg(partial(figures.draw_intervals, results=results), width=9, height=1.8)
    if results.get("headroom"):
        height = 1.2 + 0.5 * len(results["headroom"])
        drawing = to_svg(partial(figures.draw_headroom, results=results), width=9, height=height)
        drawings += f"<p class=muted>{HEADROOM_NOTE}</p>{drawing}"
    lines = "".join(f"<p>{escape(line)}</p>" for line in result_lines(results))
    return (
        f"<h2>Bits per byte on {results['num_examples']} held-out texts</h2><p class=muted>Lower is better; "
        f"the best of a row is bold. Intervals: paired bootstrap over the texts' sources.</p>"
        f"<table><tr><th></th>{head}</tr>{rows}</table>{lines}{drawings}"
    )


def _retrieval_section(results: dict) -> str:
    if "retrieval" not in results:
        return ""
    head = "".join(f"<th>R@{k}</th>" for k in RECALL_AT)
    rows = "".join(
        f"<tr><td>{escape(name)}</td>{''.join(f'<td>{value:.3f}</td>' for value in values.values())}</tr>"
        for name, values in results["retrieval"].items()
    )
    return f"<h2>Gold documents found</h2><table><tr><th>retriever</th>{head}</tr>{rows}</table>"


def _curves_section(metrics: Sequence[dict], is_online: bool) -> str:
    if not metrics:
        return ""
    measures_heldout = any("heldout/bpb" in row for row in metrics)  # not with evaluate.refresh_examples=0
    of_index = (figures.draw_index_age, figures.draw_times)
    draws = (
        figures.draw_loss,
        figures.draw_entropies,
        figures.draw_rank_correlation,
        *([figures.draw_heldout] if measures_heldout else []),
        *(of_index if is_online else ()),
        *([figures.draw_dev] if any("dev/bpb" in row for row in metrics) else []),
    )
    drawings = "".join(f"<div>{to_svg(partial(draw, metrics=metrics))}</div>" for draw in draws)
    lines = (_throughput_line(metrics) if is_online else "") + _scoring_line(metrics)
    return f"<h2>Training</h2><div class=grid>{drawings}</div>{lines}"


def _devices_section(rows: Sequence[dict]) -> str:
    """A row of the table for each device."""
    if not rows:
        return ""
    shares = totals(rows)
    columns = list(next(iter(shares.values()), {}))
    head = "".join(f"<th>{name}</th>" for name in columns)
    body = "".join(
        f"<tr><td>{escape(device)}</td>{''.join(f'<td>{of[name]:.1%}</td>' for name in columns)}</tr>"
        for device, of in shares.items()
    )
    return f"<h2>Devices</h2><p class=muted>{DEVICES_NOTE}</p><table><tr><th>device</th>{head}</tr>{body}</table>"


def _index_section(metrics: Sequence[dict]) -> str:
    """A row for each version that served, as the first step that logged it says."""
    rows = {row["index/live_version"]: row for row in reversed(metrics) if "index/live_version" in row}
    if not rows:
        return ""
    head = "".join(f"<th>{title}</th>" for title, _, _ in INDEX_COLUMNS)
    body = "".join(
        f"<tr>{''.join(f'<td>{text.format(rows[version][key])}</td>' for _, key, text in INDEX_COLUMNS)}</tr>"
        for version in sorted(rows)
    )
    last = metrics[-1]
    return (
        f"<h2>The index</h2><p class=muted>{INDEX_NOTE} Refreshes skipped: {last['index/refreshes_skipped']:.0f}; "
        f"failed: {last['index/refreshes_failed']:.0f}.</p><table><tr>{head}</tr>{body}</table>"
    )


def _throughput_line(metrics: Sequence[dict]) -> str:
    seconds = sum(row.get("time/step_seconds", 0.0) for row in metrics)
    waited = sum(row.get("time/wait_scores_seconds", 0.0) for row in metrics)
    if not seconds:
        return ""
    swaps = sum(bool(row.get("index/swapped")) for row in metrics)
    return (
        f"<p class=muted>{len(metrics)} logged steps in {seconds:.0f} s ({60 * len(metrics) / seconds:.1f} a minute), "
        f"{waited / seconds:.0%} of it waiting for LM scores; {swaps} hot swaps of the index.</p>"
    )


def _scoring_line(metrics: Sequence[dict]) -> str:
    """What the LM did meanwhile: means over the steps that used it, and counts at the end."""
    busy = [row for row in metrics if row.get("scoring/busy_share")]
    if not busy:
        return ""
    known = [(f"scoring/{key}", text) for key, text in SCORING_MEANS if f"scoring/{key}" in busy[0]]
    means = [text.format(sum(row[key] for row in busy) / len(busy)) for key, text in known]
    last = metrics[-1]
    counts = [f"{last[f'scoring/{key}']:,.0f} {text}" for key, text in SCORING_COUNTS if last.get(f"scoring/{key}")]
    return f"<p class=muted>The LM: {'; '.join(means + counts)}.</p>"


def _examples_section(examples: Sequence[dict]) -> str:
    if not examples:
        return ""
    blocks = []
    for example in examples:
        columns = ""
        for side, label in (("before", "retriever as it was"), ("after", "tuned")):
            columns += f"<div><b>{label}</b>"
            for doc in example[side]:
                about = f"<span class=muted>{escape(doc['id'])} · {doc['similarity']:.3f}</span>"
                columns += f"<pre>{about}\n{escape(doc['text'])}</pre>"
            columns += "</div>"
        text = f"{escape(example['context'])}<mark>{escape(example['continuation'])}</mark>"
        blocks.append(f"<pre>{text}</pre><div class=pair>{columns}</div><hr>")
    note = "The marked continuation is what the LM has to predict; neither retriever sees it."
    return f"<h2>What each retriever finds first</h2><p class=muted>{note}</p>" + "".join(blocks)
