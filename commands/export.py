"""`replug export`: the tuned retriever as a folder."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from replug.commands.command import Command, Group
from replug.configs.errors import UserError
from replug.configs.load import load_config
from replug.configs.schema import Config

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
    config = load_config(run.path / "config.yaml")
    if run.retriever.is_dir():
        load_encoder(config.retriever, run.retriever).save(out)
    else:
        _load_checkpoint(config, run).save(out)
    print(f"retriever: {out}")


def _load_checkpoint(config: Config, run: "RunDirectory") -> "Encoder":
    import torch

    from replug.models.build import load_encoder

    newest = run.newest_checkpoint()
    if newest is None:
        raise UserError(f"{run.path} has neither a tuned retriever nor a checkpoint yet")
    log.info(f"the run is unfinished; exporting the checkpoint of step {newest.step}")
    state = torch.load(newest.path, map_location="cpu", weights_only=True)["state_dict"]
    encoder = load_encoder(config.retriever)
    encoder.load_state_dict({name.removeprefix("encoder."): value for name, value in state.items()})
    return encoder


COMMAND = Command(export, Group.use, place=4)
