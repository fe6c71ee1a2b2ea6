"""The temperature of a retriever's ensemble, kept beside its weights as `ensemble.json`.

lambda(d | x) = softmax(similarity(d, x) / temperature). The paper has none, which is 1. The spread of similarities
differs among retrievers, and training changes it, so a temperature belongs to one retriever's weights. A folder without
the file has the paper's.
"""

import math
from dataclasses import asdict, dataclass
from pathlib import Path

from replug.config.errors import UserError
from replug.data.folder import CHECKSUMS, add_checksum, read_mark, write_mark
from replug.models.packaged import optional_file

FILE = "ensemble.json"
FORMAT = 1
FIX_HINT = "bring it back, or fit it again (ensemble.temperature=fit)"


@dataclass(frozen=True, slots=True)
class EnsembleTemperature:
    """A divisor `value` of similarities; a fitted one records its LM, its number of documents `k`, and its texts."""

    value: float
    lm: str | None = None
    k: int | None = None
    num_texts: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.value < math.inf:
            raise ValueError(f"a temperature is {self.value}; expected a finite number above 0")

    @property
    def origin(self) -> str:
        """Return the origin of the value in a few words."""
        if self.num_texts is None:
            return "given" if self.value != 1 else "as the paper"
        return f"fitted on {self.num_texts} development texts, {self.k} documents"


PAPER = EnsembleTemperature(1.0)


def own_temperature(owner: object) -> EnsembleTemperature:
    """Return the attribute `temperature` of a retriever or encoder, by default the paper's."""
    own = getattr(owner, "temperature", None)
    return own if isinstance(own, EnsembleTemperature) else PAPER


def write_temperature(folder: Path, temperature: EnsembleTemperature, is_listed: bool = True) -> None:
    """Write the temperature beside an encoder's weights, with its own checksum.

    `is_listed` adds it to the folder's checksums, if it has some; an index's manifest has its own checksums.
    """
    write_mark(folder / FILE, {"format": FORMAT, **asdict(temperature)})
    if is_listed and (folder / CHECKSUMS).is_file():
        add_checksum(folder / FILE)


def temperature_in(path: str) -> EnsembleTemperature | None:
    """Return the temperature in an encoder's folder or hub name, or None. Raises UserError for a damaged file."""
    file = optional_file(path, FILE)
    if file is None:
        return None
    content = read_mark(file, FIX_HINT)
    if content.pop("format", None) != FORMAT:
        raise UserError(f"{file} is not a temperature of format {FORMAT}; {FIX_HINT}")
    return EnsembleTemperature(**content)
