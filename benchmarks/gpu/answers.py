"""Answers drawn after the same shots: in one row, and with keys and values of their own."""

from functools import partial

import torch

from benchmarks.generation import prompts_after_shots
from benchmarks.gpu.kit import Kit
from benchmarks.workloads import Cutter
from replug.models.generation import GenerationOptions
from replug.models.local.decoding import PACKED, PADDED
from replug.models.local.hf_lm import HuggingFaceLM


def drawn_answers(kit: Kit) -> None:
    """Hold answers drawn in one row against those with keys and values of their own; time both, say their memory."""
    num_shots, num_samples = (200, 4) if kit.pretends else (2000, 20)
    for dtype in (torch.float32, torch.bfloat16):
        lm, name = HuggingFaceLM("package:smollm2", dtype=dtype, device=kit.device), str(dtype).removeprefix("torch.")
        prompts, options = prompts_after_shots(Cutter(lm.tokenizer, 2 * num_shots, seed=0), num_shots, num_samples)
        kit.say(f"{name}: several prompts in one row are right", int(lm._cache_use == PACKED), at_least=1)
        draw, texts, seconds = partial(_draw, lm, prompts, options), [], []
        for way, is_packed in (("with copies", False), ("in one row", True)):
            lm._cache_use = PACKED if is_packed else PADDED
            seconds.append(kit.seconds(draw, 3, 1))
            kit.begin_memory()
            held = 0 if kit.pretends else torch.cuda.memory_allocated()
            texts.append(draw())
            kit.say(f"{name}: {len(texts[-1])} answers {way}", seconds[-1], "s")
            if not kit.pretends:
                peak, reserved = torch.cuda.max_memory_allocated() - held, torch.cuda.max_memory_reserved()
                kit.say(f"{name}: memory {way}, beside the weights", peak / 1e9, f"GB; {reserved / 1e9:.2f} reserved")
        differ = sum(one != other for one, other in zip(*texts, strict=True))
        kit.say(f"{name}: answers that differ", differ, "", 0 if dtype == torch.float32 else None)
        kit.say(f"{name}: with copies over in one row", seconds[0] / seconds[1], "x")


def _draw(lm: HuggingFaceLM, prompts: list[str], options: GenerationOptions) -> list[str]:
    lm._kept = []  # the shots are read each time
    return [answer.text for answers in lm.sample(prompts, options) for answer in answers]
