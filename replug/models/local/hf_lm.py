"""The local language model: any Hugging Face causal LM, scored in right-padded batches of similar length.

A causal model needs no mask with right padding. Only the positions that predict the continuation reach the output
layer; logits and log-softmax are float32, whatever the LM's dtype. `models.local.decoding` continues prompts.
"""

import copy
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from replug.config.errors import RunError, UserError
from replug.models.architecture import CACHE, is_out_of_memory, no_cache, tried, use_fused_gelu
from replug.models.batching import even_batches, padded_groups, tokens_per_pass
from replug.models.black_box_lm import (
    BlackBoxLM,
    ContinuationScore,
    Mixture,
    Prompt,
    Watch,
    as_mixtures,
    check_pairs,
    require_texts,
)
from replug.models.generation import Generated, GenerationOptions, stop_texts
from replug.models.hardware import HostCopy, default_device, to_device
from replug.models.lm_source import LocalSource
from replug.models.local.decoding import (
    ANEW,
    PACKED,
    PADDED,
    CachedPrompts,
    GrowingPrompts,
    PackedPrompts,
    RecomputedPrompts,
    SharedPrefix,
    Unwanted,
    find_cache_use,
    is_worth_a_row,
    packed_groups,
    reuses_prefixes,
    shared_tokens,
)
from replug.models.local.mixtures import MixedAnswer, continue_answers
from replug.models.local.output_layer import (
    Pass,
    PendingScores,
    continuation_positions,
    separable_head,
    target_logprobs,
    use_float32_head,
)
from replug.models.model_files import (
    checked_lm_tokenizer,
    lm_identity,
    lm_weights,
    load_causal_lm,
    load_lm_tokenizer,
    loaded_identity,
    longest_input,
    read_model_config,
    require_sense,
)
from replug.models.packaged import resolve_lm_path
from replug.models.pair_tokens import (
    Input,
    PairIds,
    answer_text,
    check_lengths,
    control_tokens,
    input_ids,
    pairs_token_ids,
    prompts_token_ids,
    reading_pair,
    rows_of_inputs,
)

log = logging.getLogger(__name__)

KEPT_PREFIXES = 2  # for the two prefixes of an answer's factors
PASSES_PER_GROUP = 4  # decoded together: more would cost more memory than they save passes
Rows = list[list[int]]  # of token ids
T = TypeVar("T")
Done = TypeVar("Done")


def _require_wanted(answers: Sequence[MixedAnswer]) -> None:
    """Raise Unwanted if no caller waits for any of the answers, so that their prompts need not be read."""
    if not any(answer.is_wanted() for answer in answers):
        raise Unwanted


def _unless_out_of_memory(work: Callable[[T], Done], items: T) -> Done | None:
    """Return the result of the work; None if it runs out of memory, with its tensors freed."""
    try:
        return work(items)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
    return None  # not within `except`: the error's traceback would keep the tensors


class HuggingFaceLM:
    """A `BlackBoxLM` over local weights: a folder, a GGUF file, a hub name, `package:smollm2`, or a loaded model.

    A loaded model comes with its tokenizer and keeps its device and dtype. It is modified: its weights are frozen, and
    its attention and output layer may be replaced by others with the same weights. A path is loaded in `dtype`
    (float32) to `device` ("cpu"); `spread` lays the layers over all visible GPUs, for models larger than one.
    `identity` saves hashing the weights again. Raises UserError unless the model is a trained causal LM with its own
    tokenizer.

    >>> lm = HuggingFaceLM("./my-lm")  # or "package:smollm2", a GGUF file, a name on the hub
    >>> lm.score(["a boat"], [" on the lake"])[0].sum_logprob < 0
    True
    >>> from transformers import AutoModelForCausalLM, AutoTokenizer
    >>> model, tokenizer = (kind.from_pretrained("./my-lm") for kind in (AutoModelForCausalLM, AutoTokenizer))
    >>> HuggingFaceLM(model, tokenizer).score(["a boat"], [" on the lake"])[0].num_tokens > 1
    True
    """

    def __init__(
        self,
        model: str | Path | PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        tokens_per_batch: int | None = None,
        spread: bool = False,
        identity: str | None = None,
    ) -> None:
        if isinstance(model, str | Path):
            if tokenizer is not None:
                raise UserError(f"tokenizer is given, but {model} has its own; expected it with a loaded model only")
            path, dtype = resolve_lm_path(str(model)), dtype or torch.float32
            self.tokenizer = load_lm_tokenizer(path)
            self.model = load_causal_lm(path, dtype, "auto" if spread else None)
            self.identity = identity or lm_identity(path, dtype)
            if not spread:
                self.model.to(device or "cpu")  # type: ignore[arg-type]
        else:
            if dtype is not None or device is not None or spread:
                raise UserError("dtype, device and spread belong to a path; expected a model already on its device")
            if tokenizer is None:
                raise UserError("tokenizer is missing; expected HuggingFaceLM(model, tokenizer)")
            path = model.name_or_path or type(model).__name__
            self.tokenizer, self.model = checked_lm_tokenizer(copy.deepcopy(tokenizer), model.config, path), model
            self.identity = identity or loaded_identity(model, self.tokenizer)
            spread = len({weight.device for weight in model.parameters()}) > 1
        self._is_spread = spread
        self.model.eval().requires_grad_(False)
        use_fused_gelu(self.model)
        use_float32_head(self.model)
        on_gpu = self.model.device.type != "cpu"
        self.max_tokens: int | None = longest_input(self.model.config)
        self.counts = Counter[str]()
        self._head = tried(partial(separable_head, self.model), None)
        self._body = self.model.base_model
        self._shares = self._head is not None and tried(partial(reuses_prefixes, self.model), False)
        self._no_cache = no_cache(self.model)
        self._kept: list[SharedPrefix] = []  # the most recent, for later calls
        self.tokens_per_batch = tokens_per_pass(lm_weights(self.model.config), on_gpu, tokens_per_batch)
        require_sense(self, path)
        self._kept, self.counts = [], Counter()  # without the traces of this check

    def score(
        self, prefixes: Sequence[str], continuations: Sequence[str], *, opening: str | None = None, read: int = 0
    ) -> list[ContinuationScore]:
        """Return log-probs in nats. Raises UnscorableText for empty continuations and inputs beyond `max_tokens`."""
        return self.launch(*self.tokenize(prefixes, continuations, opening=opening, read=read)).result()

    def tokenize(
        self, prefixes: Sequence[str], continuations: Sequence[str], *, opening: str | None = None, read: int = 0
    ) -> tuple[list[PairIds], Rows, list[int]]:
        """Do the part of `score` that needs no device; return the arguments of `launch`. Raises like `score`."""
        check_pairs(prefixes, continuations)
        pairs, num_read = pairs_token_ids(self.tokenizer, prefixes, continuations), list[int]()
        check_lengths(pairs, self.max_tokens)
        if read:
            pairs, num_read = map(list, zip(*(reading_pair(pair, read) for pair in pairs), strict=True))
        return pairs, self._opening(opening), num_read

    def launch(
        self, pairs: Sequence[PairIds], opening: Sequence[list[int]] = (), num_read: Sequence[int] = ()
    ) -> PendingScores:
        """Do the rest of `score` without waiting for a GPU: the next call's passes queue behind these.

        The text of `opening`, if any, bounds the prefix that is read once for all pairs. The continuation of each pair
        begins with `num_read` tokens of its prefix, which are scored separately; () means none.
        """
        passes: list[Pass] = []
        shared = self._share([*(prefix for prefix, _ in pairs), *opening]) if self._shares else None
        num_shared = len(shared.ids) if shared else 0
        rows_of, order = rows_of_inputs(pairs), list[int]()
        inputs = [[(pairs[row][0][num_shared:], pairs[row][1]) for row in rows] for rows in rows_of]
        for batch in even_batches([len(input_ids(one)) for one in inputs], self.tokens_per_batch):
            passes += self._score_inputs([inputs[number] for number in batch], shared)
            order += chain.from_iterable(rows_of[number] for number in batch)
        return PendingScores(passes, order, [(ids, num) for (_, ids), num in zip(pairs, num_read, strict=False)])

    def generate(
        self, prompts: Sequence[Prompt], options: GenerationOptions, watch: Watch | None = None
    ) -> list[Generated]:
        """Answer many mixtures of prompts together, in one pass for each token if memory allows.

        Raises UnscorableText for prompts beyond `max_tokens`.
        """
        answers = [
            self._begin(
                self._prompt_ids(mixture.prompts, options.max_new_tokens),
                mixture,
                options,
                watch and partial(watch, number),
            )
            for number, mixture in enumerate(as_mixtures(prompts))
        ]
        self._finish(answers)
        return [answer.generated() for answer in answers]

    def sample(self, prompts: Sequence[str], options: GenerationOptions) -> list[list[Generated]]:
        """Draw answers of many prompts, decoded together. Raises UnscorableText beyond `max_tokens`."""
        require_texts(prompts, "prompts")
        rows = self._prompt_ids(prompts, options.max_new_tokens)
        drawn = [
            [self._begin([ids], mixture, own) for own in options.draws(prompt)]
            for prompt, mixture, ids in zip(prompts, as_mixtures(prompts), rows, strict=True)
        ]
        self._finish([answer for answers in drawn for answer in answers])
        return [[answer.generated() for answer in answers] for answers in drawn]

    def _begin(
        self, rows: Rows, mixture: Mixture, options: GenerationOptions, goes_on: Callable[[str], bool] | None = None
    ) -> MixedAnswer:
        decode = partial(answer_text, self.tokenizer, last=rows[0][-1])
        ends = self._ends | control_tokens(self.tokenizer, stop_texts(options.stop))
        return MixedAnswer(rows, mixture, options, ends, decode, goes_on)

    def _finish(self, answers: Sequence[MixedAnswer]) -> None:
        """Decode answers with mostly shared prompts in one row, and others in groups of a few passes' tokens."""
        apart = list(answers)
        if self._cache_use == PACKED and answers:
            num_shared, most, apart = shared_tokens(self._beginnings(answers)), self.tokens_per_batch, []
            num_new = max(answer.options.max_new_tokens for answer in answers)
            for numbers in packed_groups([answer.rows for answer in answers], num_shared, num_new, most):
                group = [answers[number] for number in numbers]
                if is_worth_a_row([row for answer in group for row in answer.rows], num_shared, most):
                    self._finish_together(group)
                else:
                    apart += group
        lengths = [[len(row) + answer.options.max_new_tokens for row in answer.rows] for answer in apart]
        for numbers in padded_groups(lengths, PASSES_PER_GROUP * self.tokens_per_batch):
            self._finish_together([apart[number] for number in numbers])

    def _finish_together(self, answers: Sequence[MixedAnswer]) -> None:
        """Decode answers together, or in halves if they do not fit memory."""
        self._in_memory(answers, self._decode, lambda some: sum(len(row) for answer in some for row in answer.rows))

    @torch.inference_mode()
    def _decode(self, answers: Sequence[MixedAnswer]) -> bool:
        for answer in answers:
            answer.begin()
        with suppress(Unwanted):  # the answers stay empty
            for _ in continue_answers(self._grow(answers), answers):
                pass
        return True

    def _prompt_ids(self, prompts: Sequence[str], max_new_tokens: int) -> list[list[int]]:
        rows = prompts_token_ids(self.tokenizer, prompts)
        check_lengths([(row, [0] * max_new_tokens) for row in rows], self.max_tokens)
        return rows

    def _opening(self, opening: str | None) -> Rows:
        return prompts_token_ids(self.tokenizer, [opening]) if opening else []

    def _beginnings(self, answers: Sequence[MixedAnswer]) -> Rows:
        """Return the distinct prompts, up to the tokens that move weights, and the opening."""
        most = max(answer.num_read for answer in answers)
        once = {tuple(row): row[: max(0, len(row) - most)] for answer in answers for row in answer.rows}
        return [*once.values(), *self._opening(answers[0].options.opening)]

    @cached_property
    def _cache_use(self) -> str:
        return tried(partial(find_cache_use, self.model), ANEW)

    @cached_property
    def _ends(self) -> frozenset[int]:
        """Return the end tokens of the tokenizer and of the model's generation configuration."""
        named = getattr(self.model.generation_config, "eos_token_id", None)
        others = named if isinstance(named, list) else [named]
        return frozenset(token for token in [self.tokenizer.eos_token_id, *others] if token is not None)

    def _grow(self, answers: Sequence[MixedAnswer]) -> GrowingPrompts:
        """Return the prompts of answers in the cheapest form that is right for this model."""
        rows = [row for answer in answers for row in answer.rows]
        num_ends = [answer.num_read for answer in answers for _ in answer.rows]
        if self._cache_use == ANEW:
            return RecomputedPrompts(rows, self._last_logits, self._ends_of(rows, num_ends))
        beginnings, require_wanted = self._beginnings(answers), partial(_require_wanted, answers)
        shared = None if self._cache_use == PADDED else self._share(beginnings)
        own = [row[len(shared.ids) if shared else 0 :] for row in rows]
        given = (self.model, own, self.tokens_per_batch, self.counts, shared, num_ends, require_wanted)
        is_packed = self._cache_use == PACKED and is_worth_a_row(rows, shared_tokens(beginnings), self.tokens_per_batch)
        return PackedPrompts(*given) if is_packed else CachedPrompts(*given)

    def _ends_of(self, rows: Rows, num_ends: Sequence[int]) -> list[Tensor]:
        """Score the last tokens of rows in another pass."""
        cuts = [len(row) - n for row, n in zip(rows, num_ends, strict=True)]
        pairs = [(row[:cut], row[cut:]) for row, cut in zip(rows, cuts, strict=True) if cut < len(row)]
        scores = iter(self.launch(pairs).result())
        return [torch.from_numpy(next(scores).token_logprobs) if n else torch.empty(0) for n in num_ends]

    def _share(self, prefixes: Rows) -> SharedPrefix | None:
        """Return the keys and values of the prefixes' common beginning; None if it is too short."""
        num_tokens = shared_tokens(prefixes)
        if not num_tokens:
            return None
        ids = prefixes[0][:num_tokens]
        shared = next((one for one in self._kept if one.ids == ids), None)
        if shared is None:
            self._kept = self._kept[1 - KEPT_PREFIXES :]  # first, since memory may not hold one more
            shared = SharedPrefix(self.model, ids)
            self.counts.update(tokens=num_tokens, padded_tokens=num_tokens)
        self._kept = [*(one for one in self._kept if one is not shared), shared]
        return shared

    def _score_inputs(self, inputs: Sequence[Input], shared: SharedPrefix | None) -> list[Pass]:
        """Score one pass, or halves if it does not fit memory: the log-probs of every row, input by input."""
        before = len(shared.ids) if shared else 0
        work = partial(self._one_pass, shared=shared)
        return self._in_memory(
            inputs, work, lambda some: len(some) * (before + max(len(input_ids(one)) for one in some))
        )

    def _in_memory(
        self, items: Sequence[T], work: Callable[[Sequence[T]], Done], size: Callable[[Sequence[T]], int]
    ) -> list[Done]:
        """Return the results for items, or for their halves if the work does not fit memory.

        Work is halved only after all possible memory was freed, so the halves depend on the items and the machine,
        never on earlier calls. Raises RunError if a single item of `size` tokens does not fit.
        """
        for _ in range(2):
            if (done := _unless_out_of_memory(work, items)) is not None:
                return [done]
            self._kept = []
            if self.model.device.type == "cuda":
                torch.cuda.empty_cache()
        if len(items) == 1:
            raise RunError(
                f"the LM ran out of memory on a single input of {size(items)} tokens: take shorter texts, a smaller LM "
                "or dtype, or more memory"
            )
        self.counts["halved"] += 1
        log.warning(
            f"the LM ran out of memory at {size(items)} tokens in one pass; halving it, as every such pass "
            "(lm.tokens_per_batch sets the size)"
        )
        half = len(items) // 2
        return self._in_memory(items[:half], work, size) + self._in_memory(items[half:], work, size)

    def _one_pass(self, inputs: Sequence[Input], shared: SharedPrefix | None) -> Pass:
        pairs, ids = list(chain.from_iterable(inputs)), [input_ids(one) for one in inputs]
        pair, position, target = continuation_positions(pairs)
        owner = torch.tensor([number for number, one in enumerate(inputs) for _ in one])
        with torch.inference_mode():
            rows = self._predicting_rows(ids, owner[pair], position, shared)
            logprobs = target_logprobs(rows, to_device(target, rows.device), self._head)
            scores = HostCopy(logprobs), [len(continuation) for _, continuation in pairs]
        lengths = [len(row) for row in ids]
        self.counts.update(tokens=sum(lengths), padded_tokens=len(lengths) * max(lengths))
        return scores

    def _last_logits(self, rows: list[list[int]]) -> Tensor:
        """Return logits [K, V] of the token after each row, in passes of up to `tokens_per_batch` tokens."""
        longest = max(len(row) for row in rows)
        size = max(1, self.tokens_per_batch // longest)
        self.counts.update(tokens=sum(map(len, rows)), padded_tokens=len(rows) * longest)
        parts = []
        for some in (rows[start : start + size] for start in range(0, len(rows), size)):
            last = torch.tensor([len(row) - 1 for row in some])
            rows_read = self._predicting_rows(some, torch.arange(len(some)), last, None)
            parts.append(self._head(rows_read) if self._head is not None else rows_read)
        return torch.cat(parts)

    def _predicting_rows(self, ids: Rows, row: Tensor, position: Tensor, shared: SharedPrefix | None) -> Tensor:
        """Return hidden states [N, D] at the predicting positions, or logits [N, V] where the head is not separable."""
        padded = nn.utils.rnn.pad_sequence([torch.tensor(one) for one in ids], batch_first=True)
        inputs = to_device(padded, self.model.device)
        if self._head is None:
            return self._logits(inputs, row, position)
        if shared is None:
            hidden = self._body(input_ids=inputs, use_cache=False, **{CACHE: self._no_cache}).last_hidden_state
        else:
            past = shared.for_rows(len(inputs))
            hidden = self.model.base_model(input_ids=inputs, use_cache=True, **{CACHE: past}).last_hidden_state
        return hidden[to_device(row, hidden.device), to_device(position, hidden.device)]

    def _logits(self, inputs: Tensor, row: Tensor, position: Tensor) -> Tensor:
        """Return logits [N, V] from the whole forward pass, computed only where some row predicts."""
        keep = position.unique()
        # A list where layers are spread: a tensor would be on the first device, and the hidden states are on the last.
        kept: Any = keep.tolist() if self._is_spread else to_device(keep, self.model.device)
        logits = self.model(input_ids=inputs, use_cache=False, logits_to_keep=kept, **{CACHE: self._no_cache}).logits
        if logits.shape[1] == len(keep):  # some architectures ignore the option and return all
            position = torch.searchsorted(keep, position)
        return logits[to_device(row, logits.device), to_device(position, logits.device)]


class HuggingFaceSource(LocalSource):
    """Weights in a folder, or under a hub name. `dtype` defaults to float32."""

    def __init__(self, path: str, dtype: torch.dtype | None = None, tokens_per_batch: int | None = None) -> None:
        self.path, self.dtype, self.tokens_per_batch = path, dtype or torch.float32, tokens_per_batch

    def __getstate__(self) -> dict[str, Any]:
        """Hash the weights once, in the process that starts a run, and not in each replica."""
        return {**self.__dict__, "identity": self.identity}

    @cached_property
    def identity(self) -> str:
        return lm_identity(self.path, self.dtype) + self.mark

    @property
    def max_tokens(self) -> int | None:
        return longest_input(read_model_config(self.path, "lm.path"))

    @property
    def num_weights(self) -> int:
        return lm_weights(read_model_config(self.path, "lm.path"))

    def tokenizer(self) -> PreTrainedTokenizerBase:
        return load_lm_tokenizer(self.path)

    def connect(self, budget_file: Path | None = None, cache: Path | None = None) -> None:
        """Check the kind of the model and its tokenizer; `load` reads the weights."""
        self.tokenizer()

    def load(self, spread: bool = False) -> BlackBoxLM:
        return HuggingFaceLM(
            self.path,
            dtype=self.dtype,
            device=default_device(),
            tokens_per_batch=self.tokens_per_batch,
            spread=spread,
            identity=self.identity,
        )
