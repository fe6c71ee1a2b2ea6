"""Convert texts to an LM's token ids, and ids to text, the same for local weights and for a server.

A prefix and its continuation are tokenized separately, so a continuation has the same tokens after every document and
its scores are comparable. The ids of a pair decode to its texts: a prefix is tokenized as the beginning of a text, and
a continuation as the inside of one, without a blank that the tokenizer adds. `require_exact` checks it on a dozen
pairs when a tokenizer is loaded.

Text stays text: the name of a control token in it, such as `<|im_end|>`, becomes ordinary tokens. Control tokens come
from chat templates alone (`chat_text`).
"""

import json
import re
from collections.abc import Mapping, Sequence
from datetime import date
from functools import cached_property, lru_cache
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from replug.config.errors import UserError
from replug.data.tokenizing import FIRST_CHARACTERS, GROWTH, inside_rules, load_plain
from replug.models.black_box_lm import UnscorableText

if TYPE_CHECKING:  # seconds to import; callers with a tokenizer have imported it
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

PairIds = tuple[list[int], list[int]]


Input = Sequence[PairIds]  # of a pass: a pair, or pairs of one prefix and alternatives of one token each


def reading_pair(pair: PairIds, read: int) -> tuple[PairIds, int]:
    """Move up to `read` tokens from the prefix, which keeps one, to the continuation; return the pair and number."""
    before, after = pair
    cut = len(before) - min(read, len(before) - 1)
    return (before[:cut], before[cut:] + after), len(before) - cut


def rows_of_inputs(pairs: Sequence[PairIds]) -> list[list[int]]:
    """Return the rows of each input of a call, every row once, in the order of their first rows.

    Alternatives, as the letters of a multiple-choice question, are predicted from the last position of their prefix, so
    the LM reads it once.
    """
    together: dict[Any, list[int]] = {}
    for row, (prefix, continuation) in enumerate(pairs):
        together.setdefault(tuple(prefix) if len(continuation) == 1 else row, []).append(row)
    return list(together.values())


def input_ids(pairs: Input) -> list[int]:
    """Return the tokens of an input that the LM reads. Alternatives are predicted, not read."""
    prefix, continuation = pairs[0]
    return prefix + continuation if len(pairs) == 1 else prefix


class ChatText(str):
    """A prompt from a chat template: names of control tokens are control tokens, except inside messages.

    At `cuts`, positions in characters, the text is split before it is tokenized: one inside each name in a message.
    """

    cuts: tuple[int, ...]

    def __new__(cls, text: str, cuts: Sequence[int]) -> "ChatText":
        chat = super().__new__(cls, text)
        chat.cuts = tuple(cuts)
        return chat

    def __reduce__(self) -> tuple[type, tuple[str, tuple[int, ...]]]:
        return ChatText, (str(self), self.cuts)


BARS = re.compile("<[|\uff5c].+[|\uff5c]>")  # names of control tokens that some tokenizers do not mark as special
BREAK, ANSWER = "\ufdd0", "\ufdd1"  # noncharacters: inside a chat template they mark cuts, and the answer
NO_CHARACTERS = re.compile(f"[{BREAK}{ANSWER}]")
WORD = "a"  # a probe of the tokenizer's rules


class TextRules:
    """Rules by which a tokenizer reads texts: `start` stands before each, and answers do not show `special`.

    `begin` and `inside` tokenize the beginning of a text, and its inside. Both are copies, so no other call changes
    their settings, and keep the blanks round the tokens that were added to the vocabulary.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._json: str = tokenizer.backend_tokenizer.to_str()
        rules = json.loads(self._json)
        added = [token | {"lstrip": False, "rstrip": False} for token in rules["added_tokens"]]
        begin = json.dumps(rules | {"added_tokens": added, "post_processor": None}, ensure_ascii=False)
        inside = inside_rules(begin)
        self.adds_blank = inside != begin
        self.begin = load_plain(begin)
        self.inside = load_plain(inside) if self.adds_blank else self.begin
        self.word = self.inside.encode(WORD, add_special_tokens=False).ids
        bare, whole = (tokenizer(WORD, add_special_tokens=special)["input_ids"] for special in (False, True))
        places = (place for place in range(len(whole)) if whole[place : place + len(bare)] == bare)
        self.start: list[int] = whole[: next(places, 0)]
        self.num_added = len(self.start) + self.adds_blank  # tokens that a text has only as the beginning
        first = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        self.alone = self.start or [first]  # the prefix of a text without context
        self.special = frozenset(token["id"] for token in added if token["special"])
        template = str(tokenizer.chat_template or "")
        self.control = {
            token["content"]: token["id"]
            for token in added
            if token["special"] or BARS.fullmatch(token["content"]) or token["content"] in template
        }
        # After any added token some tokenizers start a new text, with a blank.
        names = {token["content"] for token in added} if self.adds_blank else self.control
        cut = sorted((name for name in names if len(name.strip()) > 1), key=len, reverse=True)
        self._names = re.compile("|".join(map(re.escape, cut)) or "(?!)")

    @cached_property
    def _chat(self) -> tuple["Tokenizer", "Tokenizer"]:
        """Return `begin` and `inside` with control tokens, by the tokenizer's original rules."""
        tokenizers = load_plain(self._json), load_plain(inside_rules(self._json))
        for tokenizer in tokenizers:
            tokenizer.encode_special_tokens = False
        return tokenizers

    def cuts(self, text: str) -> tuple[int, ...]:
        """Return a position inside the name of each control token, where a text is split."""
        if isinstance(text, ChatText):
            return text.cuts
        cuts: list[int] = []
        while name := self._names.search(text, cuts[-1] if cuts else 0):
            cuts.append(name.start() + 1)
        return tuple(cuts)

    def pieces(self, text: str) -> tuple[str, ...]:
        """Return the separately tokenized parts of a text, nearly always one."""
        return tuple(str(text[start:end]) for start, end in pairwise([0, *self.cuts(text), len(text)]))

    def ids(self, texts: Sequence[str], begins: bool) -> list[list[int]]:
        """Return the ids of each text, without `start`, as the beginning of a text or inside one.

        Equal texts are tokenized once, and share one list of ids: callers must not change it.
        """
        keys = [(isinstance(text, ChatText), self.pieces(text)) for text in texts]
        ids: dict[tuple[bool, tuple[str, ...]], list[int]] = {}
        for is_chat in {is_chat for is_chat, _ in keys}:
            begin, inside = self._chat if is_chat else (self.begin, self.inside)
            once = [pieces for kind, pieces in dict.fromkeys(keys) if kind == is_chat]
            first = _encoded(begin if begins else inside, [pieces[0] for pieces in once])
            rest = iter(_encoded(inside, [piece for pieces in once for piece in pieces[1:]]))
            for pieces, own in zip(once, first, strict=True):
                ids[is_chat, pieces] = [*own, *chain.from_iterable(next(rest) for _ in pieces[1:])]
        return [ids[key] if text else [] for text, key in zip(texts, keys, strict=True)]


def _encoded(tokenizer: "Tokenizer", texts: Sequence[str]) -> list[list[int]]:
    return [encoding.ids for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False)] if texts else []


@lru_cache(8)
def text_rules(tokenizer: "PreTrainedTokenizerBase") -> TextRules:
    """Return the rules of a tokenizer, from a cache."""
    return TextRules(tokenizer)


def pair_token_ids(tokenizer: "PreTrainedTokenizerBase", prefix: str, continuation: str) -> PairIds:
    """Return ids of the prefix, never empty and without an end token, and ids of the continuation."""
    [pair] = pairs_token_ids(tokenizer, [prefix], [continuation])
    return pair


def pairs_token_ids(
    tokenizer: "PreTrainedTokenizerBase", prefixes: Sequence[str], continuations: Sequence[str]
) -> list[PairIds]:
    """Return `pair_token_ids` of each pair, in few calls of the tokenizer: a call costs more than its text.

    A continuation after an empty prefix is tokenized as the beginning of a text.
    """
    rules, alone = text_rules(tokenizer), [not prefix for prefix in prefixes]
    inside = rules.ids(continuations, begins=False)
    if any(alone) and rules.adds_blank:
        begun = rules.ids(continuations, begins=True)
        inside = [
            begun[row] if is_alone else ids for row, (is_alone, ids) in enumerate(zip(alone, inside, strict=True))
        ]
    return list(zip(prompts_token_ids(tokenizer, prefixes), inside, strict=True))


def prompts_token_ids(tokenizer: "PreTrainedTokenizerBase", prompts: Sequence[str]) -> list[list[int]]:
    """Return the ids of texts that an LM continues, never empty. A chat template writes its own first token."""
    rules = text_rules(tokenizer)
    starts = [[] if isinstance(prompt, ChatText) else rules.start for prompt in prompts]
    return [start + ids or rules.alone for start, ids in zip(starts, rules.ids(prompts, begins=True), strict=True)]


def num_tokens(tokenizer: "PreTrainedTokenizerBase", prompt: str) -> int:
    """Return the number of tokens in a prompt."""
    return len(prompts_token_ids(tokenizer, [prompt])[0])


def token_spans(tokenizer: "PreTrainedTokenizerBase", text: str, begins: bool = False) -> list[tuple[int, int]]:
    """Return the characters (start, end) of each token of a text, as the beginning of one or inside another."""
    rules = text_rules(tokenizer)
    spans: list[tuple[int, int]] = []
    begun = 0
    for piece in rules.pieces(text):
        encoding = (rules.begin if begins and not begun else rules.inside).encode(piece, add_special_tokens=False)
        spans += [(begun + start, begun + end) for start, end in encoding.offsets]
        begun += len(piece)
    return spans


def within(tokenizer: "PreTrainedTokenizerBase", text: str, max_tokens: int, keep_end: bool = False) -> str:
    """Return the first or last tokens of a text as text, without the cost of a much longer text."""
    length = FIRST_CHARACTERS * max_tokens
    while len(text) > GROWTH * length:
        part = text[-length:] if keep_end else text[:length]
        spans = token_spans(tokenizer, part)
        if len(spans) > max_tokens:
            return part[spans[-max_tokens][0] :] if keep_end else part[: spans[max_tokens][0]]
        length *= GROWTH
    return text


def control_tokens(tokenizer: "PreTrainedTokenizerBase", names: Sequence[str]) -> frozenset[int]:
    """Return the control tokens among names: as stops they never occur in the text of an answer."""
    known = text_rules(tokenizer).control
    return frozenset(known[name] for name in names if name in known)


def answer_text(tokenizer: "PreTrainedTokenizerBase", ids: Sequence[int], last: int | None = None) -> str:
    """Return the text of an answer behind `last`, the last token of its prompt, without special tokens.

    A decoder removes the blank at the beginning of a text, but an answer begins one only behind a special token.
    """
    rules = text_rules(tokenizer)
    shown = [i for i in ids if i not in rules.special]
    if last is None or last in rules.special or not rules.adds_blank:
        return _decoded(tokenizer, shown)
    return _decoded(tokenizer, [*rules.word, *shown]).removeprefix(WORD)


def _decoded(tokenizer: "PreTrainedTokenizerBase", ids: list[int]) -> str:
    return str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))


# The default date of Llama 3's templates; with today's date scores would change every day.
DAY = date(2024, 7, 26)
CODES = ("%Y", "%y", "%m", "%b", "%B", "%d", "%-d", "%A", "%a")
ON_THAT_DAY = (
    "{%- macro strftime_now(format) -%}{{ format"
    + "".join(f" | replace({code!r}, {DAY.strftime(code)!r})" for code in CODES)
    + " }}{%- endmacro %}{{ '' }}"  # or the template's first line break would be the macro's
)


def chat_text(tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Mapping[str, Any]]) -> ChatText:
    """Return the text that the tokenizer's chat template writes before the assistant's answer to messages.

    It is the same as with `continue_final_message` of transformers: for reasoning LMs (an empty `<think>` block) and
    LMs with channels, more than the header of an answer. Blanks at its end belong to the answer (`answer_blank`), since
    tokens begin with their blank. Raises jinja2's TemplateError for messages that the template refuses.
    """
    written = _before_answer(tokenizer, messages).rstrip(" ")
    parts = written.split(BREAK)
    cuts = [len("".join(parts[:number])) for number in range(1, len(parts))]
    return ChatText("".join(parts), cuts)


def answer_blank(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Return the blanks that the chat template writes before an answer, as Llama 2's does; mostly none."""
    written = _before_answer(tokenizer, [{"role": "user", "content": WORD}])
    return written[len(written.rstrip(" ")) :]


def _before_answer(tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Mapping[str, Any]]) -> str:
    rules = text_rules(tokenizer)
    marked = [
        {**message, "content": BREAK.join(rules.pieces(NO_CHARACTERS.sub("", message["content"])))}
        for message in messages
    ]
    answered = [*marked, {"role": "assistant", "content": ANSWER}]
    how: dict[str, Any] = {"chat_template": ON_THAT_DAY + tokenizer.get_chat_template(), "date_string": "26 Jul 2024"}
    text = tokenizer.apply_chat_template(answered, tokenize=False, **how)
    written, separator, _ = str(text).partition(ANSWER)
    if not separator:
        raise TemplateError("it does not write the assistant's message")
    return written


# Borders after, before and inside a word, at a line's end, inside a number, before an indent, in other scripts.
TRIED = (
    *(("The river is the", " Rhine"), ("The river is the Rhi", "ne"), ("Answer:", " A"), ("the ", "river")),
    *(("a line\n", "Rhine"), ("a line", "\n\nRhine"), ("In 19", "84"), ("def f():\n", "    return [0]\n")),
    *(("two  blanks", "  more"), ("(a", ")."), ("Москва —", " столица"), ("東京は日", "本の首都"), ("é ²", "è 🙂 ﬁ")),
)


def require_exact(tokenizer: "PreTrainedTokenizerBase", path: str, key: str) -> None:
    """Raise UserError unless the ids of each tried pair decode to its texts."""
    pairs = pairs_token_ids(tokenizer, *map(list, zip(*TRIED, strict=True)))
    for (prefix, continuation), (before, after) in zip(TRIED, pairs, strict=True):
        text, read = prefix + continuation, answer_text(tokenizer, [*before, *after])
        if read not in (text, f" {text}"):  # some tokenizers put a blank before a whole text, and decode it
            raise UserError(
                f"{key}: the tokenizer of {path} reads {text!r} as {read!r}, so an LM would score "
                "another text; expected a tokenizer that preserves blanks, line ends, case and all scripts"
            )


def check_lengths(pairs: Sequence[PairIds], max_tokens: int | None) -> None:
    """Raise UnscorableText for a continuation without tokens or an input beyond `max_tokens`."""
    for row, (before, after) in enumerate(pairs):
        if not after:
            raise UnscorableText(f"continuation {row} has no tokens: the LM's tokenizer drops all of it")
        if max_tokens is not None and len(before) + len(after) > max_tokens:
            raise UnscorableText(
                f"input {row} has {len(before)} + {len(after)} tokens (prefix + continuation), "
                f"but the LM holds {max_tokens}: shorten the documents or take an LM with a longer context"
            )
