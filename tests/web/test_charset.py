"""Pages in the encodings of the web are read as meant; what is broken is counted."""

import pytest

from replug.web.network import FetchFailed
from replug.web.pages import decode_page

SENTENCE = "Größe, naïve café und Straße"


def meta(encoding: str) -> bytes:
    return f"<html><head><meta charset='{encoding}'></head><body>".encode()


@pytest.mark.parametrize("encoding", ["utf-8", "windows-1252", "iso-8859-15", "utf-16"])
def test_the_header_says_the_encoding(encoding: str) -> None:
    found = decode_page(SENTENCE.encode(encoding), f'text/html; charset="{encoding}"')
    assert (found.text, found.broken) == (SENTENCE, 0)


@pytest.mark.parametrize(
    "text, encoding", [(SENTENCE, "iso-8859-1"), ("灯台は岩の上", "shift_jis"), ("Маяк", "koi8-r")]
)
def test_the_page_says_the_encoding_where_the_header_does_not(text: str, encoding: str) -> None:
    assert decode_page(meta(encoding) + text.encode(encoding), "text/html").text.endswith(text)


@pytest.mark.parametrize("encoding", ["unicode_escape", "utf-7", "idna", "hex", "rot13", "zip", "../x", "no-such"])
def test_a_name_that_is_no_encoding_of_pages_is_not_used(encoding: str) -> None:
    text = f"{SENTENCE} \\u0041 +AEE-"
    assert decode_page(text.encode(), f"text/html; charset={encoding}").text == text


def test_a_page_that_says_nothing_is_guessed() -> None:
    assert decode_page(SENTENCE.encode(), "text/html").text == SENTENCE
    russian = "Маяк стоит на скале в бухте. Его построили в прошлом веке. " * 20
    assert decode_page(russian.encode("cp1251"), "text/html").text == russian


def test_broken_bytes_are_counted_and_the_text_stays() -> None:
    found = decode_page(b"A page with one \xff and another \xfe of them", "text/html; charset=utf-8")
    assert (found.text, found.broken) == ("A page with one \ufffd and another \ufffd of them", 2)


def test_a_page_that_is_mostly_broken_is_not_read() -> None:
    with pytest.raises(FetchFailed, match="encoding"):
        decode_page(bytes(range(128, 256)) * 10, "text/html; charset=utf-8")
