"""Unpack what a server sent, within a limit; apart from `fetch`, since a search without the web needs it too."""

import zlib


class FetchFailed(Exception):
    """A page that gives nothing. `reason` is counted; it holds none of the page's own words but a status."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


ACCEPTED = "gzip, deflate"
WINDOW_BITS = {"gzip": 16 + zlib.MAX_WBITS, "x-gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
ZLIB_HEADER = 0x8  # the low bits of the first byte; some servers send deflate without a header


def unpacked(body: bytes, coding: str, limit: int) -> bytes:
    """Return a body out of its coding. Raises FetchFailed if it is damaged, or if it has more than `limit` bytes.

    Unpacking stops at the limit, so a bomb takes no more memory than an honest page.
    """
    coding = coding.strip().lower()
    if coding in ("", "identity"):
        return body
    if coding not in WINDOW_BITS:  # among them gzip of gzip
        raise FetchFailed("content_encoding")
    bits, out = WINDOW_BITS[coding], bytearray()
    if coding == "deflate" and body and body[0] & 0x0F != ZLIB_HEADER:
        bits = -zlib.MAX_WBITS
    while body:  # gzip may have several members
        decoder = zlib.decompressobj(bits)
        try:
            out += decoder.decompress(body, limit + 1 - len(out))
        except zlib.error as error:
            raise FetchFailed("content_encoding") from error
        if len(out) > limit:
            raise FetchFailed("too_large")
        if not decoder.eof:
            raise FetchFailed("incomplete")
        body = decoder.unused_data
    return bytes(out)
