"""A folder of prose is read, cut at headings and sentences, and dealt to the splits by files."""

import gzip
import importlib.util
import os
import re
import time
from collections.abc import Sequence

import pytest

from replug.config.errors import UserError
from replug.data.prepare.prose import Prose, _scan, points_elsewhere
from replug.data.sampling import Shares, shares_of, split_of
from replug.data.sources.records import FieldMap, Rejected
from replug.data.sources.shards import plan_source
from replug.data.sources.texts import markdown_of, read_items
from tests.support.preparing import prepare, write_files

GUIDE = """# Guide

A guide to bees.

## Keeping bees

Bees live in hives. A hive has frames, e.g. ten of them. Dr. Smith opens it in May. The queen stays below. In June the
keeper adds a second box. Honey is taken in August. The bees need sugar then.

### Tools

- a smoker
- a veil

```python
# not a heading
open(hive)
```

Legal
-----

None.
"""


def prose(text: str) -> Prose:
    """A token is a word with the white space before it."""
    return Prose(text, [match.end() for match in re.finditer(r"\s*\S+", text)])


def test_documents_begin_with_their_headings_and_end_with_sentences():
    first = "Bees live in hives. A hive has frames, e.g. ten of them. Dr. Smith opens it in May."
    second = "The queen stays below. In June the keeper adds a second box. Honey is taken in August. "
    assert [(title, " ".join(body.split())) for title, body in prose(GUIDE).documents(36)] == [
        ("Guide", "A guide to bees."),
        ("Guide > Keeping bees", first),
        ("Guide > Keeping bees", f"{second}The bees need sugar then."),
        ("Guide > Keeping bees > Tools", "- a smoker - a veil ```python # not a heading open(hive) ```"),
        ("Legal", "None."),
    ]


@pytest.mark.parametrize("limit", [8, 13, 40, 500])
def test_no_document_or_example_is_longer_than_its_limit_and_no_sentence_is_lost(limit: int):
    text = "\n\n".join(f"{'#' * (1 + number % 3)} Part {number}\n\n{GUIDE}" for number in range(5))
    documents, examples = list(prose(text).documents(limit)), list(prose(text).examples(limit))
    words = [len(f"{title} {body}".split()) for title, body in documents]
    assert max(words) <= limit
    assert max(len(part.split()) for pair in examples for part in pair) <= limit
    said = " ".join(body for _, body in documents).split()
    assert {"guide", "hives.", "e.g.", "August.", "smoker", "open(hive)", "None."} <= set(said)


def test_an_example_is_a_passage_whose_halves_are_sentences():
    [pair] = prose("One two three four. Five six seven eight. Nine ten. Eleven twelve thirteen.").examples(8)
    assert pair == ("One two three four. Five six seven eight.", " Nine ten. Eleven twelve thirteen.")


@pytest.mark.parametrize("end", ["。", "。」", "। ", "؟ ", "۔ "])
def test_sentences_end_as_their_script_has_it(end: str):
    sentence = "ab cd ef"
    cut = Prose(4 * (sentence + end), [match.end() for match in re.finditer(r"\S\s*", 4 * (sentence + end))])
    bodies = [body.strip() for _, body in cut.documents(2 * len(sentence + end))]
    assert bodies and all(body.endswith(end.strip()) for body in bodies)


def test_text_without_sentences_is_cut_by_lines_and_by_tokens_where_there_are_none():
    lines = "\n".join("a b c d e" for _ in range(6))
    assert {body for _, body in prose(lines).documents(12)} == {"a b c d e\na b c d e"}
    assert [len(body.split()) for _, body in prose("word " * 30).documents(12)] == [10, 10, 10]


def test_underlined_headings_have_the_levels_of_their_marks():
    body = "one two three four five six seven eight nine ten."
    marked = (("Title", "=", True), ("First", "-", False), ("Inner", "~", False), ("Last", "-", False))
    text = "".join(f"{over * 5 * mark}\n{title}\n{mark * 5}\n\n{body}\n\n" for title, mark, over in marked)
    titles = [title for title, _ in prose(text).documents(24)]
    assert titles == ["Title", "Title > First", "First > Inner", "Title > Last"], "as many headings as fit"
    assert [title for title, _ in prose(text).documents(200)] == ["Title"], "short sections stand together"
    assert next(body.splitlines()[0] for _, body in prose(text).documents(5)) == "=====", "no room for a title"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("- [One](a.md)\n- [Two](b.md): it\n- [Three](c.md)", True),
        ("Install ........ 3\nUse ............ 4", True),
        (".. toctree::\n\n   user/install\n   user/guide", True),
        ("* `One <https://a.org>`_\n* https://b.org/c", True),
        ("See [the guide](a.md), which explains how bees are kept.\nHives need sun.", False),
        (".. kernel-doc:: drivers/tty.c\n   :doc: buffers and all\n\n.. _label of it:", True),
        (".. note::\n   :class: wide\n\n   Bees are kept in hives.\n   They need sun.", False),
        (":Type: ioctl of bees\n:Returns: 0 where the hive has sun", False),
        ("参见[指南](a.md)了解如何养蜂以及蜂箱需要阳光", False),
        ("Plain words.", False),
    ],
)
def test_lists_of_links_and_tables_of_contents_only_point_elsewhere(text: str, expected: bool):
    assert points_elsewhere(text) is expected


def test_front_matter_and_comments_are_left_out_and_its_title_is_a_heading():
    page = "---\nlayout: x\ntitle: 'Bees'\n---\n<!-- licence -->\nText.\n"
    assert markdown_of(page) == "# Bees\n\nText.\n"


# Folders -----------------------------------------------------------------------------------------------------


def test_prose_is_read_and_what_else_a_folder_of_documentation_holds_is_counted(tmp_path, caplog):
    caplog.set_level("INFO", "replug")
    files = {f"{number}.md": b"# A\n\nSome text." for number in range(3)}
    others = {"conf.py": b"x = 1", "a/logo.png": b"\x89PNG\0", "data.jsonl": b'{"text": "row"}\n', "b.json": b"{}"}
    tools = {".git/x.md": b"no", "node_modules/y.md": b"no", "deep/__pycache__/z.txt": b"no"}
    write_files(tmp_path, files | others | tools | {"z.txt.gz": gzip.compress(b"packed")})
    plan = plan_source(str(tmp_path), FieldMap())
    assert plan.text_ids == ["0.md", "1.md", "2.md", "z.txt.gz"]
    plan.say("data.source")
    assert "4 in all: 1 .png" in caplog.text and "conf.py" in caplog.text


def test_html_without_the_extra_is_refused_with_the_line_that_installs_it(tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "trafilatura" else find(name))
    with pytest.raises(UserError, match=r"HTML files, and reading them needs trafilatura: pip install 'replug.web."):
        plan_source(str(write_files(tmp_path, {"a.html": b"<html></html>"})), FieldMap())


HEADINGS = [
    (f"Title\n-----\n\n{'-' * 48}\n$ git help clone\n{'-' * 48}\n\nText.\n", ["Title"]),  # between two rules
    ("=====\nTitle\n=====\n\n-------\nSection\n-------\n\nText.\n", ["Title", "Section"]),
    ("Title\n=====\n\nSo::\n\n   # not a heading\n   make\n", ["Title"]),
    ("# Title\n\n````\n```\n# no\n```\n# no\n````\n\n# End\n", ["Title", "End"]),  # a fence within a longer one
    ("# Title\n\n```make``` does it.\n\n# End\n", ["Title", "End"]),
    ("# 养蜂\n\n蜜蜂住在蜂箱里。\n\n工具\n----\n\n烟雾器。\n", ["养蜂", "工具"]),
]


@pytest.mark.parametrize(("text", "expected"), HEADINGS)
def test_headings_are_those_of_the_author(text: str, expected: list[str]):
    assert [title for *_, title in _scan(text)[0]] == expected


CODE = """<html><head><title>git-config</title></head><body><h1>git-config</h1><h2>DESCRIPTION</h2><p>{words}</p>
<p>but you can use <code>git config section.variable
~/</code> or <kbd>git<br>config</kbd> from the command line. {words}</p><h2>EXAMPLE</h2><p>{words}</p>
<pre><code># Core variables
[core]
        filemode = false</code></pre><h2>Variables</h2><p>{words}</p><h2>advice</h2><p>{words}</p></body></html>"""


def test_html_is_read_as_its_main_text_code_in_a_line_opens_no_block_and_a_page_without_one_is_no_mistake(tmp_path):
    pytest.importorskip("trafilatura", reason="the extra `web` is not installed")
    words = "The name is actually the section and the key separated by a dot. " * 4
    page = CODE.replace("{words}", words)
    source = write_files(tmp_path, {"a.html": page.encode(), "b.html": b"<html><body></body></html>"})
    [shard] = plan_source(str(source), FieldMap()).shards
    good, bad = (item for _, item in read_items(shard, FieldMap()))
    headings = [title for *_, title in _scan(good.text)[0]]
    assert headings == ["git-config", "DESCRIPTION", "EXAMPLE", "Variables", "advice"]
    assert "`git config section.variable ~/`" in good.text and "        filemode = false\n" in good.text
    assert isinstance(bad, Rejected) and bad.reason == "no_main_text"


@pytest.mark.parametrize("number", [10, 300])
def test_each_split_has_its_part_of_few_files(number: int):
    names = [f"{i}.md" for i in range(number)]
    shares = shares_of(names, 0, Shares(0.2, 0.1, 0.1))
    found = [split_of(name, 0, shares) for name in names]
    counts = {split: found.count(split) for split in ("queries", "heldout", "dev", "documents")}
    tenth = number // 10
    assert counts == {"queries": 2 * tenth, "heldout": tenth, "dev": tenth, "documents": 6 * tenth}


def test_a_folder_too_small_is_refused_with_its_number_of_files(tmp_path):
    write_files(tmp_path / "few", {f"{i}.md": GUIDE.encode() for i in range(9)})
    with pytest.raises(UserError, match=r"few holds 9 texts, and each is of one split alone .* at least 10 files"):
        prepare(tmp_path / "set", tmp_path / "few")
    assert not (tmp_path / "set").exists()


@pytest.mark.parametrize("unit", [".", ". ", "/", "[", "[a](", "[a][", "`<", ":a:`", "<http"])
def test_a_line_without_end_is_judged_in_time_that_grows_with_its_length(unit: str) -> None:
    begun = time.process_time()
    points_elsewhere(unit * (100_000 // len(unit)) + " some words of a text")
    assert time.process_time() - begun < 5  # minutes, where it grows with its square


FOOTER = "Was this page helpful? Tell us what you think by writing to the documentation team at docs@example.org today."


def pages(number: int, copies: Sequence[int] = ()) -> dict[str, bytes]:
    """Pages of words of their own; `copies` hold the text of the first."""
    words = {n: " ".join(f"W{n}x{i}{'.' * (i % 10 == 9)}" for i in range(60)) for n in range(number)}
    texts = {n: words[0] if n in copies else words[n] for n in range(number)}
    return {f"page{n}.md": f"# Page {n}\n\n{texts[n]}\n\n---\n{FOOTER}\n".encode() for n in range(number)}


def test_a_footer_of_all_pages_is_no_leak_and_a_copied_page_is(tmp_path, caplog):
    caplog.set_level("INFO", "replug")
    keys = {"num_documents": None, "num_queries": None, "num_heldout": None, "num_dev": 100, "ngram_overlap": 13}
    made = prepare(tmp_path / "set", write_files(tmp_path / "one", pages(60)), context_tokens=100, **keys)
    assert made.manifest["dropped"] == {} or not sum(made.manifest["dropped"].values())
    assert "runs of 13 words stand in half of the source documents: they count as no overlap" in caplog.text
    copied = write_files(tmp_path / "two", pages(60, copies=range(1, 20)))
    dropped = prepare(tmp_path / "other", copied, context_tokens=100, **keys).manifest["dropped"]
    assert sum(count for reason, count in dropped.items() if "13 words" in reason) > 5


def test_empty_files_are_passed_over_and_names_of_other_encodings_are_read(tmp_path, caplog):
    files = pages(12) | {f"part{n}/empty.md": b"" for n in range(9)}
    source = write_files(tmp_path / "docs", files)
    (source / os.fsdecode(b"caf\xe9.md")).write_bytes(pages(1)["page0.md"].replace(b"W0", b"Cafe"))
    made = prepare(tmp_path / "set", source, num_documents=None)
    assert made.manifest["rejected"] == {"empty_file": 9}
    assert "part0/empty.md: the file is empty (empty_file)" in caplog.text
    sources = {text.source for store in (made.queries, made.heldout) for text in store.examples(range(len(store)))}
    assert "caf\\xe9.md" in sources | {document.source for document in made.corpus.iterate()}
