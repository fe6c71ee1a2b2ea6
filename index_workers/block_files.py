"""Files of vectors and of token ids, one of each for the same rows of the corpus.

Vectors are float16 [rows, D] as numpy writes them, mapped without a descriptor that stays open. A file that is missing
or damaged raises UserError; a system that opens or maps no more files raises RunError.

    INDEX/tokens-3f2a9c01d4e5b677/tokens-00000.npy   row lengths, then all rows' ids, then a checksum of both

Token ids are a cache, so that a refresh does not tokenize again. The folder's name is a hash of all that the ids follow
from, so every version by the same tokenizer over the same corpus shares them. A missing or damaged file is made again
from the texts.
"""

import hashlib
import io
import json
import logging
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from replug.config.errors import RunError, UserError
from replug.data.files import SYSTEM_LIMIT, file_sha256, reading
from replug.data.tokenizing import plain_rules
from replug.index_workers.build_plan import BuildPlan

MEND = "remove it and run the command that built the index: only what is missing is made"
ITEM_BYTES = 2  # of float16


def write_vectors(path: Path, vectors: np.ndarray) -> int:
    """Write vectors [rows, D] as float16; returns the rows. Raises OSError where the disk does not take all of it."""
    vectors = np.ascontiguousarray(vectors, dtype=np.float16)
    with path.open("wb") as file:  # given a file, np.save ignores that the last bytes could not be written
        np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(vectors))
        file.write(vectors.data)
    return len(vectors)


def map_vectors(path: Path, shape: tuple[int, int]) -> np.ndarray:
    """The vectors of a file, in memory when they are first read; of the shape that is expected.

    By torch, since Python's own maps each keep a descriptor for as long as they live.
    """
    with _reading(path), path.open("rb") as file:
        found, dtype = _read_header(path, file)
        start, size = file.tell(), os.fstat(file.fileno()).st_size
    if found != shape or dtype != np.float16:
        raise UserError(f"{path} holds {dtype} {list(found)}, expected float16 {list(shape)}; {MEND}")
    if size != start + ITEM_BYTES * math.prod(shape):
        raise UserError(f"{path} is damaged, it has {size} bytes; {MEND}")
    return _map(path, size)[start // ITEM_BYTES :].view(shape).numpy()


def require_intact(path: Path, sha256: str) -> None:
    """Raise UserError where a file is missing or its bytes are not those that were marked."""
    with _reading(path):
        digest = file_sha256(path)
    if digest != sha256:
        raise UserError(f"{path} is damaged, its checksum differs from manifest.json's; {MEND}")


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        with reading(path):
            yield
    except FileNotFoundError:
        raise UserError(
            f"{path} is missing; run the command that built the index: only what is missing is made"
        ) from None


def _read_header(path: Path, file: BinaryIO) -> tuple[tuple[int, ...], np.dtype]:
    try:
        version = np.lib.format.read_magic(file)
        if version != (1, 0):
            raise ValueError(f"format {version}")
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    except ValueError as error:
        raise UserError(f"{path} is damaged, it holds no vectors ({error}); {MEND}") from error
    return shape, dtype


def _map(path: Path, size: int) -> torch.Tensor:
    """Private and writable, though nobody writes: torch warns of arrays that are not."""
    try:
        return torch.from_file(str(path), shared=False, size=size // ITEM_BYTES, dtype=torch.float16)
    except RuntimeError as error:  # the file was read a moment ago: what fails here is the system
        raise RunError(f"{path} cannot be mapped: {str(error).rpartition(': ')[2]}; {SYSTEM_LIMIT}") from error


log = logging.getLogger(__name__)

CHECKSUM_BYTES = 32  # of sha256


class TokenFiles:
    """The files under one folder, each read and written as a whole; nothing of them stays in memory."""

    def __init__(self, root: Path, fingerprint: str) -> None:
        self.folder = root / f"tokens-{fingerprint}"

    def read(self, file: int) -> list[np.ndarray] | None:
        """Ids of each row; None where they are not kept, and where they are damaged, which is said."""
        path = self.path(file)
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            log.warning(f"{path} cannot be read ({error.strerror}); tokenizing these documents again")
            return None
        body, checksum = content[:-CHECKSUM_BYTES], content[-CHECKSUM_BYTES:]
        if hashlib.sha256(body).digest() != checksum:
            log.warning(f"{path} is damaged; tokenizing these documents again")
            return None
        stream = io.BytesIO(body)
        lengths = np.load(stream, allow_pickle=False)
        ids = np.load(stream, allow_pickle=False)
        return np.split(ids, np.cumsum(lengths)[:-1])

    def write(self, file: int, ids: Sequence[np.ndarray]) -> None:
        """Keep the ids of each row. A disk that does not take them is said and does not stop the build."""
        body = _pack(ids)
        partial = self.folder / f"{self.path(file).name}.{uuid4().hex}.partial"  # two builders may write the same
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            partial.write_bytes(body + hashlib.sha256(body).digest())
            partial.replace(self.path(file))
        except OSError as error:
            with suppress(OSError):
                partial.unlink()
            log.warning(
                f"{self.path(file)} cannot be written ({error.strerror}); the next refresh will tokenize these again"
            )

    def path(self, file: int) -> Path:
        return self.folder / f"tokens-{file:05d}.npy"


def token_fingerprint(tokenizer: PreTrainedTokenizerBase, plan: BuildPlan) -> str:
    """Hash of what a file's ids follow from: tokenizer, limit and prompt, the corpus and how it is cut in files."""
    rules = plain_rules(tokenizer.backend_tokenizer.to_str())
    parts = [rules, plan.max_tokens, plan.corpus_sha256, plan.rows_per_file, plan.document_prompt]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def _pack(ids: Sequence[np.ndarray]) -> bytes:
    body = io.BytesIO()
    np.save(body, np.array([len(row) for row in ids], np.uint32), allow_pickle=False)
    np.save(body, np.concatenate(ids), allow_pickle=False)
    return body.getvalue()
