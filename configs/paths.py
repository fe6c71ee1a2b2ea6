"""Do the files that a configuration names exist? Asked before anything heavy is imported."""

from pathlib import Path

from configs.errors import UserError
from configs.schema import Config


def check_paths(config: Config, corpus_only: bool = False) -> None:
    """Raise UserError for the first path of the data that is missing; an index is of the corpus only."""
    data = config.data
    for name in ("corpus",) if corpus_only else ("corpus", "queries", "heldout"):
        value = getattr(data, name)
        if value is None and data.prepared is None and data.source is None:
            raise UserError(
                f"data.{name} is missing; expected data.corpus, data.queries and data.heldout (JSONL files), "
                "or data.source (raw texts), or data.prepared"
            )
        if value is not None and not Path(value).expanduser().is_file():
            raise UserError(f"data.{name}: {value} does not exist; expected a file of JSON Lines")
    source = data.source or ""
    if source.startswith((".", "/", "~")) and not Path(source).expanduser().exists():
        raise UserError(f"data.source: {source} does not exist; expected a JSONL file or a folder")
    if data.prepared is not None and not (Path(data.prepared).expanduser() / "manifest.json").is_file():
        raise UserError(f"data.prepared: {data.prepared} is not a prepared set (manifest.json is missing)")
