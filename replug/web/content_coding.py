"""A body out of its Content-Encoding, as it arrives and never beyond a limit.

Only what was asked for is taken: gzip and deflate, one layer of it. A megabyte of gzip may hold a gigabyte: each piece
is given out only as far as the limit leaves room, so that a bomb takes no more memory than an honest page.
"""

import zlib

from replug.web.fetch_failure import FetchFailed

ACCEPTED = "gzip, deflate"
WINDOW_BITS = {"gzip": 16 + zlib.MAX_WBITS, "x-gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
ZLIB_HEADER = 0x8  # the low bits of the first byte; some servers send deflate without a header


class BoundedBody:
    """Bytes of one body, at most `limit` of them. Raises FetchFailed where there are more, or they are damaged."""

    def __init__(self, coding: str, limit: int) -> None:
        self._coding, self._limit = coding.strip().lower(), limit
        if self._coding not in ("", "identity", *WINDOW_BITS):
            raise FetchFailed("content_encoding")
        self._decoder = zlib.decompressobj(WINDOW_BITS[self._coding]) if self._coding in WINDOW_BITS else None
        self._decoded = bytearray()
        self._is_begun = False

    def feed(self, piece: bytes) -> None:
        try:
            self._decoded += self._decompressed(piece) if self._decoder else piece
        except zlib.error as error:
            raise FetchFailed("content_encoding") from error
        if len(self._decoded) > self._limit:
            raise FetchFailed("too_large")

    def finish(self) -> bytes:
        """All of it. Raises FetchFailed where the body broke off."""
        if self._decoder and self._is_begun and not self._decoder.eof:
            raise FetchFailed("incomplete")
        return bytes(self._decoded)

    def _decompressed(self, piece: bytes) -> bytes:
        """As much of it as the limit leaves room for, and a byte more."""
        self._choose_form(piece)
        room, out = self._limit + 1 - len(self._decoded), bytearray()
        while piece and len(out) < room:  # zlib takes 0 for no limit
            assert self._decoder is not None
            if self._decoder.eof:  # gzip may be of several members
                self._decoder = zlib.decompressobj(WINDOW_BITS[self._coding])
            out += self._decoder.decompress(piece, room - len(out))
            piece = self._decoder.unused_data
        return bytes(out)

    def _choose_form(self, piece: bytes) -> None:
        if piece and not self._is_begun:
            self._is_begun = True
            if self._coding == "deflate" and piece[0] & 0x0F != ZLIB_HEADER:
                self._decoder = zlib.decompressobj(-zlib.MAX_WBITS)
