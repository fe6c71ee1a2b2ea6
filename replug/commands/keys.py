"""`replug keys`: list the keys of a configuration."""

import difflib
from typing import Annotated

import typer

from replug.config.errors import UserError


def keys(section: Annotated[str, typer.Argument(help="Prefix of the keys to list, such as refresh.")] = "") -> None:
    """List every configuration key with its default and meaning; the keys of evaluations come last."""
    from replug.config.evaluation_schema import EvaluationConfig
    from replug.config.keys import key_descriptions
    from replug.config.schema import Config

    listed: dict[str, tuple[str, str]] = {}
    for key, default, meaning in [*key_descriptions(Config), *key_descriptions(EvaluationConfig)]:
        if not key.startswith("rerank_lm."):
            listed.setdefault(key, (default, meaning))
    listed["rerank_lm.*"] = ("lm.*", "Keys of a second LM that reranks answers. Default: lm reranks.")
    shown = [key for key in listed if key.startswith(section)]
    if not shown:
        names = [*dict.fromkeys(name.partition(".")[0] for name in listed), *listed]
        close = difflib.get_close_matches(section, names, n=1)
        meant = f"did you mean {close[0]}?" if close else "`replug keys` lists them all"
        raise UserError(f"no key begins with {section!r}; {meant}")
    for key in shown:
        default, meaning = listed[key]
        print(f"{key}={default}".ljust(44), meaning)
