"""The rules of `replug label` and of training on labels, each broken one with what was expected instead."""

from collections.abc import Iterator

from replug.config.choices import Rerank, TrainedSide
from replug.config.schema import Config

OWN_LABELS = "auto"  # of `train.labels`: made in the run directory


def label_problems(config: Config) -> Iterator[str]:
    """Of keys that go with `train.labels`, or without it."""
    if config.loss.in_batch and not config.loss.contrastive:
        yield "loss.in_batch is true, but loss.contrastive is 0; expected a weight above 0, whose term it widens"
    if config.loss.in_batch and config.train.micro_batches > 1:
        yield (
            f"train.micro_batches is {config.train.micro_batches} with loss.in_batch; expected 1, since a part's "
            "documents would be all that stand against its texts"
        )
    if config.retriever.train is TrainedSide.query and config.index.rerank is Rerank.live:
        yield "index.rerank is live with retriever.train=query; expected stored or none: documents stay as they are"
    yield from _with_labels(config) if config.train.labels else _without_labels(config)


def _without_labels(config: Config) -> Iterator[str]:
    """Keys that need the labels' numbers are refused, not ignored."""
    asked = {
        "train.epochs": config.train.epochs,
        "train.dev_every_steps": config.train.dev_every_steps,
        "train.patience": config.train.patience,
        "evaluate.heldout=false": not config.evaluate.heldout,
    }
    for key, value in asked.items():
        if value:
            instead = "train.max_steps, or " if key == "train.epochs" else ""
            yield f"{key} is set, but train.labels is not; expected {instead}train.labels=DIR (of `replug label`)"


def _with_labels(config: Config) -> Iterator[str]:
    if config.train.labels == OWN_LABELS:
        yield from labelling_problems(config, makes_first=True)
    ranks = config.resources.train
    if isinstance(ranks, int | float) and ranks > 1:
        yield f"resources.train is {ranks:g} with train.labels; expected 1 or auto: labels are trained on by one rank"


def labelling_problems(config: Config, makes_first: bool = False) -> Iterator[str]:
    """Of `replug label` alone. `makes_first`: a first training is made, whose queries find `label.tuned`."""
    label = config.label
    if (count := label.dense + label.tuned + label.bm25 + label.random) < 2:
        yield f"label.dense + .tuned + .bm25 + .random is {count}; expected at least 2: one alone teaches nothing"
    if label.tuned or label.tuned_path:
        yield from _tuned_problems(config, makes_first)


def _tuned_problems(config: Config, makes_first: bool) -> Iterator[str]:
    """Of candidates that tuned queries find."""
    label = config.label
    if not label.tuned:
        yield f"label.tuned_path is {label.tuned_path}, but label.tuned is 0; expected how many documents it gives"
    if not (label.tuned_path or makes_first):
        yield (
            f"label.tuned is {label.tuned}; expected label.tuned_path, the run_dir of an earlier training on labels, "
            "or label.tuned=0"
        )
    if makes_first and config.retriever.train is not TrainedSide.query:
        yield f"label.tuned is {label.tuned} with retriever.train={config.retriever.train.value}; expected query"
    if config.retriever.query_path:
        yield f"label.tuned is {label.tuned} with retriever.query_path; expected one encoder, and no pair"
