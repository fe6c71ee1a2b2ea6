"""`replug train`: tune a retriever."""

from pathlib import Path

from replug.commands.command import LM, ConfigFile, Overrides, Retriever, Source, with_short_keys
from replug.library import LSRTrainer


def train(
    config: ConfigFile, overrides: Overrides = None, source: Source = None, retriever: Retriever = None, lm: LM = None
) -> None:
    """Tune a retriever to a frozen LM: prepare the data, index the corpus, train and evaluate.

    The same command resumes an unfinished run. RUN_DIR/results.json and RUN_DIR/report.html hold bits per byte on the
    held-out split.

    replug train own_data --source docs/ --retriever sentence-transformers/all-MiniLM-L6-v2 --lm gpt2
    """
    trainer = LSRTrainer(config=config, overrides=with_short_keys(overrides, source, retriever, lm))
    results = trainer.train()
    from replug.train.report import print_summary
    from replug.train.run_dir import RunDirectory

    print_summary(RunDirectory(Path(trainer.config.run_dir).expanduser()), results)
