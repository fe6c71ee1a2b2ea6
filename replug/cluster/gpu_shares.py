"""Decide how many GPUs each role has: `resources`, with the rule for `auto`. Pure.

There are three layouts. Each role has whole GPUs of its own; or scoring and the index are on the same GPUs; or all
roles are on the only GPU. `auto`: one GPU in eight trains, and all others score and index, since the index has little
to do between refreshes. An LM that needs several GPUs has them for itself: one GPU in eight then indexes.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from replug.cluster.packing import USABLE, Node
from replug.config.errors import UserError
from replug.config.schema import Config, LMConfig

ROLES = ("train", "score", "index")
GPUS_PER_RANK = 8  # one in so many trains


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes that actors hold on their GPUs (`planning.memory`). None means not known; nothing is checked then."""

    vectors: float | None = None  # of one index version as it is searched, all shards together
    search: float = 0.0  # a searcher, beside its vectors
    embedding: float | None = None  # a builder: its encoder and one pass
    scoring: float | None = None  # an LM and one pass, over all its GPUs
    training: Callable[[int], float] | None = None  # a rank of so many: weights, moments, its part of a batch


@dataclass(frozen=True, slots=True)
class Shares:
    """Whole GPUs of each role, 0 for a role on processors. Roles that share have the same ones."""

    train: int
    score: int
    index: int
    num_gpus: int
    gpus_per_replica: int

    @property
    def are_shared(self) -> bool:
        """Return whether roles have more GPUs together than there are."""
        return self.train + self.score + self.index > self.num_gpus

    def first(self, role: str) -> int:
        """Return the number of a role's first GPU."""
        if role == "train" or (self.are_shared and self.num_gpus == 1):
            return 0
        return self.train if role == "index" or self.are_shared else self.train + self.index


def gpus_by_role(config: Config, nodes: Sequence[Node], sizes: Sizes, roles: Collection[str]) -> Shares:
    """Return the GPUs of each role, `auto` resolved. Raises UserError for numbers that are none of the layouts."""
    num_gpus = sum(int(node.gpus) for node in nodes)
    takers = [role for role in ROLES if role in roles and _takes_gpus(config, role, nodes)]
    given = {role: int(value) for role in takers if (value := getattr(config.resources, role)) != "auto"}
    limit = gpu_limit(nodes)
    replica = gpus_of_replica(config.lm, sizes, limit) if "score" in takers else 1
    counts = dict.fromkeys(ROLES, 0) | given
    if num_gpus == 1:
        counts |= dict.fromkeys(takers, 1) | given
    else:
        if "train" in takers and "train" not in given:
            counts["train"] = _ranks(config, num_gpus, len(takers) > 1, sizes, limit)
        counts |= _score_and_index(takers, given, num_gpus - counts["train"], num_gpus, replica)
    shares = Shares(**counts, num_gpus=num_gpus, gpus_per_replica=replica)
    _check(shares, takers)
    return shares


def gpu_limit(nodes: Sequence[Node]) -> float:
    """Return the bytes that actors may take of the GPU with the least memory free."""
    return USABLE * min((node.gpu_bytes for node in nodes if node.gpus and node.gpu_bytes), default=math.inf)


def gpus_of_replica(lm: LMConfig, sizes: Sizes, limit: float) -> int:
    """Return the configured GPUs of one LM, else as many as hold it."""
    return int(lm.gpus_per_replica or max(1, math.ceil((sizes.scoring or 0.0) / limit)))


def _takes_gpus(config: Config, role: str, nodes: Sequence[Node]) -> bool:
    """Return whether a role has GPUs, by its keys and by the machine."""
    has_gpus = any(node.gpus for node in nodes)
    if role == "score":
        if config.lm.path and config.lm.gpus_per_replica and not has_gpus:
            raise UserError(f"lm.gpus_per_replica is {config.lm.gpus_per_replica:g}, but there is no GPU; remove it")
        return has_gpus and config.lm.path is not None and config.lm.gpus_per_replica != 0
    if role == "index":
        return has_gpus
    here = next(node for node in nodes if node.is_driver)
    if has_gpus and not here.gpus:
        raise UserError(
            f"the command runs on {here.where}, where rank 0 trains, and that has no GPU, but the cluster has "
            f"{sum(node.gpus for node in nodes):g}: start it on a node with a GPU"
        )
    return here.gpus > 0


def _score_and_index(
    takers: Collection[str], given: dict[str, int], left: int, num_gpus: int, replica: int
) -> dict[str, int]:
    """Return GPUs for scoring and the index of those that training leaves: all to both, or what the other leaves."""
    if "score" not in takers:
        return {"index": given.get("index", left)} if "index" in takers else {}
    if "index" not in takers:
        return {"score": given.get("score", left // replica * replica)}
    score, index = given.get("score"), given.get("index")
    if index is None and score is None and replica > 1:
        index = max(1, num_gpus // GPUS_PER_RANK)
    if index is None:
        index = (left if score is None else left - score) or left
    if score is None:
        score = left if index == left and replica == 1 else (left - index) // replica * replica
    return {"score": score, "index": index}


def _check(shares: Shares, takers: Collection[str]) -> None:
    """Raise UserError where the numbers of GPUs are none of the three layouts."""
    counts = {role: getattr(shares, role) for role in takers}
    if "score" in takers and 1 <= shares.score < shares.gpus_per_replica:
        raise UserError(
            f"resources.score is {shares.score}, but one LM takes {shares.gpus_per_replica} GPUs "
            "(lm.gpus_per_replica); expected more, or a smaller lm.path"
        )
    num_gpus, is_same = shares.num_gpus, shares.score == shares.index and shares.gpus_per_replica == 1
    fits = not shares.are_shared or num_gpus == 1 or (is_same and shares.train + shares.score <= num_gpus)
    if fits and all(1 <= count <= num_gpus for count in counts.values()):
        return
    resolved = ", ".join(f"resources.{role}={max(0, count)}" for role, count in counts.items())
    raise UserError(
        f"{resolved} do not fit the cluster's {num_gpus} GPUs; expected together at most as many, or the same number "
        "for score and index, which then share GPUs"
    )


def _ranks(config: Config, num_gpus: int, leaves_some: bool, sizes: Sizes, limit: float) -> int:
    """Return one rank in eight GPUs, fewer for parts of equal size, or more if a part does not fit a GPU's memory."""
    parts = config.train.batch_size // config.train.micro_batches
    dividing = [n for n in range(1, max(1, num_gpus - leaves_some) + 1) if parts % n == 0]
    ranks = max(n for n in dividing if n <= max(1, num_gpus // GPUS_PER_RANK))
    if sizes.training is None:
        return ranks
    training = sizes.training
    return next((n for n in dividing if n >= ranks and training(n) <= limit), ranks)
