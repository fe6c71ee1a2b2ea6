"""How document and context are joined, and what is cut: the document's end, then the context's beginning."""

from pathlib import Path

import numpy as np
import pytest
import torch
from jinja2 import TemplateError
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from replug.config.errors import UserError
from replug.config.load import load_ask_config
from replug.models.build import limited_template, lm_source
from replug.models.pair_tokens import pair_token_ids
from replug.models.prompt import PromptTemplate
from tests.support.tokenizers import CHAT, FAMILIES, llama_with, write_family


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    """Words are tokens; a start token opens an empty prefix."""
    words = Tokenizer(models.WordLevel({"?": 0, "<s>": 1}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    folder: Path = tmp_path_factory.mktemp("words")
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?", bos_token="<s>").save_pretrained(folder)
    return PreTrainedTokenizerFast.from_pretrained(folder)


def words(prefix: str, count: int) -> str:
    return " ".join(f"{prefix}{i}" for i in range(count))


def test_the_document_comes_first_and_no_document_leaves_the_context():
    template = PromptTemplate()
    assert template.prefix("a document", "a context", " and more") == "a document\na context"
    assert template.prefix("", "a context", " and more") == "\na context"
    assert template.prefix(None, "a context", " and more") == "a context"


@pytest.mark.parametrize(
    ("max_tokens", "kept_of_document", "kept_of_context"), [(19, 9, 5), (11, 1, 5), (10, 0, 5), (8, 0, 3), (6, 0, 1)]
)
def test_the_documents_end_is_cut_first_then_its_separator_and_the_contexts_beginning(
    tokenizer, max_tokens, kept_of_document, kept_of_context
):
    template = PromptTemplate(tokenizer, max_tokens)
    context, continuation = words("c", 5).split(), " " + words("y", 5)
    prefix = template.prefix(words("d", 10), words("c", 5), continuation)
    *document, rest = prefix.split("\n")
    assert [kept.split() for kept in document] == ([words("d", kept_of_document).split()] if kept_of_document else [])
    assert rest.split() == context[5 - kept_of_context :] and template.num_truncated == 1
    before, after = pair_token_ids(tokenizer, prefix, continuation)
    assert len(before) + len(after) == max_tokens
    assert template.prefix(None, words("c", 5), continuation).split() == context[5 - min(5, max_tokens - 5) :]


def test_the_continuation_is_never_cut(tokenizer):
    template = PromptTemplate(tokenizer, max_tokens=5)
    with pytest.raises(ValueError, match="a continuation has 5 tokens or more, but the LM holds 5 with at least one"):
        template.prefix(words("d", 10), words("c", 5), " " + words("y", 5))
    assert template.prefix(words("d", 10), words("c", 5), " " + words("y", 4)) == " c4"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("is_chat", [False, True])
def test_a_batch_in_a_long_window_is_cut_where_each_pair_is(tmp_path: Path, family: str, is_chat: bool):
    tokenizer = write_family(family, tmp_path)
    batch, alone = (PromptTemplate(tokenizer, 300, is_chat=is_chat) for _ in range(2))
    counts = [None, 0, *range(10, 60), 400, 4000]
    parts = [(None if count is None else words("d", count), words("c", 20), " y") for count in counts]
    assert batch.prefixes(parts) == [alone.prefix(*part) for part in parts]
    assert 0 < batch.num_truncated == alone.num_truncated < len(parts)


def test_concatenated_documents_lose_their_beginning_which_is_farthest(tokenizer):
    template = PromptTemplate(tokenizer, max_tokens=15)
    prefix = template.prefix(words("d", 10), words("c", 5), " " + words("y", 5), keep_end=True)
    assert prefix.split("\n")[0].split() == words("d", 10).split()[5:]


@pytest.mark.parametrize("family", ["byte-level", "Llama 2", "Unigram"])
@pytest.mark.parametrize("keep_end", [False, True])
def test_a_long_document_is_read_as_far_as_it_is_kept(tmp_path, monkeypatch, family, keep_end):
    template = PromptTemplate(write_family(family, tmp_path), 24)
    texts = ["The river is the Rhine. " * 400, "日本" * 5000, "x" * 9000, " " * 9000 + "Rhine" + "\n" * 9000]
    found = [template.prefix(text, "Which river?", " Rhine", keep_end) for text in texts]
    for text, prefix in zip(texts, found, strict=True):
        kept = prefix.removesuffix("Which river?").removesuffix("\n")
        assert len(kept) < 200 and (text.endswith(kept) if keep_end else text.startswith(kept))
    monkeypatch.setattr(PromptTemplate, "_readable", lambda self, text, keep_end: text)
    assert found[:2] == [template.prefix(text, "Which river?", " Rhine", keep_end) for text in texts[:2]]


def test_a_tokenizer_that_leaves_blanks_out_of_its_offsets_cuts_them_all_the_same(tmp_path):
    tokenizer = write_family("byte-level", tmp_path)
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    for keep_end in (False, True):
        prefix = PromptTemplate(tokenizer, 24).prefix("   a   b" * 40, "c", " d", keep_end)
        assert prefix.endswith("\nc") and len(prefix) > 10


def ask(document: str | None) -> str:
    return f"shots shots\n{document}\nquestion ?" if document else "shots shots\nquestion ?"


@pytest.mark.parametrize(
    ("max_tokens", "keep_end", "left"), [(16, False, "d0 d1 d2"), (16, True, "d2 d3 d4"), (20, False, "d0 d1 d2 d3 d4")]
)
def test_a_prompt_of_any_form_is_cut_in_its_document(tokenizer, max_tokens, keep_end, left):
    template = PromptTemplate(tokenizer, max_tokens)
    assert template.fit(words("d", 5), ask, 9, keep_end).split() == ask(left).split()
    assert template.num_truncated == (max_tokens == 16)


def test_a_prompt_goes_without_its_document_and_no_further(tokenizer):
    assert PromptTemplate(tokenizer, max_tokens=13).fit(words("d", 5), ask, 9) == ask(None)
    for document in (words("d", 5), None):
        with pytest.raises(ValueError, match=r"1 tokens too long without any document: the LM holds 12, 9 of them for"):
            PromptTemplate(tokenizer, max_tokens=12).fit(document, ask, 9)
    assert PromptTemplate().fit(words("d", 5), ask, 9) == ask(words("d", 5))


# Templates of the user's ------------------------------------------------------------------------------------------

HELP = "Answer in a few words.\nThis may help: {document}\n\nQuestion: {context}\nAnswer:"


def test_a_template_without_a_document_loses_the_documents_line_and_no_other():
    template = PromptTemplate(prompt=HELP)
    filled = "Answer in a few words.\nThis may help: a {context}\nb\n\nQuestion: which {document}?\nAnswer:"
    assert template.prefix("a {context}\nb", "which {document}?", " Rhine") == filled
    assert template.prefix(None, "which?", " Rhine") == "Answer in a few words.\nQuestion: which?\nAnswer:"
    last = PromptTemplate(prompt="{context}\n  Help: {document}")
    assert [last.fill("d", "c"), last.fill(None, "c")] == ["c\n  Help: d", "c\n"]


def test_a_template_is_cut_in_its_document_then_in_its_context_and_never_in_its_own_words(tokenizer):
    for max_tokens, left in ((22, "d0 d1"), (19, "c2 c3")):
        template = PromptTemplate(tokenizer, max_tokens, "a b {document}\n{context} e f")
        prefix = template.prefix(words("d", 9), words("c", 4), " y0")
        assert left.split()[-1] in prefix.split() and prefix.endswith(" e f")
        before, after = pair_token_ids(tokenizer, prefix, " y0")
        assert len(before) + len(after) <= max_tokens
    with pytest.raises(ValueError, match=r"lm\.prompt is 1 tokens too long without any document and context"):
        PromptTemplate(tokenizer, 4, "a b {document}\n{context} e f g").prefix("d", "c", " y0 y1")


def test_an_evaluations_own_prompt_is_the_context_of_a_template():
    def build(document):
        return f"shots {document} question"

    assert PromptTemplate().around(build)("d") == "shots d question"
    around = PromptTemplate(prompt="Help: {document}\n\n{context}!").around(build)
    assert [around("d"), around(None)] == ["Help: d\n\nshots None question!", "shots None question!"]


TURNS = "{% for m in messages %}<|im_start|>{{ m.role }}\n"
CHATS = {  # family of the tokenizer, and a template that behaves as the published one
    "ChatML": ("byte-level", CHAT.removeprefix("{{ bos_token }}")),
    "Llama 3": (
        "byte-level with add_prefix_space",
        "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m['role'] }}<|im_end|>\n\n{{ m['content'] | trim }}"
        "<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant<|im_end|>\n\n{% endif %}",
    ),
    "Llama 2, Mistral v0.1 to v0.3": (
        "Llama 2",
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
        "{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}",
    ),
    "Gemma": (
        "Gemma",
        "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] | trim }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>model\n{% endif %}",
    ),
    "Qwen 3": (
        "byte-level",
        TURNS + "{% if m.role == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
        "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    ),
}


@pytest.mark.parametrize("name", CHATS)
def test_the_score_of_a_chat_is_that_of_the_answer_as_the_template_itself_writes_it(tmp_path, name):
    family, chat_template = CHATS[name]
    lm = llama_with(family, tmp_path)
    lm.tokenizer.chat_template = chat_template
    template = PromptTemplate(tokenizer=lm.tokenizer, prompt=HELP, is_chat=True)
    for document, context in (("The Rhine flows through Basel.", "Which river?"), (None, "Which city?")):
        prefix, continuation = template.prefix(document, context, " the Rhine"), template.continuation(" the Rhine")
        filled = HELP.format(document=document, context=context)
        filled = filled if document else filled.replace("This may help: None\n\n", "")
        messages = [{"role": "user", "content": filled}, {"role": "assistant", "content": "the Rhine"}]
        text = lm.tokenizer.apply_chat_template(messages, tokenize=False, continue_final_message=True)
        assert prefix + continuation == text
        ids = lm.tokenizer(text, add_special_tokens=False)["input_ids"]
        before, after = pair_token_ids(lm.tokenizer, prefix, continuation)
        assert before + after == ids
        with torch.no_grad():
            logprobs = torch.log_softmax(lm.model(torch.tensor([ids])).logits[0].double(), dim=-1)
        naive = [float(logprobs[place - 1, ids[place]]) for place in range(len(before), len(ids))]
        np.testing.assert_allclose(lm.score([prefix], [continuation])[0].token_logprobs, naive, atol=1e-4)
        assert ids.count(lm.tokenizer.bos_token_id) == ("bos_token" in chat_template)


def test_a_template_that_names_the_day_names_the_same_one_every_day(tmp_path):
    tokenizer = write_family("byte-level", tmp_path)
    tokenizer.chat_template = "\n{{ strftime_now('%Y-%m-%d, %-d %B') }} {{ date_string }}" + CHAT
    prompt = PromptTemplate(tokenizer=tokenizer, is_chat=True).whole(None, "a message")
    assert prompt.startswith("\n2024-07-26, 26 July 26 Jul 2024<s><|im_start|>user\na message")


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ messages.nothing() }}", "UndefinedError|is undefined|no attribute"),
        ("{{ raise_exception('no roles') }}", "no roles"),
        ("{{ cycler.__init__.__globals__.os.popen('id').read() }}", "unsafe"),
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", "not write the assistant's message"),
    ],
)
def test_a_chat_template_that_fails_is_refused_before_anything_is_loaded(tmp_path, template, says):
    llama_with("byte-level", tmp_path)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(tmp_path)
    keys = load_ask_config([f"lm.path={tmp_path}", "lm.chat=true"]).lm
    with pytest.raises(TemplateError, match=says):
        lm_source(keys, tmp_path / "budget.json", tmp_path / "scores.sqlite")


def test_a_chat_is_cut_within_its_message(tmp_path):
    tokenizer = write_family("byte-level", tmp_path)
    template = PromptTemplate(tokenizer, 60, is_chat=True)
    prefix = template.prefix("The river is the Rhine. " * 40, "Which river?", " Rhine")
    assert prefix.startswith("<s><|im_start|>user\nThe river")
    assert prefix.endswith("?<|im_end|>\n<|im_start|>assistant\n")
    before, after = pair_token_ids(tokenizer, prefix, "Rhine")
    assert 40 < len(before) + len(after) <= 60


def test_a_prompt_of_another_form_is_another_lm_and_a_chat_needs_a_template(tmp_path):
    def source(*keys):
        return lm_source(load_ask_config(list(keys)).lm, tmp_path / "budget.json", tmp_path / "scores.sqlite")

    llama_with("byte-level", tmp_path / "lm")
    path = f"lm.path={tmp_path / 'lm'}"
    help_first, help_after = (f'lm.prompt="Help: {{document}}{gap}{{context}}"' for gap in ("\\n", "\\n\\n"))
    prompts = ("lm.prompt=null", help_first, "lm.chat=true", help_after)
    identities = [source(path, prompt).identity for prompt in prompts]
    assert len(set(identities)) == 4 and all(one.startswith(identities[0]) for one in identities)
    keys = load_ask_config([path, "lm.chat=true", help_first]).lm
    chat = limited_template(keys, source(path, "lm.chat=true"), None).whole("d", "c")
    assert chat == "<s><|im_start|>user\nHelp: d\nc<|im_end|>\n<|im_start|>assistant\n"
    with pytest.raises(UserError, match=r"lm\.chat is true, but the tokenizer of stand_in has no chat template"):
        source("lm.path=stand_in", "lm.chat=true")


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (['lm.prompt="{context}"'], r"lm\.prompt has \{document\} no times; expected a template with"),
        (['lm.prompt="{document}\\n{context}{context}"'], r"lm\.prompt has \{context\} 2 times"),
        ([r"lm.prompt={document}\n{context}"], r"not valid YAML: .* needs both pairs of quotes: 'lm\.prompt=\"TEXT\"'"),
        (['lm.prompt="{document} {context}"'], r"lm\.prompt has \{document\} and \{context\} on one line"),
        (["lm.chat=true", "lm.path=null", "lm.url=http://x", "lm.model=m"], r"lm\.tokenizer is missing; .*chat"),
    ],
)
def test_a_template_that_cannot_be_is_refused_before_anything_is_loaded(keys, says):
    with pytest.raises(UserError, match=says):
        load_ask_config(["lm.path=stand_in", *keys])
