"""`replug example`: a small example of one's own data, to run and to replace."""

import json
from pathlib import Path
from typing import Annotated

import typer

from replug.commands.command import Command, Group
from replug.config.errors import UserError
from replug.config.paths import require_folder


def example(out: Annotated[Path, typer.Argument(help="The folder to write.")]) -> None:
    """Write sixty rows of JSON Lines in the form of your own data, and print the command that trains on them."""
    from replug.data.files import replace_file
    from replug.data.sources.built_in_texts import example_rows

    require_folder("OUT", out)
    if out.exists() and any(out.iterdir()):
        raise UserError(f"{out} is not empty; give a new folder")
    out.mkdir(parents=True, exist_ok=True)
    for name, rows in example_rows().items():
        replace_file(out / f"{name}.jsonl", "".join(f"{json.dumps(row)}\n" for row in rows).encode())
        print(f"{name}: {out / name}.jsonl, {len(rows)} rows")
    data = " ".join(f"data.{name}={out / name}.jsonl" for name in example_rows())
    print(
        f"now: replug train configs/own_data.yaml {data} retriever.path=package:minilm lm.path=package:smollm2 "
        f"run_dir={out / 'run'}"
    )


COMMAND = Command(example, Group.prepare, place=3)
