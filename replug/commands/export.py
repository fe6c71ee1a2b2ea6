"""`replug export`: the tuned retriever as a model of sentence-transformers, in a folder or on the hub."""

import json
import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from replug.commands.command import Command, Group
from replug.config.choices import TrainedSide
from replug.config.errors import UserError
from replug.config.load import load_stored_config
from replug.config.paths import require_folder
from replug.config.schema import Config
from replug.data.files import writing

if TYPE_CHECKING:
    from replug.models.encoder import Encoder
    from replug.train.model_card import Published
    from replug.train.run_dir import RunDirectory

log = logging.getLogger(__name__)


def export(
    run_dir: Annotated[Path, typer.Argument(help="A run directory, finished or not.")],
    out: Annotated[Path | None, typer.Option("--out", help="The folder to write.")] = None,
    best: Annotated[
        bool, typer.Option("--best", help="The weights that did best on held-out text, not the last ones.")
    ] = False,
    push: Annotated[
        str | None, typer.Option("--push", metavar="OWNER/NAME", help="A model on the hub; HF_TOKEN has the token.")
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="What is pushed is seen by all, not by its owner.")] = False,
    license_id: Annotated[
        str | None,
        typer.Option("--license", metavar="ID", help="Its licence, such as apache-2.0 (default: the base's)."),
    ] = None,
) -> None:
    """Write the tuned retriever as a model of sentence-transformers: a folder, a model on the hub, or both.

    It has the weights of the last step, of an unfinished run those of the newest checkpoint. It says which.
    """
    from replug.models.hub_push import HubRepository
    from replug.train.model_card import Published

    if out is None and push is None:
        raise UserError("there is nowhere to write to; expected --out DIR, --push OWNER/NAME, or both")
    if public and push is None:
        raise UserError("--public says who sees what is pushed; expected --push OWNER/NAME beside it")
    repository = HubRepository(push, public) if push is not None else None
    published, found = Published(push, license_id), _found(run_dir, out, best)
    with tempfile.TemporaryDirectory() as temporary:
        folder = out or Path(temporary) / "retriever"
        with _whole(folder) as partial:
            found.write(partial, published)
        if out is not None:
            print(f"retriever: {out} (weights of {found.weights})")
        if repository is not None:
            repository.push(folder)
            print(f"pushed: {repository.url} (weights of {found.weights})")
    _say_better(found.run, best)


@dataclass(frozen=True, slots=True)
class _Found:
    """The encoder of a run, which weights it has, and the folder it was read from, which may keep an adapter too."""

    run: "RunDirectory"
    config: Config
    encoder: "Encoder"
    weights: str
    folder: Path | None = None

    def write(self, folder: Path, published: "Published") -> None:
        from replug.models.build import load_encoder
        from replug.train.model_card import write_model_card
        from replug.train.trained_weights import save_retriever

        results = json.loads(self.run.results.read_text()) if self.run.is_finished else None
        side, is_alone = self.config.retriever.train, self.encoder.own_queries is None
        documents = None
        if side is TrainedSide.query and is_alone:
            log.info(f"documents are encoded by retriever.path, {self.config.retriever.path}, as it is now")
            documents = load_encoder(self.config.retriever)
        save_retriever(folder, self.encoder, side, documents, self.folder)
        write_model_card(folder, self.config, self.weights, self.run.provenance(), results, published)


def _found(run_dir: Path, out: Path | None, best: bool) -> _Found:
    from replug.models.build import load_encoder
    from replug.train.run_dir import RunDirectory

    run = RunDirectory(run_dir)
    if out is not None:
        require_folder("--out", out)
        if out.exists() and any(out.iterdir()):
            raise UserError(f"{out} is not empty; give a new folder")
    if not (run.path / "config.yaml").is_file():
        raise UserError(f"{run_dir} is no run directory (config.yaml is missing)")
    run.require_intact("config.yaml", "environment.json", "lm.json", "best.json", "results.json")
    config = load_stored_config(run.path / "config.yaml")
    if best:
        return _Found(run, config, *_best(config, run), run.best)
    if run.retriever.is_dir():
        tuned = load_encoder(config.retriever, run.retriever)
        return _Found(run, config, tuned, _tuned_weights(config, run), run.retriever)
    return _Found(run, config, *_of_checkpoint(config, run))


@contextmanager
def _whole(out: Path) -> Iterator[Path]:
    """Beside and renamed: who finds the folder finds all of it, however many write it and whoever is killed."""
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f"{out.name}.", suffix=".partial", dir=out.parent))
    with writing(partial):
        yield partial
        partial.rename(out)


def _best(config: Config, run: "RunDirectory") -> tuple["Encoder", str]:
    from replug.models.build import load_encoder

    known = run.best_weights()
    if known is None:
        raise UserError(
            f"--best: {run.path} has measured no weights on held-out text (evaluate.refresh_windows is 0, or no index "
            "was served yet); leave it out"
        )
    return load_encoder(config.retriever, run.best), f"step {known['step']}, the best on held-out text while training"


def _tuned_weights(config: Config, run: "RunDirectory") -> str:
    """Which weights the tuned retriever of a run has."""
    if not run.fitted.is_file():
        return f"step {config.train.max_steps}, the last"
    from replug.train.labels.fitting import Fitted

    return Fitted.read(run.fitted).describe()


def _say_better(run: "RunDirectory", best: bool) -> None:
    known = run.best_weights()
    if known is not None and not best:
        log.info(
            f"on held-out text the weights of step {known['step']} did best while training ({known['heldout_bpb']:.4f} "
            "bits per byte): --best exports them"
        )


def _of_checkpoint(config: Config, run: "RunDirectory") -> tuple["Encoder", str]:
    import torch

    from replug.train.trained_weights import encoder_of_checkpoint

    newest = run.newest_checkpoint(with_index=False)
    if newest is None:
        raise UserError(f"{run.path} has neither a tuned retriever nor a checkpoint yet")
    log.info(f"the run is unfinished; exporting the checkpoint of step {newest.step}")
    checkpoint = torch.load(newest.path, map_location="cpu", weights_only=True)
    encoder = encoder_of_checkpoint(config, checkpoint)
    return encoder, f"step {newest.step}, the newest checkpoint"


COMMAND = Command(export, Group.use, place=4)
