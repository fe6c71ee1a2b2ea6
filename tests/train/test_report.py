"""The report is one page that loads nothing, shows pictures, and trusts no text it is given."""

import json
import re
from pathlib import Path

import pytest

from replug.train.figures import overview_png
from replug.train.report import write_report

ATTACK = "<script>alert('x')</script>"
RESULTS = {
    "bpb": {
        "all": {"none": 2.0, "random": 2.1, "replug": 1.8, "lsr": 1.7},
        "a & <b>": {"none": 2.0, "random": 2.1, "replug": 1.8, "lsr": 1.9},
    },
    "intervals": {"lsr_minus_replug": [-0.2, -0.05], "replug_minus_none": [-0.3, 0.1]},
    "num_examples": 12,
    "retrieval": {
        "before": {"R@1": 0.1, "R@5": 0.2, "R@20": 0.3},
        "after": {"R@1": 0.4, "R@5": 0.5, "R@20": 0.625},
    },
}
METRICS = [
    {
        "step": step,
        "train/loss": 1.0 / step,
        "lm/entropy": 2.0,
        "retriever/entropy": 2.2,
        "retriever/rank_correlation": 0.5,
        "index/age_steps": step % 4,
        "time/step_seconds": 2.0,
        "time/wait_scores_seconds": 0.5,
        "index/swapped": float(step % 4 == 0),
        **({"heldout/bpb": 1.0} if step % 4 == 0 else {}),
        "index/swap_ms": 3.0 if step % 4 == 0 else 0.0,
    }
    for step in range(1, 10)
]
DOCUMENT = {"id": f"id {ATTACK}", "text": f"text {ATTACK}", "similarity": 0.5}
EXAMPLES = [
    {"context": f"before {ATTACK}", "continuation": f" after {ATTACK} 日本", "before": [DOCUMENT], "after": [DOCUMENT]}
]


def write(
    folder: Path, results: dict, metrics: list[dict], examples: list[dict] | None, device_use: list[dict] | None = None
) -> str:
    path = folder / "report.html"
    (folder / "config.yaml").write_text(f"name: {ATTACK}\n")
    if examples is not None:
        (folder / "examples.json").write_text(json.dumps(examples))
    write_report(
        path,
        results,
        metrics=metrics,
        device_use=device_use or [],
        examples_path=folder / "examples.json",
        config_path=folder / "config.yaml",
    )
    assert not path.with_suffix(".partial").exists()
    return path.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write(tmp_path_factory.mktemp("run"), RESULTS, METRICS, EXAMPLES)


def test_the_page_loads_nothing_from_elsewhere(page: str) -> None:
    assert not re.findall(r"""(?:src|href)\s*=\s*["']?\s*(?:https?:)?//""", page)
    assert not re.findall(r"""(?:url\(|@import)\s*["']?\s*(?:https?:)?//""", page)
    assert "<link" not in page
    assert "<script" not in page


def test_the_pictures_are_in_the_page(page: str) -> None:
    assert page.count("<svg") == page.count("</svg>") == 8


def test_texts_are_escaped_and_not_run(page: str) -> None:
    escaped = "&lt;script&gt;"
    for text in ("before", "after", "text", "id", "name:"):
        assert f"{text} {escaped}" in page
    assert "<td>a &amp; &lt;b&gt;</td>" in page
    assert "日本" in page


def test_the_numbers_are_in_the_page_and_the_best_of_a_row_is_marked(page: str) -> None:
    assert "Bits per byte on 12 held-out texts" in page
    assert re.findall(r"<td class=best>([\d.]+)</td>", page) == ["1.7000", "1.8000"]
    assert "95% interval -0.2000 to -0.0500: lower" in page
    assert "95% interval -0.3000 to +0.1000: no difference shown" in page
    assert "<td>0.625</td>" in page
    assert "9 logged steps in 18 s (30.0 a minute), 25% of it waiting for LM scores; 2 hot swaps" in page


def test_a_run_without_training_examples_or_gold_documents_has_a_page_too(tmp_path: Path) -> None:
    results = {**{key: value for key, value in RESULTS.items() if key != "retrieval"}, "intervals": {}}
    page = write(tmp_path, results, [], None)
    assert page.count("<svg") == 1
    assert "Gold documents" not in page


def test_a_domain_with_dollar_signs_is_a_name_like_any_other(tmp_path: Path) -> None:
    results = {**RESULTS, "bpb": {"all": RESULTS["bpb"]["all"], "$x^$ shop": RESULTS["bpb"]["all"]}}
    assert "<td>$x^$ shop</td>" in write(tmp_path, results, [], None)


ON_LABELS = [{"step": 1, "train/loss": 0.5, "dev/bpb": 1.8, "dev/kl": 0.4}]


@pytest.mark.parametrize("metrics", [METRICS, ON_LABELS, [{"step": 1, "train/loss": 0.5}]])
def test_the_overview_is_a_picture(tmp_path: Path, metrics: list[dict]) -> None:
    overview_png(tmp_path / "overview.png", RESULTS, metrics)
    assert (tmp_path / "overview.png").read_bytes().startswith(b"\x89PNG")


def test_what_the_lm_did_is_said_with_means_over_the_steps_that_used_it(tmp_path: Path) -> None:
    used = {"tokens_per_second": 1500.0, "busy_share": 0.8, "batch_fill": 0.975, "misses": 1200.0, "respawns": 0.0}
    idle = {**used, "tokens_per_second": 0.0, "busy_share": 0.0, "batch_fill": 1.0, "hits": 40.0, "respawns": 1.0}
    rows = [{**METRICS[0], **{f"scoring/{key}": value for key, value in row.items()}} for row in (used, used, idle)]
    page = write(tmp_path, RESULTS, rows, None)
    assert "1,500 tokens a second; busy 80% of the time; 97.5% of what it computed was text" in page
    assert "1,200 pairs scored; 40 pairs found in the cache; 1 replicas replaced" in page


def test_each_device_has_a_row_of_its_shares(tmp_path: Path) -> None:
    rows = [{"step": 1, "seconds": 4.0, "busy": {"a:0": {"score": 3.0}, "b:cpu": {"train": 1.0, "embed": 4.0}}}]
    page = write(tmp_path, RESULTS, METRICS, None, rows)
    assert "<tr><td>a:0</td><td>75.0%</td><td>0.0%</td><td>0.0%</td><td>0.0%</td><td>25.0%</td></tr>" in page
    assert "<tr><td>b:cpu</td><td>0.0%</td><td>100.0%</td><td>0.0%</td><td>25.0%</td><td>0.0%</td></tr>" in page
