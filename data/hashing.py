"""Hashes of texts: which are equal, and which is which. Pure, and the same on every machine."""

import hashlib


def normalise(text: str) -> str:
    """What makes two texts equal: runs of white space are one space, case is folded."""
    return " ".join(text.split()).casefold()


def content_hash(text: str, seed: int = 0) -> bytes:
    """16 bytes that equal texts share."""
    return hashlib.blake2b(normalise(text).encode(), digest_size=16, key=f"sample:{seed}".encode()).digest()


def hash64(text: str) -> int:
    """64 bits of a text's hash, to tell texts apart."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
