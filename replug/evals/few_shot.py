"""Let evaluations ask after as many demonstrations as the LM holds, and say in the table how many were left out."""

from typing import Any

from replug.answering.few_shot import DROPPED, FewShot
from replug.evals.kinds import Finished, PromptedLM


def few_shot(asked: PromptedLM, num_after: int) -> FewShot:
    """Return what builds an LM's prompts with room for so many tokens."""
    from replug.models.build import counting_template  # brings torch: only once the configuration is checked

    return FewShot(asked.template, counting_template(asked.source), num_after)


def dropped_shots(finished: Finished) -> list[Any]:
    """Return a line for each method with how many questions had fewer demonstrations than the others."""
    lines = []
    for method in finished.results:
        dropped = [int(row["methods"][method]["numbers"][DROPPED]) for row in finished.rows]
        if any(dropped):
            lines.append(
                f"{method}: {sum(map(bool, dropped))} of {len(dropped)} questions lost their earliest "
                f"demonstrations, {sum(dropped)} in all: the LM holds no more tokens."
            )
    return lines
