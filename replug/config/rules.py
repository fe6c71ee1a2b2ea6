"""Check the rules that combine keys of a configuration or need code; `config.schema` holds the bounds of single keys.

Every message names the wrong key, the expected value and, if it is not obvious, the fix.
"""

import math
import re
from collections.abc import Iterator
from ipaddress import ip_address
from itertools import chain
from operator import attrgetter
from typing import Any
from urllib.parse import urlsplit

from replug.config.choices import EnsembleWeights, Examples, LMScore, ServerAPI, Teacher, TooLong
from replug.config.errors import UserError
from replug.config.evaluation_schema import AnyConfig, AskConfig, EvaluationConfig, WebConfig
from replug.config.keys import keys_of
from replug.config.methods import (
    INTERNET_QA,
    REPLUG,
    WITHOUT_RETRIEVER,
    Method,
    parse_answering_methods,
    parse_methods,
)
from replug.config.paths import names_store
from replug.config.schema import DEV_SHARE, Config, DataConfig, EnsembleConfig, LMConfig, ResourcesConfig

API_KEY = "api_key_env"
VARIABLE = r"[A-Z_][A-Z0-9_]*"  # of the environment; API keys contain other characters
DATA_SOURCES = ("corpus", "source", "prepared")  # keys of `data` that name documents
API_VERSION = re.compile(r"api-version=([\w.-]+)")
FIT = "fit"  # of ensemble.temperature
READS_TOKENS = (
    "ensemble.read counts tokens of prompts, which are unknown for a server without lm.tokenizer or with lm.api=chat; "
    "expected lm.tokenizer and another lm.api, or ensemble.read=0"
)
RULE, BY_LM = "rule", "lm"  # of data.questions; anything else is a file
OWN_LABELS = "auto"  # of train.labels: made in the run directory
# Fields of requests to a server: scores depend on the first tuple; the second only changes answers.
REQUEST_FIELDS = (
    *("model", "messages", "prompt", "text", "input_ids", "n", "stream", "stop", "echo", "logprobs", "top_logprobs"),
    *("prompt_logprobs", "continue_final_message", "add_generation_prompt", "sampling_params"),
)
FIELDS_OF_ANSWERS = ("max_tokens", "max_completion_tokens", "temperature", "top_p", "seed")
TEXT_FIELDS = ("text", "id", "domain")  # fields of a row of data.source; `data.fields` gives their names in files
QUESTION_TOKENS = 64  # tokens of a question that update posterior weights: an answer is too short for that
QUESTION = "{question}"  # placeholder of the question in questions.query
DOCUMENT, CONTEXT = "{document}", "{context}"  # placeholders in lm.prompt
YES_PROMPT = r"Passage: {document}\n\nText: {context}\n\nDoes the passage help to answer? Answer Yes or No.\nAnswer:"


def check_rules(config: AnyConfig, needs_lm: bool = True) -> None:
    """Raise UserError for the first rule that does not hold."""
    if isinstance(config, EvaluationConfig):
        problems = _evaluation_problems(config)
    elif isinstance(config, AskConfig):
        problems = _ask_problems(config)
    else:
        problems = _problems(config, needs_lm)
    for problem in chain(_key_problems(config), problems):
        raise UserError(problem)


def _key_problems(config: AnyConfig) -> Iterator[str]:
    """Check each key by itself. An invalid name of a variable is not shown: it may be a server's API key."""
    for key in keys_of(type(config)):
        value, last = attrgetter(key.path)(config), key.path.rpartition(".")[2]
        if last == API_KEY and not re.fullmatch(VARIABLE, value):
            yield f"{key.path} is not the name of an environment variable; expected {key.default}, with the key in it"
        if value is not None and key.bounds is not None and not key.bounds.hold(value):
            yield f"{key.path} is {value}; expected {key.bounds.value}"


def _unread(section: Any, name: str, reason: str, *keys: str) -> Iterator[str]:
    """Refuse keys that are set, although nothing reads them for this reason."""
    defaults = type(section)()
    for key in keys:
        value, default = getattr(section, key), getattr(defaults, key)
        if value != default:
            yield f"{name}.{key} is {value}, but {reason}; expected {'null' if default is None else default}"


def _ask_problems(config: AskConfig) -> Iterator[str]:
    yield from lm_problems(config.lm, votes=config.ensemble.weights == EnsembleWeights.vote)
    yield from web_problems(config.web)
    yield from _ensemble_problems(config.ensemble, config.lm)
    if config.ensemble.temperature == FIT:
        yield "ensemble.temperature is fit, which needs a development split; expected a number above 0"
    if (weights := config.ensemble.weights) != EnsembleWeights.posterior:
        yield from _unread(config.ensemble, "ensemble", f"weights={weights} are constant", "prune", "read")


def _problems(config: Config, needs_lm: bool) -> Iterator[str]:
    asks_none = not is_live(config) and not config.evaluate.heldout
    if (needs_lm and not asks_none) or config.lm.path or config.lm.url:
        yield from lm_problems(config.lm, trains=True)
    yield from _data_problems(config.data)
    if config.data.source and (unread := set(config.data.fields.values()) - set(TEXT_FIELDS)):
        yield f"data.fields names {min(unread)}; a raw text (data.source) has {', '.join(TEXT_FIELDS)}: expected these"
    yield from _index_problems(config)
    yield from _training_problems(config)
    yield from _supervision_problems(config)
    yield from _dev_problems(config)
    yield from _teacher_problems(config)
    yield from _ensemble_problems(config.ensemble, config.lm)


def evaluation_methods(config: EvaluationConfig) -> list[Method]:
    """Return the methods to compare, in order. Raises UserError for an unknown method."""
    if config.evaluation == INTERNET_QA:
        return parse_answering_methods(config.methods, config.k)
    named = {REPLUG: config.retriever.path} if config.retriever.path else {}
    for name in config.retrievers:
        if name in (REPLUG, *WITHOUT_RETRIEVER):
            raise UserError(f"retrievers.{name} is a reserved name; expected another, such as retrievers.my_{name}")
    return parse_methods(config.methods, config.k, {**named, **config.retrievers})


def _evaluation_problems(config: EvaluationConfig) -> Iterator[str]:
    if QUESTION not in config.questions.query:
        yield f"questions.query is {config.questions.query!r}; expected a text with {QUESTION} in it"
    yield from web_problems(config.web)
    yield from _ensemble_problems(config.ensemble, config.lm)
    data, retrieves = config.data, any(method.takes_from_corpus for method in evaluation_methods(config))
    if retrieves and not (data.source or data.prepared or (data.train and data.heldout) or data.corpus):
        yield "data.corpus is missing; expected documents to retrieve: data.corpus, data.prepared or data.source"
    yield from _data_problems(data)
    yield from _index_problems(config)
    yield from _resource_problems(config.resources, config.lm, config.rerank_lm)


def _ensemble_problems(ensemble: EnsembleConfig, lm: LMConfig) -> Iterator[str]:
    if ensemble.read and lm.url and not _tells_tokens(lm):
        yield READS_TOKENS
    value = ensemble.temperature
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (value in (None, FIT) or (is_number and 0 < float(value or 0) < math.inf)):
        yield f"ensemble.temperature is {value}; expected a number above 0, or {FIT}"


def tokens_read(ensemble: EnsembleConfig, lm: LMConfig) -> int:
    """Return how many tokens of a question update posterior weights; 0 if a server's tokens are unknown."""
    if ensemble.read is not None:
        return ensemble.read
    return QUESTION_TOKENS if _tells_tokens(lm) else 0


def _tells_tokens(lm: LMConfig) -> bool:
    """Return whether the tokens of prompts are known: a chat server gets text."""
    return bool(lm.path or (lm.tokenizer and lm.api is not ServerAPI.chat))


def web_problems(web: WebConfig) -> Iterator[str]:
    """Check the section `web`."""
    if bool(web.url) != (web.engine == "searxng"):
        state = "set" if web.url else "missing"
        yield f"web.url is {state} with web.engine={web.engine}; expected it with web.engine=searxng only"
    parts = urlsplit(web.url or "http://none")
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.query:
        yield "web.url is not the URL of a SearXNG server; expected http://HOST:PORT without a password or a query"


def has_rerank_lm(config: EvaluationConfig) -> bool:
    """Return whether a second LM, `rerank_lm`, reranks the answers."""
    return bool(config.rerank_lm.path or config.rerank_lm.url)


def rerank_lm_problems(config: EvaluationConfig) -> Iterator[str]:
    """Check the section `rerank_lm`."""
    if not has_rerank_lm(config) and config.rerank_lm != LMConfig():
        yield "rerank_lm.path is missing, but other keys of rerank_lm are set; expected rerank_lm.path or rerank_lm.url"
    if has_rerank_lm(config):
        yield from (problem.replace("lm.", "rerank_lm.") for problem in lm_problems(config.rerank_lm))


def lm_problems(lm: LMConfig, trains: bool = False, votes: bool = False) -> Iterator[str]:
    """Check the section `lm`. Labels, training and votes by a server need no log-probs of texts."""
    if lm.score is not Teacher.logprob and not trains and not (votes and lm.url):
        yield (
            f"lm.score is {lm.score.value}, which is for labels, training and votes by a server; expected "
            "lm.score=logprob here, or only methods such as replug/vote (ask and serve: ensemble.weights=vote)"
        )
    given = [key for key in ("path", "url") if (getattr(lm, key) or "").strip()]
    if len(given) != 1:
        yield (
            f"{'lm.path and lm.url are both set' if given else 'lm.path is missing'}; expected lm.path=DIR for local "
            "weights, or lm.url=http://HOST:PORT/v1 and lm.model=NAME for a server"
        )
    if lm.score is Teacher.yes and lm.prompt is None and not votes:
        yield f"lm.prompt is missing; expected a question to answer by yes or no, such as 'lm.prompt=\"{YES_PROMPT}\"'"
    yield from _prompt_problems(lm)
    if lm.url:
        yield from _server_problems(lm)
    else:
        yield from _unread(lm, "lm", "lm.path names a local LM", "model", "tokenizer", "extra_body", "api")


def _prompt_problems(lm: LMConfig) -> Iterator[str]:
    if lm.chat and lm.api is ServerAPI.chat:
        yield "lm.chat is true with lm.api=chat, where the server applies its own chat template; expected lm.chat=false"
    if lm.prompt is None:
        return
    for place in (DOCUMENT, CONTEXT):
        if (count := lm.prompt.count(place)) != 1:
            yield f"lm.prompt has {place} {count or 'no'} times; expected a template with {DOCUMENT} and {CONTEXT} once"
    if any(DOCUMENT in line and CONTEXT in line for line in lm.prompt.split("\n")):
        yield (
            f"lm.prompt has {DOCUMENT} and {CONTEXT} on one line; expected two lines, since the document's line is "
            f"omitted without a document: 'lm.prompt=\"Help: {DOCUMENT}\\n\\n{CONTEXT}\"', with both pairs of quotes"
        )


def server_url(lm: LMConfig) -> str:
    """Return lm.url without blanks round it, and without a slash or /completions at its end.

    Raises UserError for an invalid address, without showing a password.
    """
    url, mark, query = (lm.url or "").strip().replace("#", "?").partition("?")
    url = url.rstrip("/").removesuffix("/completions").removesuffix("/chat")
    if "@" in url or (mark and not API_VERSION.fullmatch(query)):
        wanted = "http://HOST:PORT/v1" if "@" in url else f"lm.url={url}"
        raise UserError(f"lm.url holds a secret or a query; expected {wanted}. Put the key in ${lm.api_key_env}")
    if re.fullmatch(r"https?://(\[[\da-fA-F:]+\]|[\w.-]+)(:\d{1,5})?(/\S*)?", url) is None:
        raise UserError(f"lm.url is {url}; expected http://HOST:PORT/v1")
    return url


def is_loopback(host: str) -> bool:
    """Return whether a host's name or address is this machine's own."""
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def api_version(lm: LMConfig) -> dict[str, str]:
    """Return the query of lm.url, which gateways such as Azure's need in every request."""
    match = API_VERSION.search(lm.url or "")
    return {"api-version": match.group(1)} if match else {}


def _server_problems(lm: LMConfig) -> Iterator[str]:
    try:
        server_url(lm)
    except UserError as error:
        yield str(error)
    own = REQUEST_FIELDS if lm.score is Teacher.answer else (*REQUEST_FIELDS, *FIELDS_OF_ANSWERS)
    if taken := [name for name in lm.extra_body if name in own]:
        yield f"lm.extra_body has {taken[0]}, which replug sets itself; expected other fields of a request. Remove it"
    if not (lm.model or "").strip():
        yield "lm.model is missing; expected the name under which the server at lm.url serves the LM"
    if lm.api is ServerAPI.chat and lm.score is Teacher.logprob:
        yield (
            "lm.api is chat, which gives no log-probs of a prompt; expected lm.score=yes or answer, or completions: "
            "lm.api=echo or prompt_logprobs, and lm.chat=true for a chat LM"
        )
    reasons = {
        "lm.chat=true uses its chat template": lm.chat,
        "lm.score=logprob sends token ids": lm.score is Teacher.logprob,
        "lm.too_long=truncate counts its tokens": lm.too_long is TooLong.truncate,
    }
    for reason in (reason for reason, holds in reasons.items() if holds and not lm.tokenizer):
        yield f"lm.tokenizer is missing; expected the server's tokenizer, since {reason}"


def _data_problems(data: DataConfig) -> Iterator[str]:
    for name in ("corpus", "train", "heldout", "dev", "source", "prepared"):
        scheme, is_url, _ = (getattr(data, name) or "").partition("://")
        if is_url and not (name == "corpus" and names_store(data.corpus)):
            store = "qdrant://, postgresql:// or lance:// for a store, " if name == "corpus" else ""
            expected = f"{store}a file, a folder, or a dataset's name on the hub"
            yield f"data.{name} is a URL of {scheme}://; expected {expected}"  # the rest may hold a password
    if len(both := [f"data.{name}" for name in DATA_SOURCES if getattr(data, name)]) > 1:
        yield f"{both[0]} and {both[1]} are both set; expected one source of data. Remove the other"
    if data.prepared:
        yield from _unread(data, "data", "data.prepared holds all texts", "train", "heldout", "dev")
    dev_share, and_dev = (DEV_SHARE, f" + {DEV_SHARE:g} for data.num_dev") if data.num_dev else (0.0, "")
    if (total := data.query_share + data.heldout_share + dev_share) >= 1:
        yield (
            f"data.query_share + data.heldout_share{and_dev} is {total:g}; expected less than "
            "1, so that source documents are left for the corpus"
        )
    if not data.train:
        yield from _unread(data, "data", "data.train is not set (data.num_dev cuts data.source)", "dev")


def _dev_problems(config: Config) -> Iterator[str]:
    """Refuse a choice by development texts if there are none, before texts are cut."""
    data = config.data
    if not chooses_by_dev(config) or data.prepared or (data.num_dev if data.source else data.dev or not data.train):
        return
    chosen = "train.patience" if config.train.patience is not None else f"ensemble.temperature={FIT}"
    missing = "data.num_dev is 0; expected such as 100" if data.source else "data.dev is missing; expected a file"
    yield f"{missing}, since {chosen} chooses by development texts. Without: train.patience=null ensemble.temperature=1"


def _teacher_problems(config: Config) -> Iterator[str]:
    """Refuse measurements in bits per byte by an LM that gives no log-probs of texts."""
    score = config.lm.score
    if score is Teacher.logprob:
        return
    wrong = {
        "evaluate.heldout=false": config.evaluate.heldout,
        "ensemble.temperature=null": config.ensemble.temperature == FIT,
        "train.patience=null": config.train.patience is not None,
        "data.num_dev=0": bool(config.data.num_dev and config.data.source),
        "data.dev=null": config.data.dev is not None,
    }
    if any(wrong.values()):
        yield (
            f"lm.score={score.value} gives no log-probs, in which held-out and development texts are measured; set "
            f"{' '.join(key for key, is_wrong in wrong.items() if is_wrong)}, and measure the tuned retriever with "
            "configs/eval_retrieval.yaml"
        )
    if score is not Teacher.yes and config.loss.lm_score not in (LMScore.mean_logprob, LMScore.sum_logprob):
        reason = f"a score by lm.score={score} is not a log-prob"
        yield from _unread(config.loss, "loss", reason, "lm_score")


def require_room(lm: LMConfig, max_tokens: int, text: int, document: int) -> None:
    """Raise UserError if the LM does not hold a text with a document, or with a part of it if documents are cut."""
    left = max_tokens - text
    if document > left and (left <= 0 or lm.too_long is TooLong.error):
        fixes = f"texts.document_tokens={left}, or lm.too_long=truncate, which cuts documents"
        raise UserError(
            f"lm: {lm.path or lm.model} holds {max_tokens} tokens, but a text has {text} and a document {document}; "
            f"expected {fixes if left > 0 else 'fewer texts.scored_tokens and texts.context_tokens, or another LM'}"
        )


def require_logprobs(lm: LMConfig) -> None:
    """Raise UserError for an LM without log-probs of texts, which the caller needs."""
    for problem in lm_problems(lm):
        raise UserError(problem)


def chooses_by_dev(config: Config) -> bool:
    """Return whether development texts choose weights or the temperature."""
    return config.ensemble.temperature == FIT or (config.train.patience is not None and not config.data.questions)


def _index_problems(config: Config | EvaluationConfig) -> Iterator[str]:
    if names_store(config.data.corpus):
        yield from _unread(config.index, "index", "the store of data.corpus is the index", "kind")


def _resource_problems(resources: ResourcesConfig, *lms: LMConfig) -> Iterator[str]:
    for role in ("train", "score", "index"):
        value = getattr(resources, role)
        if value != "auto" and (isinstance(value, str) or value < 1):
            yield f"resources.{role} is {value}; expected a whole number above 0, or auto"
    if any(lm.url for lm in lms) and not any(lm.path for lm in lms):
        yield from _unread(resources, "resources", "a server (lm.url) runs the LM", "score")


def _training_problems(config: Config) -> Iterator[str]:
    """Check the steps, their parts, and the GPUs of the roles."""
    train, ranks = config.train, config.resources.train
    if config.retrieve.k < 2:
        yield f"retrieve.k is {config.retrieve.k}; expected at least 2, since one document gives no gradient"
    if (lag := config.refresh.lag_steps or 0) > config.refresh.every_steps:
        yield (
            f"refresh.lag_steps is {lag}; expected 0 to refresh.every_steps ({config.refresh.every_steps}), so that "
            "one refresh is adopted before the next starts"
        )
    yield from _resource_problems(config.resources, config.lm)
    parts = train.micro_batches * (ranks if isinstance(ranks, int) else 1)
    if train.batch_size % parts:
        yield (
            f"train.batch_size is {train.batch_size}; expected a multiple of ranks x micro_batches "
            f"(resources.train x train.micro_batches = {parts})"
        )
    if config.loss.contrastive:
        yield from _unread(train, "train", "loss.contrastive needs the whole batch", "micro_batches")


def is_live(config: Config) -> bool:
    """Return whether the LM scores batches during training."""
    labelled = config.train.labels is not None and config.train.label_steps is None
    return config.train.examples is Examples.texts and not labelled


def _supervision_problems(config: Config) -> Iterator[str]:
    """Check the keys of a training on questions, on labels, or by live scores."""
    train, evaluate = config.train, config.evaluate
    if train.examples is Examples.questions:
        reason = "train.examples=questions takes train.max_steps and no labels"
        yield from _unread(train, "train", reason, "labels", "label_steps", "epochs")
        if not config.data.questions:
            yield "data.questions is not set, on which train.examples=questions trains; expected rule, lm or a file"
        if names_store(config.data.corpus):
            yield "train.examples is questions, made from documents in files; expected no store as data.corpus"
        if not config.loss.contrastive:
            yield "loss.contrastive is 0, by which train.examples=questions trains; expected a number above 0"
        if train.batch_size < 2:
            yield "train.batch_size is 1 with train.examples=questions; expected at least 2"
    elif not train.labels:
        reason = "train.labels is not set (DIR or auto)"
        yield from _unread(train, "train", reason, "epochs", "label_steps", "patience")
        if config.lm.score is Teacher.logprob:
            yield from _unread(evaluate, "evaluate", reason, "heldout")
    elif train.label_steps is not None:
        reason = "live steps follow those on labels, by train.max_steps and with evaluations at refreshes"
        yield from _unread(train, "train", reason, "epochs", "patience")
        if train.label_steps >= train.max_steps:
            yield f"train.label_steps is {train.label_steps} of train.max_steps={train.max_steps}; expected fewer"
    if train.labels == OWN_LABELS:
        yield from labelling_problems(config)
    if (train.labels or train.examples is Examples.questions) and config.resources.train != 1:
        yield from _unread(config.resources, "resources", "one rank trains on labels or questions", "train")


def labelling_problems(config: Config) -> Iterator[str]:
    """Check the section `label`."""
    label = config.label
    if (count := label.dense + label.bm25 + label.random) < 2:
        yield f"label.dense + .bm25 + .random is {count}; expected at least 2 candidates per example"
    if not label.dense:
        yield from _unread(label, "label", "label.dense, the number of its candidates, is 0", "hits")
    if names_store(config.data.corpus):
        yield from _unread(label, "label", "the store of data.corpus finds by vectors alone", "bm25", "random")
