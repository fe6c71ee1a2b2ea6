"""Put demonstrations before a question, as many as the LM holds with each document: the earliest are left out first.

The rule is `answering.prompts.fit_shots`. A question's own document is cut only where no demonstration is left, and
only with lm.too_long=truncate; else the question is refused by its name.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from replug.answering.prompts import AnyShot, fit_shots
from replug.models.black_box_lm import UnscorableText
from replug.models.prompt import PromptTemplate

DROPPED = "dropped_shots"


@dataclass(frozen=True, slots=True)
class FewShotPrompts:
    """The prompts [K] of a question under a method, one for each text, which all begin with `opening`."""

    opening: str
    prompts: tuple[str, ...]
    num_shots: int
    num_dropped: int

    @property
    def numbers(self) -> dict[str, float]:
        """Return what an outcome says of the demonstrations."""
        return {"shots": float(self.num_shots), DROPPED: float(self.num_dropped)}


class FewShot:
    """Build prompts with room for `num_after` tokens. `counting` knows the LM's limit, `template` may cut documents."""

    def __init__(self, template: PromptTemplate, counting: PromptTemplate, num_after: int) -> None:
        self.template, self._counting, self._num_after = template, counting, num_after

    def require(self, name: str, bare: str) -> None:
        """Raise UnscorableText if a question's prompt does not fit without any shot and document."""
        self.ask(name, (), "".join, lambda shots, document: bare, [None])

    def ask(
        self,
        name: str,
        shots: Sequence[AnyShot],
        opening: Callable[[Sequence[AnyShot]], str],
        prompt: Callable[[Sequence[AnyShot], str | None], str],
        texts: Sequence[str | None],
        keep_end: bool = False,
    ) -> FewShotPrompts:
        """Return the prompts of the question with this name: of shots, which `opening` is made of, and of each text.

        Raises UnscorableText where the question does not fit without shots.
        """

        def fits(shots: Sequence[AnyShot]) -> bool:
            build = self.template.around(partial(prompt, shots))
            return all(self._counting.holds(build(text), self._num_after) for text in texts)

        kept = fit_shots(shots, fits)
        build, num = self.template.around(partial(prompt, kept)), self._num_after
        if not kept and not self.template.cuts and not fits(kept):
            most = max(self._counting.num_tokens(build(text)) for text in texts)
            fix_hint = "shorter documents, or lm.too_long=truncate, which cuts them"
            raise UnscorableText(
                f"question {name}: its prompt has {most} tokens even without demonstrations, and the LM holds "
                f"{self._counting.max_tokens}, {num} of them for the answer; expected "
                f"{fix_hint if any(texts) else 'a shorter question, or an LM that holds more'}"
            )
        prompts = [self.template.fit(text, build, num, keep_end, name) for text in texts]
        return FewShotPrompts(self.template.opening(opening(kept)), tuple(prompts), len(kept), len(shots) - len(kept))
