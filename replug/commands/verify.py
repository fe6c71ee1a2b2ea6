"""`replug verify`: is what a command wrote still whole?"""

from pathlib import Path
from typing import Annotated

import typer

from replug.commands.command import Command, Group
from replug.config.errors import RunError, UserError
from replug.config.plain_text import plain_line


def verify(
    path: Annotated[Path, typer.Argument(help="An index, a prepared set, a run directory, or a cache of LM scores.")],
    delete_wrong: Annotated[
        bool, typer.Option("--delete-wrong", help="Of a cache: delete the rows that are wrong.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Of a cache: one JSON object.")] = False,
) -> None:
    """Check every checksum, count and dimension; exits with 0, or names what is wrong.

    Of a cache (RUN_DIR/scores.sqlite) it also shows what the file holds, by LM.
    """
    if not path.exists():
        raise UserError(
            f"{path} does not exist; expected an index, a prepared set, a run directory or a cache of scores"
        )
    if path.is_file():
        from replug.commands.checks.scores import verify_scores

        return verify_scores(path, delete_wrong, as_json)
    if delete_wrong or as_json:
        raise UserError(f"{path} is no file; expected --delete-wrong and --json with a cache of scores")
    return run_verify(path)


def run_verify(directory: Path) -> None:
    """Print what is there and what is wrong; raises RunError if anything is."""
    found, problems = _verify(directory)
    for line in found:
        print(plain_line(line))
    for problem in problems:
        print(f"WRONG: {plain_line(problem)}")
    if problems:
        raise RunError(f"{directory} is wrong in {len(problems)} places, first: {problems[0]}")


def _verify(directory: Path) -> tuple[list[str], list[str]]:
    """What is there and what is wrong of a prepared set, an index, or of a run directory with all that it holds."""
    from replug.data.verify import is_prepared_set, verify_prepared
    from replug.index_workers.verify import verify_index
    from replug.index_workers.version_folders import index_folder

    if is_prepared_set(directory):
        return verify_prepared(directory)
    found, problems = verify_index(index_folder(directory))
    if is_prepared_set(directory / "data"):
        of_set = verify_prepared(directory / "data")
        found, problems = found + of_set[0], problems + of_set[1]
    for folder in (directory, directory / "retriever", directory / "best"):
        of_folder = _verify_checksums(folder)
        found, problems = found + of_folder[0], problems + of_folder[1]
    return found, problems


def _verify_checksums(folder: Path) -> tuple[list[str], list[str]]:
    """Of a folder that has some: a run's results, and encoders that it wrote."""
    from replug.data.checksums import NAME, checksum_problems

    if not (folder / NAME).is_file():
        return [], []
    problems = checksum_problems(folder)
    return [f"{folder}: {'all intact' if not problems else f'wrong in {len(problems)} places'}"], problems


COMMAND = Command(verify, Group.look, place=3)
