"""How many GPUs each role has: `resources`, with the rule for `auto`. Pure.

The rule: of every eight GPUs one trains, one indexes and six score, since the LM has by far the most to do; with fewer
than eight, one trains and one indexes; with fewer than three, roles have shares of them. More ranks train where memory
asks for it, and more GPUs index where they hold the vectors.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from replug.cluster.packing import Node
from replug.config.choices import Accelerator, SwapMode
from replug.config.errors import UserError
from replug.config.schema import Config, IndexConfig, LMConfig

ROLES = ("train", "score", "index")
WEIGHTS = {"train": 1, "score": 2, "index": 1}  # by which they share fewer GPUs than there are roles
EXACT_KINDS = ("flat_fp16",)  # whose vectors any number of searchers may share
SHARED = 0.25  # as Ray counts, of each process on a GPU that roles share: a rank, a scorer, a builder and a searcher


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes that actors hold on their GPUs (`planning.memory`). None means not known; nothing is checked then."""

    vectors: float | None = None  # of one index version as it is searched, all shards together
    search: float = 0.0  # a searcher, beside its vectors
    embedding: float | None = None  # a builder: its encoder and one pass
    scoring: float | None = None  # an LM and one pass, over all its GPUs
    training: Callable[[int], float] | None = None  # a rank of so many: weights, moments, its part of a batch


def trains_on_gpu(config: Config, has_gpu: bool) -> bool:
    """Return whether the trainer runs on a GPU. Raises UserError if it must and there is none."""
    if config.train.accelerator is Accelerator.cpu:
        return False
    if config.train.accelerator is Accelerator.gpu and not has_gpu:
        raise UserError("train.accelerator is gpu, but torch finds no GPU on this machine; expected auto or cpu")
    return has_gpu


def gpus_by_role(
    config: Config, nodes: Sequence[Node], sizes: Sizes, roles: Collection[str], may_search_on_gpu: bool
) -> dict[str, float]:
    """Return the GPUs of the roles that have any, `auto` resolved. Infinity for `score`: all that are left."""
    num_gpus = int(sum(node.gpus for node in nodes))
    takers = [role for role in ROLES if role in roles and _takes_gpus(config, role, nodes)]
    asked = {role: getattr(config.resources, role) for role in takers}
    given = {role: float(value) for role, value in asked.items() if value != "auto"}
    if "score" in takers and "score" not in given:  # one replica, if it leaves the others less than a GPU each
        each = config.lm.gpus_per_replica or gpus_of_replica(config.lm, math.inf, nodes, sizes)
        is_told = config.lm.gpus_per_replica is not None or each > 1
        if is_told and num_gpus - sum(given.values()) - each < len(takers) - len(given) - 1:
            given["score"] = each
    open_roles, left = [role for role in takers if role not in given], num_gpus - sum(given.values())
    if open_roles and left <= 0:
        taken = " + ".join(f"resources.{role}={value:g}" for role, value in given.items())
        raise UserError(
            f"{taken} leaves no GPU of {num_gpus} for resources.{open_roles[0]}=auto; ask for fewer, or set "
            f"{' and '.join(f'resources.{role}' for role in open_roles)} too, and the roles share the GPUs"
        )
    index = _gpus_of_vectors(config, nodes, sizes, left - len(open_roles) + 1) if may_search_on_gpu else 1
    found = {**given, **_automatic(left, open_roles, index)}
    if "train" in open_roles and found["train"] >= 1:
        found["train"] = _ranks(config, found["train"], left - len(open_roles) + 1, nodes, sizes)
        if "index" in open_roles:
            found["index"] = min(found["index"], left - found["train"] - ("score" in open_roles))
    return found


def are_shared(gpus: Mapping[str, float], nodes: Sequence[Node]) -> bool:
    """Return whether roles share GPUs: together they have more than there are, and none of them has."""
    num_gpus = sum(node.gpus for node in nodes)
    whole = gpus and all(value >= 1 for value in gpus.values())
    return bool(whole) and max(gpus.values()) <= num_gpus < sum(gpus.values())


def _takes_gpus(config: Config, role: str, nodes: Sequence[Node]) -> bool:
    """Return whether a role has GPUs, by its keys and by the machine."""
    has_gpus = any(node.gpus for node in nodes)
    if role == "score":
        return has_gpus and config.lm.path is not None and config.lm.gpus_per_replica != 0
    if role == "index":
        return has_gpus and not config.index.gpus_per_builder == config.index.gpus_per_searcher == 0
    here = next(node for node in nodes if node.is_driver)
    if has_gpus and not here.gpus and config.train.accelerator is not Accelerator.cpu:
        raise UserError(
            f"the command runs on {here.where}, where rank 0 trains, and that has no GPU, but the cluster has "
            f"{sum(node.gpus for node in nodes):g}: start it on a node with a GPU, or set train.accelerator=cpu"
        )
    return trains_on_gpu(config, here.gpus > 0)


def _automatic(left: float, roles: Sequence[str], index_gpus: int) -> dict[str, float]:
    """Give the LM most GPUs, six of eight, since it has most of the work (a paper-size run's hours)."""
    if not roles:
        return {}
    if left < len(roles):
        total = sum(WEIGHTS[role] for role in roles)
        return {role: min(1.0, ray_share(left * WEIGHTS[role] / total)) for role in roles}
    many = max(1, int(left // 8))
    found: dict[str, float] = {"train": many, "index": max(many, index_gpus), "score": math.inf}
    if "score" not in roles:
        found["index" if "index" in roles else "train"] = int(left) - (many if len(roles) > 1 else 0)
    return {role: found[role] for role in roles}


def _gpus_of_vectors(config: Config, nodes: Sequence[Node], sizes: Sizes, most: float) -> int:
    """Return the GPUs that hold two versions, if these are a quarter of all or host memory is too small; else 1."""
    index, limit = config.index, min(node.gpu_limit for node in nodes)
    if sizes.vectors is None or math.isinf(limit) or index.kind not in EXACT_KINDS or index.gpus_per_searcher == 0:
        return 1
    if index.swap is SwapMode.blue_green:
        wanted = 2 * math.ceil(sizes.vectors / max(1.0, limit - sizes.search))
    else:
        wanted = math.ceil(2 * sizes.vectors / max(1.0, limit - sizes.search - (sizes.embedding or 0.0)))
    host = min((node.memory_bytes for node in nodes if node.memory_bytes is not None), default=math.inf)
    is_worth_it = wanted <= max(1, sum(node.gpus for node in nodes) // 4) or host_bytes(index, sizes, len(nodes)) > host
    return wanted if wanted <= most and is_worth_it else 1


def host_bytes(index: IndexConfig, sizes: Sizes, num_nodes: int) -> float:
    """Return each node's bytes for both versions of vectors that no GPU holds. Searchers of a node share them."""
    return 2 * (sizes.vectors or 0.0) / min(num_nodes, index.num_shards or num_nodes)


def _ranks(config: Config, wanted: float, most: float, nodes: Sequence[Node], sizes: Sizes) -> float:
    """Return the wanted ranks, fewer for parts of equal size, or more if a part does not fit a GPU's memory."""
    parts = config.train.batch_size // config.train.micro_batches
    dividing = [n for n in range(1, int(max(wanted, most)) + 1) if parts % n == 0]
    ranks = max(n for n in dividing if n <= max(1, wanted))
    if sizes.training is None:
        return ranks
    limit = min(node.gpu_limit for node in nodes)
    fitting = (n for n in dividing if n >= ranks and sizes.training(n) <= limit)
    return next(fitting, ranks)


def gpus_of_replica(lm: LMConfig, share: float, nodes: Sequence[Node], sizes: Sizes) -> float:
    """Return the configured GPUs, else the share that is left, else as many as hold the LM."""
    if lm.gpus_per_replica is not None:
        return lm.gpus_per_replica
    if share < 1:
        return ray_share(share / (lm.num_replicas or 1))
    limit = min(node.gpu_limit for node in nodes)
    return float(max(1, math.ceil((sizes.scoring or 0.0) / limit)))


def ray_share(value: float) -> float:
    """Round down to ten-thousandths, in which Ray counts, so that shares fit."""
    return math.floor(value * 1e4 + 1e-6) / 1e4
