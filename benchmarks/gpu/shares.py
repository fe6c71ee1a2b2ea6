"""Several processes on one GPU: what each does beside the others, as a share of what it does alone."""

import json
import subprocess
import sys
import time
from collections.abc import Callable

import torch

from benchmarks.gpu.encoding import bert, random_ids
from benchmarks.gpu.kit import Kit
from benchmarks.gpu.scoring import PAPER_PAIR, gpt2_xl, random_lm, random_pairs
from replug.models.encoder import Encoder

ROLES = ("score", "embed", "train")
WINDOWS = (*((role,) for role in ROLES), ("score", "embed"), ("score", "train"), ("embed", "train"), ROLES)
WINDOW_SECONDS, START_SECONDS = 4.0, 40
MEMORY_SHARE = 0.3


def sharing(kit: Kit) -> None:
    """Run scoring, embedding and training alone and together."""
    if kit.pretends:
        kit.say("left out: needs a GPU", 0)
        return
    bert(kit)
    start = time.time() + START_SECONDS
    command = [sys.executable, "-m", "benchmarks.gpu.shares", str(kit.folder), str(start)]
    started = [subprocess.Popen([*command, role], stdout=subprocess.PIPE, text=True) for role in ROLES]
    found = [json.loads(process.communicate(timeout=120)[0].splitlines()[-1]) for process in started]
    kit.say("processes that were not ready in time", sum(one["late"] > 0 for one in found), "", 0)
    rates = {role: one["rates"] for role, one in zip(ROLES, found, strict=True)}
    for number, roles in enumerate(WINDOWS[len(ROLES) :], len(ROLES)):
        shares = [rates[role][str(number)] / rates[role][str(ROLES.index(role))] for role in roles]
        kit.say(f"{', '.join(roles)}: shares", ", ".join(f"{share:.2f}" for share in shares))
        kit.say(f"{', '.join(roles)}: sum of shares", sum(shares), "", at_least=0.9)


def run_role(kit: Kit, role: str, start: float) -> None:
    """Repeat a role's piece of work in each of its windows, and print pieces a second."""
    torch.cuda.set_per_process_memory_fraction(MEMORY_SHARE)
    piece = {"score": _scoring, "embed": _embedding, "train": _training}[role](kit)
    for _ in range(3):
        piece()
    torch.cuda.synchronize()
    late, rates = time.time() - start, {}
    for number, roles in enumerate(WINDOWS):
        if role not in roles:
            continue
        begin = start + number * (WINDOW_SECONDS + 0.5)
        time.sleep(max(0.0, begin - time.time()))
        count, at = 0, time.time()
        while time.time() < begin + WINDOW_SECONDS:
            piece()
            count += 1
        torch.cuda.synchronize()
        rates[number] = count / (time.time() - at)
    print(json.dumps({"late": late, "rates": rates}), flush=True)


def _scoring(kit: Kit) -> Callable[[], object]:
    lm = random_lm(gpt2_xl(), kit.device)
    pairs = random_pairs([PAPER_PAIR] * 20, 50_000)
    return lambda: lm.launch(pairs).result()


def _embedding(kit: Kit) -> Callable[[], object]:
    encoder, ids = Encoder(str(bert(kit))).to(kit.device, torch.bfloat16).eval(), random_ids(1024, 128)
    return lambda: encoder.encode_tokens(ids, 32_768)


def _training(kit: Kit) -> Callable[[], object]:
    encoder, ids = Encoder(str(bert(kit))).to(kit.device), random_ids(320, 128)
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=1e-5)

    def piece() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            vectors = encoder.encode_with_gradient(ids)
        vectors.square().sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    return piece


if __name__ == "__main__":
    from pathlib import Path

    run_role(Kit("sharing", Path(sys.argv[1]), False), sys.argv[3], float(sys.argv[2]))
