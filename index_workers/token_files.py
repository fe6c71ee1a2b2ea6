"""Token ids of the corpus, a file for each of vectors, so that a refresh after the first does not tokenize again.

    INDEX/tokens-3f2a9c01d4e5b677/tokens-00000.npy   row lengths, then all rows' ids, then a checksum of both

The folder's name is a hash of all that the ids follow from, so every version by the same tokenizer over the same corpus
shares them. It is a cache: what is missing or damaged is made again from the texts, and what cannot be kept is said.
"""

import hashlib
import io
import json
import logging
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

import numpy as np
from transformers import PreTrainedTokenizerBase

from replug.data.tokenizing import plain_rules
from replug.index_workers.build_plan import BuildPlan

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
        return _unpack(body)

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


def _unpack(body: bytes) -> list[np.ndarray]:
    stream = io.BytesIO(body)
    lengths = np.load(stream, allow_pickle=False)
    ids = np.load(stream, allow_pickle=False)
    return np.split(ids, np.cumsum(lengths)[:-1])
