"""The rules of what of the retriever learns and by which of its numbers, each broken one with what was expected."""

from collections.abc import Iterator

from replug.config.schema import Config, LoRAConfig, RetrieverConfig


def training_problems(config: Config) -> Iterator[str]:
    """Of the keys that a training reads."""
    yield from _lora_problems(config.lora)
    dims = config.retriever.dims
    if any(count < 1 for count in dims) or len(set(dims)) < len(dims):
        yield f"retriever.dims is {dims}; expected different numbers above 0, such as [384,128]"


def untrained_problems(retriever: RetrieverConfig) -> Iterator[str]:
    """Where nothing is trained, keys of training are refused, not ignored."""
    for key in ("frozen_layers", "dims"):
        if value := getattr(retriever, key):
            instead = "; index.dims searches by the first numbers" if key == "dims" else ""
            yield f"retriever.{key} is {value}, but nothing is trained here; expected it left out{instead}"


def _lora_problems(lora: LoRAConfig) -> Iterator[str]:
    if lora.rank is None:
        for key in ("alpha", "dropout", "targets"):
            if getattr(lora, key) != getattr(LoRAConfig(), key):
                yield f"lora.{key} is set, but lora.rank is not; expected lora.rank too, such as lora.rank=16"
    if lora.dropout == 1:
        yield "lora.dropout is 1, which leaves the adapters nothing; expected a share below 1"
    if any(not target.strip() for target in lora.targets) or len(set(lora.targets)) < len(lora.targets):
        yield f"lora.targets is {lora.targets}; expected different names, such as [query,value]"
