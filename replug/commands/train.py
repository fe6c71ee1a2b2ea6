"""`replug train`: tune a retriever."""

from replug.commands.command import Command, ConfigFile, Group, Overrides, load_for_run


def train(config: ConfigFile, overrides: Overrides = None) -> None:
    """Tune a retriever; prepares and indexes what is missing, and resumes an unfinished run_dir.

    Ends with bits per byte on held-out text, in RUN_DIR/results.json and RUN_DIR/report.html.
    """
    loaded = load_for_run(config, overrides)
    from replug.train.run import train as run_train

    run_train(loaded)


COMMAND = Command(train, Group.train, place=1)
