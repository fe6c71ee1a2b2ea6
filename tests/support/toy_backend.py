"""A backend as somebody else would add it: this file, and its line in `replug/models/build.py: named_source`.

`lm.path=toy:lm` scores as the stand-in does, by another name, in the process that asks. It wants no actors.
"""

from transformers import PreTrainedTokenizerBase

from replug.config.schema import LMConfig
from replug.models.black_box_lm import AsyncLM
from replug.models.lm_source import InProcessLM
from replug.models.local.stand_in_lm import StandInLM


def source(lm: LMConfig) -> "ToySource | None":
    return ToySource() if lm.path == "toy:lm" else None


class ToyLM(StandInLM):
    identity = "toy"


class ToySource:
    identity = ToyLM.identity
    max_tokens: int | None = None
    roles = ()

    def tokenizer(self) -> PreTrainedTokenizerBase:
        return StandInLM().tokenizer

    def connect(self, budget_file=None, cache=None) -> None:
        """Nothing is elsewhere."""

    def open(self, lm: LMConfig) -> AsyncLM:
        return InProcessLM(ToyLM(), lm.tokens_per_batch)

    def open_here(self) -> AsyncLM:
        return InProcessLM(ToyLM())
