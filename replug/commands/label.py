"""`replug label`: candidates of every text scored by the LM once, for trainings without it."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from replug.commands.command import Command, ConfigFile, Group, Overrides, load_for_run
from replug.config.schema import Config

if TYPE_CHECKING:  # brings torch
    from replug.data.labels import Labels


def label(
    config: ConfigFile,
    out: Annotated[Path, typer.Option("--out", help="The folder of labels; goes on where it was interrupted.")],
    overrides: Overrides = None,
    flagembedding: Annotated[
        Path | None, typer.Option(help="Also write JSONL with teacher scores, as FlagEmbedding reads it.")
    ] = None,
    sentence_transformers: Annotated[
        Path | None, typer.Option(help="Also write Parquet for sentence-transformers' DistillKLDivLoss.")
    ] = None,
) -> None:
    """Score candidate documents of every training and development text by the LM, for `train.labels=OUT`.

    replug label configs/own_data_online.yaml --out labels/mine label.dense=16 lm.path=DIR retriever.path=DIR
    """
    loaded = load_for_run(config, overrides)
    from replug.config.paths import require_folder

    require_folder("--out", out)
    from replug.train.labels.labelling import label as make_labels

    labels = make_labels(loaded, out.expanduser())
    print(f"labels: {labels.folder}")
    if flagembedding is not None:
        from replug.train.labels.exports import write_flagembedding

        _export(write_flagembedding, flagembedding, labels, loaded)
    if sentence_transformers is not None:
        from replug.train.labels.exports import write_distill_kl

        _export(write_distill_kl, sentence_transformers, labels, loaded)


def _export(write: Callable[..., None], path: Path, labels: "Labels", config: Config) -> None:
    from replug.models.preparing import prepared_set
    from replug.train.run_dir import RunDirectory

    data = prepared_set(config, RunDirectory(Path(config.run_dir).expanduser()).data)
    write(path, labels, data.corpus, config.loss)
    print(f"exported: {path}")


COMMAND = Command(label, Group.prepare, place=4)
