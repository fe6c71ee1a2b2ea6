"""Is FAISS here, once? Asked before it is imported."""

import importlib.metadata

from replug.config.errors import UserError


def check_faiss() -> None:
    """Exactly one of faiss-cpu and faiss-gpu must be there: both write the same files."""
    found = [name for name in ("faiss-cpu", "faiss-gpu") if _version(name)]
    if len(found) != 1:
        what = "both faiss-cpu and faiss-gpu are" if found else "neither faiss-cpu nor faiss-gpu is"
        raise UserError(f"{what} installed; expected one: pip uninstall -y faiss-cpu faiss-gpu; pip install faiss-cpu")


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
