"""`replug export`: the tuned retriever as a folder."""

import logging
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from replug.commands.command import Command, Group
from replug.configs.errors import UserError
from replug.configs.load import load_stored_config
from replug.configs.schema import Config
from replug.data.files import writing

if TYPE_CHECKING:
    from replug.models.encoder import Encoder
    from replug.train.run_dir import RunDirectory

log = logging.getLogger(__name__)


def export(
    run_dir: Annotated[Path, typer.Argument(help="A run directory, finished or not.")],
    out: Annotated[Path, typer.Argument(help="The folder to write.")],
) -> None:
    """Write the tuned retriever as a folder for transformers and sentence-transformers.

    Of an unfinished run it is the newest checkpoint's.
    """
    from replug.models.build import load_encoder
    from replug.train.run_dir import RunDirectory

    run = RunDirectory(run_dir)
    if out.exists() and any(out.iterdir()):
        raise UserError(f"{out} is not empty; give a new folder")
    if not (run.path / "config.yaml").is_file():
        raise UserError(f"{run_dir} is no run directory (config.yaml is missing)")
    run.require_intact("config.yaml")
    config = load_stored_config(run.path / "config.yaml")
    encoder = load_encoder(config.retriever, run.retriever) if run.retriever.is_dir() else _load_checkpoint(config, run)
    _save_whole(encoder, out)
    print(f"retriever: {out}")


def _save_whole(encoder: "Encoder", out: Path) -> None:
    """Beside and renamed: who finds the folder finds all of it, however many write it and whoever is killed."""
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f"{out.name}.", suffix=".partial", dir=out.parent))
    with writing(partial):
        encoder.save(partial)
        partial.chmod(0o755)  # as the user's other folders
        partial.rename(out)


def _load_checkpoint(config: Config, run: "RunDirectory") -> "Encoder":
    import torch

    from replug.models.build import load_encoder

    newest = run.newest_checkpoint(with_index=False)
    if newest is None:
        raise UserError(f"{run.path} has neither a tuned retriever nor a checkpoint yet")
    log.info(f"the run is unfinished; exporting the checkpoint of step {newest.step}")
    state = torch.load(newest.path, map_location="cpu", weights_only=True)["state_dict"]
    encoder = load_encoder(config.retriever)
    encoder.load_state_dict({name.removeprefix("encoder."): value for name, value in state.items()})
    return encoder


COMMAND = Command(export, Group.use, place=4)
