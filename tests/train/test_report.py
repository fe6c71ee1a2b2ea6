"""The report, a page that loads nothing and trusts no text; its verdict, in one sentence, and what to try."""

import json
import re
from typing import Any

import pytest

from replug.config.load import config_to_yaml, load_config
from replug.train.report import HARMED, HELPED, NOT_SHOWN, verdict_of, weights_lines, write_report
from replug.train.run_dir import RunDirectory
from tests.support.command_line import ROOT

ATTACK = "<script>alert('x')</script>"


def entry(value: float, low: float = 0.0, high: float = 0.0) -> dict:
    return {"value": value, "n": 12, "interval": [low, high]}


def results_of(domain: str) -> dict:
    """Results of a run with a domain beside all texts."""
    values = {"none": (2.0, 2.0), "random": (2.1, 2.1), "replug": (1.8, 1.8), "lsr": (1.7, 1.9)}
    heldout = {name: {"bpb": entry(of[0]), f"bpb/{domain}": entry(of[1])} for name, of in values.items()}
    heldout["lsr"]["bpb - replug"] = entry(-0.1, -0.2, -0.05)
    heldout["replug"]["bpb - none"] = entry(-0.2, -0.3, 0.1)
    found = {"replug": {"Success@20": entry(0.3)}, "lsr": {"Success@20": entry(0.625)}}
    return {"language_modelling": heldout, "retrieval": found}


RESULTS = results_of("a & <b>")
SERIES = (
    *("lm/entropy", "retriever/entropy", "retriever/rank_correlation", "time/step_seconds", "time/wait_scores_seconds"),
    *("index/age_steps", "index/live_version", "index/recall", "index/overlap", "index/refreshes_failed"),
)
METRICS = [
    {"step": step, "train/loss": 1.0 / step, "index/swapped": step % 4 == 0, "index/swap_ms": 3.0 * (step % 4 == 0)}
    | dict.fromkeys(SERIES, 0.5 * step)
    for step in range(1, 10)
]
DOCUMENT = {"id": f"id {ATTACK}", "text": f"text {ATTACK}", "similarity": 0.5}
EXAMPLES = [
    {"context": f"before {ATTACK}", "continuation": f" after {ATTACK} 日本", "before": [DOCUMENT], "after": [DOCUMENT]}
]
PICTURE = {
    "id": f"text {ATTACK}",
    "method": "lsr/posterior",
    "gain_bits_per_byte": 0.25,
    "num_tokens": 60,
    "documents": [f"id {ATTACK}", "d" * 60],
    "tokens": [" sky", " ", "\n\n", "$a_b$ < c"],
    "weights": [[0.5, 0.9, 0.95, 0.95], [0.5, 0.1, 0.05, 0.05]],
    "gain_bits": [0.0, 1.0, -0.5, 2.0],
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """A finished run whose texts attack, with its page."""
    run = RunDirectory(tmp_path_factory.mktemp("run"))
    config = load_config(ROOT / "configs/debug.yaml", [f"run_dir={run.path}", f"retriever.query_prompt={ATTACK}"])
    run.folder.claim({})
    run.config.write_text(config_to_yaml(config))
    run.metrics.write_text("".join(f"{json.dumps(row)}\n" for row in METRICS))
    run.examples.write_text(json.dumps(EXAMPLES))
    run.document_weights.write_text(json.dumps(PICTURE))
    run.finish(RESULTS)
    assert write_report(run) == RESULTS
    return run


def test_the_page_loads_nothing_begins_with_the_verdict_and_has_numbers_and_figures(run: RunDirectory) -> None:
    page = run.report.read_text(encoding="utf-8")
    assert not re.findall(r"""(?:src|href)\s*=\s*["']?\s*(?:https?:)?//""", page)
    assert not re.findall(r"""(?:url\(|@import)\s*["']?\s*(?:https?:)?//""", page)
    assert "<link" not in page and "<script" not in page
    assert page.count("<svg") == page.count("</svg>") == 6
    top = page.split("<h2>")[1]
    assert top.startswith("HELPED</h2>") and "(95% interval -0.2000 to -0.0500); below 0 is better" in top
    for text in (
        "<td>1.7000</td>",
        "bpb of lsr − replug: -0.1000 (-0.2000 to -0.0500: lower)",
        "bpb of replug − none: -0.2000 (-0.3000 to +0.1000: no difference shown)",
        "<th>Success@20</th>",
        "the largest gain per byte over lsr (0.250 bits); the first 4 of its 60 tokens.",
        *(f">{token}</text>" for token in ("sky", "␣", "\\n\\n", "$a_b$␣&lt;␣c")),
        *(f"{text} &lt;script&gt;" for text in ("before", "after", "text", "id", "query_prompt:")),  # escaped, not run
        "<td>a &amp; &lt;b&gt;</td>",
        "日本",
    ):
        assert text in page, text
    assert run.picture.read_bytes().startswith(b"\x89PNG")


LOOK = {"step": 0, "bpb": 0.92, "temperature": 0.1, "mrr": None, "share": None}


def test_the_lines_say_which_weights_the_tuned_retriever_has() -> None:
    last = {"step": 30, "steps": 30, "first": None, "best": None}
    assert weights_lines({"weights": last}) == ["lsr: the weights of step 30, the last, in retriever/"]
    lines = weights_lines({"weights": {**last, "first": LOOK, "best": {**LOOK, "step": 10, "bpb": 0.9}}})
    assert lines[0] == "lsr: the weights of step 10, the best of 30 on development texts, in retriever/"
    assert lines[1:] == ["development texts, bits per byte: 0.9000, before 0.9200"]


# The verdict ----------------------------------------------------------------------------------------------------------


def results(value: float, low: float, high: float, step: int = 30, **more: Any) -> dict[str, Any]:
    difference = {"value": value, "interval": [low, high], "n": 200, "p": 0.01, **more}
    return {"language_modelling": {"lsr": {"bpb - replug": difference}}, "weights": {"step": step}}


def asked(value: float, low: float, high: float) -> dict[str, Any]:
    firsts = {"replug": {"Success@1": {"value": 0.5}}, "lsr": {"Success@1": {"value": 0.6}}}
    firsts["lsr"]["MRR@20 - replug"] = {"value": value, "interval": [low, high], "n": 40}
    return {"questions": firsts, "weights": {"step": 30}}


@pytest.mark.parametrize(
    ("found", "verdict", "sentence", "more"),
    [
        (
            results(-0.034, -0.072, -0.009),
            HELPED,
            "HELPED: bits per byte of held-out texts -0.0340 (95% interval -0.0720 to -0.0090); below 0 is better.",
            "",
        ),
        (results(-0.0041, -0.0122, 0.005), NOT_SHOWN, "NO DIFFERENCE SHOWN: bits per byte", "data.num_heldout"),
        (results(0.034, 0.009, 0.072), HARMED, "HARMED: bits per byte of held-out texts +0.0340", "train.lr"),
        (results(0.0, 0.0, 0.0, step=0), NOT_SHOWN, "texts +0.000000 (95%", "weights of step 0"),
        # Few sources and differences of rounding show nothing.
        (results(0.02, 0.01, 0.03, clusters=6), HARMED, "", "so the interval is too narrow"),
        (results(0.02, 0.01, 0.03, clusters=5), NOT_SHOWN, "", "fewer than 6 show no difference"),
        (results(2e-6, 1e-9, 4e-6, clusters=40), NOT_SHOWN, "", ""),
        (results(1.3e-5, 6e-6, 2e-5, clusters=40), HARMED, "", ""),
        # Questions have a sentence of their own, and harm by either is harm.
        (asked(0.1, 0.04, 0.2), HELPED, "HELPED: MRR@20 of 40 held-out questions +0.1000", ""),
        (asked(0.01, -0.06, 0.1), NOT_SHOWN, "above 0 is better. Success@1 60.0%, before 50.0%.", "data.heldout"),
        (asked(0.0, 0.0, 0.0), NOT_SHOWN, "NO DIFFERENCE SHOWN: MRR@20", "data.heldout"),
        (
            results(-0.03, -0.07, -0.01) | asked(-0.1, -0.2, -0.04),
            HARMED,
            "below 0 is better. HARMED: MRR@20",
            "train.lr",
        ),
        (results(0.03, 0.01, 0.07) | asked(0.1, 0.04, 0.2), HARMED, "HELPED: MRR@20", "train.lr"),
        (results(-0.03, -0.07, -0.01) | asked(0.0, 0.0, 0.0), HELPED, "NO DIFFERENCE SHOWN: MRR@20", ""),
        ({"weights": {"step": 3}}, None, "", ""),
    ],
)
def test_the_verdict_its_sentence_and_what_to_try(found: dict, verdict: str | None, sentence: str, more: str) -> None:
    told = verdict_of(found)
    assert (told and told["verdict"]) == verdict
    if told is not None:
        assert sentence in told["sentence"] and more in " ".join(told["more"])
