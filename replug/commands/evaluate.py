"""`replug evaluate`: compare retrievers and methods."""

from replug import library
from replug.commands.command import LM, ConfigFile, Overrides, Retriever, Source, with_short_keys


def evaluate(
    config: ConfigFile, overrides: Overrides = None, source: Source = None, retriever: Retriever = None, lm: LM = None
) -> None:
    """Evaluate retrievers and methods (configs/eval_*.yaml, configs/paper_tables/*.yaml).

    With the folder of a run, or a training configuration, compare its retriever with the tuned one on the run's own
    held-out texts. The same command resumes after an interruption.

    replug evaluate runs/mine
    replug evaluate configs/eval_lm.yaml retriever.path=DIR lm.path=DIR out=DIR
    """
    library.evaluate(config, overrides=with_short_keys(overrides, source, retriever, lm))
