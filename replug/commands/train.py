"""`replug train`: tune a retriever."""

from replug.commands.command import ConfigFile, Overrides, load_for_run


def train(config: ConfigFile, overrides: Overrides = None) -> None:
    """Tune a retriever to a frozen LM: prepare the data, index the corpus, train and evaluate.

    The same command resumes an unfinished run. RUN_DIR/results.json and RUN_DIR/report.html hold bits per byte on the
    held-out split.
    """
    loaded = load_for_run(config, overrides)
    from replug.train.run import train as run_train

    run_train(loaded)
