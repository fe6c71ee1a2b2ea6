"""What the user's own rows become."""

import gzip
import json

import pytest

from replug.config.errors import UserError
from replug.data.records import Example
from replug.data.rows import read_documents, read_examples, read_json_lines


def test_every_field_of_a_text_is_kept_gold_ids_become_strings_and_a_row_names_a_text_without_id(tmp_path):
    row = {"id": 5, "context": "one", "continuation": " two", "domain": "d", "source": "s", "gold": ["a", 9]}
    (tmp_path / "a.jsonl").write_text(f'\ufeff{json.dumps(row)}\n{{"context": "three", "continuation": " four"}}\n')
    expected = [Example("5", "one", " two", "d", "s", ("a", "9")), Example("1", "three", " four", "all")]
    assert read_examples(tmp_path / "a.jsonl") == expected


def test_blank_lines_are_passed_over_and_still_counted(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('\n{"a": 1}\n   \n{"a": 2}')
    assert list(read_json_lines(path)) == [(f"{path}:2", {"a": 1}), (f"{path}:4", {"a": 2})]


PASSAGES = (
    "id\ttext\ttitle\n"
    '1\t"Aaron ( or ; ""Ahärôn"") is a prophet, high priest, and the brother of Moses"\tAaron\n'
    '2\tis described in ""Exodus"" 4:14 as the elder brother\t"Aaron ""the Levite"""\n'
)


def test_dprs_passages_of_wikipedia_are_a_corpus_as_they_are(tmp_path):
    """Lines of the form of psgs_w100.tsv, in which a field is quoted where it begins with a quote."""
    (tmp_path / "psgs.tsv").write_text(PASSAGES)
    with gzip.open(tmp_path / "psgs.tsv.gz", "wt") as file:
        file.write(PASSAGES)
    plain, packed = (list(read_documents(tmp_path / name)) for name in ("psgs.tsv", "psgs.tsv.gz"))
    assert plain == packed and [document.id for document in plain] == ["1", "2"]
    assert plain[0].text == 'Aaron\nAaron ( or ; "Ahärôn") is a prophet, high priest, and the brother of Moses'
    assert plain[1].text.startswith('Aaron "the Levite"\n')


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("id\ttext\ttitle\n1\tno title\n", ":2: 2 columns, the header has 3"),
        ('id\ttext\n1\t"open\n', ":2: not valid TSV"),
        ("id\tpassage\n1\tx\n", r"field 'text' is missing; the fields here are id, passage"),
        ("id\ttext\n", "holds no documents"),
    ],
)
def test_a_table_that_is_none_is_named_with_its_line(tmp_path, rows, message):
    (tmp_path / "table.tsv").write_text(rows)
    with pytest.raises(UserError, match=message):
        list(read_documents(tmp_path / "table.tsv"))
