"""What a rehearsal says to people: what was real and what was small, then what was found."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Column, Table

from replug.cluster.layout import Layout
from replug.rehearsal.findings import Finding, scorers_left_out
from replug.rehearsal.run import Rehearsed
from replug.rehearsal.scaling import WIDTH, counts_of

Row = tuple[str, str, str]  # what, in the run, in the rehearsal


def print_report(title: str, layout: Layout, rehearsed: Rehearsed, found: Sequence[Finding]) -> None:
    console = Console()
    console.print(_table(title, ("", "run", "rehearsal"), scale_rows(layout, rehearsed)))
    rows = [(one.what, one.found, one.limit, "yes" if one.fits else "NO") for one in found]
    console.print(_table("what it needs", ("", "found", "there is", "fits"), rows))
    for line in [*(f"note: {note}" for note in layout.notes), *misfits(found)]:
        console.print(line, highlight=False, soft_wrap=True)
    console.print(f"rehearsed in {rehearsed.seconds:.0f} s", highlight=False)


def misfits(found: Sequence[Finding]) -> list[str]:
    """One line on each thing that does not fit, with what to change."""
    return [
        f"does not fit: {one.what}: {one.found}, there is {one.limit}; change: {one.mend}"
        for one in found
        if not one.fits
    ]


def scale_rows(layout: Layout, rehearsed: Rehearsed) -> list[Row]:
    """What is rehearsed as it is, and what is made small."""
    config, small = layout.config, rehearsed.config
    files, small_files, counts = rehearsed.files, rehearsed.scaled_files, counts_of(layout.config)
    return [
        ("GPUs", *_same(len(layout.gpus))),
        ("actors", *_both(len(layout.actors), len(layout.actors) - scorers_left_out(layout, rehearsed))),
        ("index refreshes", *_same(counts.refreshes)),
        ("checkpoints", *_same(counts.checkpoints)),
        ("texts of a batch x documents", *_same(f"{config.train.batch_size} x {config.retrieve.k}")),
        ("files of the corpus", *_both(files.shards, small_files.shards)),
        ("files of an index version", *_both(files.vector_files, small_files.vector_files)),
        ("documents", *_both(files.documents, small_files.documents)),
        ("steps", *_both(config.train.max_steps, small.train.max_steps)),
        ("index kind", config.index.kind, small.index.kind),
        ("retriever", config.retriever.path, f"random, of width {WIDTH}"),
        ("LM", config.lm.path or str(config.lm.url), "counts words"),
    ]


def _same(value: object) -> tuple[str, str]:
    return str(value), str(value)


def _both(run: int, rehearsal: int) -> tuple[str, str]:
    return f"{run:,}", f"{rehearsal:,}"


def _table(title: str, names: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(
        *(Column(name, justify="left" if not name else "right", overflow="fold") for name in names), title=title
    )
    for row in rows:
        table.add_row(*row)
    return table
