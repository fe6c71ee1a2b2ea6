"""`replug export`: the tuned retriever as a model of sentence-transformers, in a folder."""

import json
import logging
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from replug.config.choices import TrainedSide
from replug.config.errors import UserError
from replug.config.load import load_stored_config
from replug.config.paths import require_folder
from replug.config.schema import Config
from replug.data.files import read_json, writing

if TYPE_CHECKING:
    from replug.models.encoder import Encoder
    from replug.train.run_dir import RunDirectory

log = logging.getLogger(__name__)


def export(
    run_dir: Annotated[Path, typer.Argument(help="Run directory, finished or not.")],
    out: Annotated[Path, typer.Option("--out", help="Folder to write the model to.")],
    harmed: Annotated[bool, typer.Option("--harmed", help="Export a retriever that the run made worse.")] = False,
) -> None:
    """Export the tuned retriever as a sentence-transformers model.

    The model has the weights with the best development score, or the last weights without a development split. An
    unfinished run exports its newest checkpoint. The command prints the chosen weights.
    """
    from replug.train.report import HARMED, verdict_of
    from replug.train.run_dir import RunDirectory

    require_folder("--out", out)
    if out.exists() and any(out.iterdir()):
        raise UserError(f"{out} is not empty; give a new folder")
    run = RunDirectory(run_dir)
    if not (run.path / "config.yaml").is_file():
        raise UserError(f"{run_dir} is not a run directory (config.yaml is missing)")
    run.folder.require("config.yaml", "environment.json", "fitted.json", "results.json")
    results = json.loads(run.results.read_text()) if run.is_finished else {}
    verdict = verdict_of(results)
    if verdict and verdict["verdict"] == HARMED and not harmed:
        raise UserError(f"{verdict['sentence']} {verdict['more'][-1]} Give --harmed to export it all the same")
    config = load_stored_config(run.path / "config.yaml")
    from replug.models.build import load_encoder  # slow; after cheap checks
    from replug.train.model_card import write_model_card
    from replug.train.trained_weights import save_retriever

    encoder, weights, read_from = _tuned(config, run)
    # Written beside it and renamed: the folder is complete once it exists, even with several writers.
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f"{out.name}.", suffix=".partial", dir=out.parent))
    with writing(partial):
        documents = load_encoder(config.retriever) if config.retriever.train is TrainedSide.query else None
        if documents is not None and documents.is_pair:
            documents = None  # it already had an encoder for each side
        save_retriever(partial, encoder, config.retriever, documents, read_from)
        write_model_card(partial, config, weights, run.provenance(), results, f"./{out.name}")
        partial.rename(out)
    print(f"retriever: {out} (weights of {weights})")


def _tuned(config: Config, run: "RunDirectory") -> tuple["Encoder", str, Path | None]:
    """Return an encoder, a description of its weights, and its folder, which may hold an adapter too.

    An unfinished run gives its newest checkpoint, without a folder.
    """
    import torch

    from replug.models.build import load_encoder
    from replug.train.development import describe_weights
    from replug.train.run_dir import MEND
    from replug.train.trained_weights import encoder_of_checkpoint

    if run.fitted.is_file():
        weights = describe_weights(read_json(run.fitted, MEND))
        return load_encoder(config.retriever, run.retriever), weights, run.retriever
    newest = run.newest_checkpoint(with_index=False)
    if newest is None:
        raise UserError(f"{run.path} has neither a tuned retriever nor a checkpoint yet")
    log.info(f"the run is unfinished; exporting the checkpoint of step {newest.step}")
    checkpoint = torch.load(newest.path, map_location="cpu", weights_only=True)
    return encoder_of_checkpoint(config, checkpoint), f"step {newest.step}, the newest checkpoint", None
