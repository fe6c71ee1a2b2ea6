"""Files of vectors, float16 [rows, D] as numpy writes them, mapped without a descriptor that stays open.

A file that is missing or damaged raises UserError; a system that opens or maps no more files raises RunError.
"""

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from replug.config.errors import RunError, UserError
from replug.data.files import SYSTEM_LIMIT, reading
from replug.data.folder import FileSum, file_sum

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
    """Map the vectors of a file, which are read when they are first used. Raises UserError for another shape.

    By torch, since Python's own maps each keep a descriptor for as long as they live.
    """
    with _reading(path), path.open("rb") as file:
        try:
            if (version := np.lib.format.read_magic(file)) != (1, 0):
                raise ValueError(f"format {version}")
            actual, _, dtype = np.lib.format.read_array_header_1_0(file)
        except ValueError as error:
            raise UserError(f"{path} is damaged, it holds no vectors ({error}); {MEND}") from error
        start, size = file.tell(), os.fstat(file.fileno()).st_size
    if actual != shape or dtype != np.float16:
        raise UserError(f"{path} holds {dtype} {list(actual)}, expected float16 {list(shape)}; {MEND}")
    if size != start + ITEM_BYTES * math.prod(shape):
        raise UserError(f"{path} is damaged, it has {size} bytes; {MEND}")
    try:  # private and writable, though nobody writes: torch warns of arrays that are not
        whole = torch.from_file(str(path), shared=False, size=size // ITEM_BYTES, dtype=torch.float16)
    except RuntimeError as error:  # the file was read a moment ago: what fails here is the system
        raise RunError(f"{path} cannot be mapped: {str(error).rpartition(': ')[2]}; {SYSTEM_LIMIT}") from error
    return whole[start // ITEM_BYTES :].view(shape).numpy()


def require_intact(path: Path, known: FileSum) -> None:
    """Raise UserError where a file is missing or its bytes are not those that were marked."""
    with _reading(path):
        actual = file_sum(path)
    if actual != {name: known[name] for name in actual}:
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
