"""From a question to its reply: what is searched, which LM is asked, and by which way to answer."""

import logging
from pathlib import Path

from replug.commands.asking.ensemble import Ensemble
from replug.commands.asking.evidence import find_evidence
from replug.commands.asking.options import AskOptions, Decoding
from replug.commands.asking.policies import Followed
from replug.commands.asking.reply import Reply
from replug.commands.asking.reranking import Reranking
from replug.config.errors import UserError
from replug.config.evaluation_schema import AskConfig
from replug.config.rules import has_rerank_lm
from replug.config.schema import LMConfig
from replug.models.build import lm_source
from replug.models.lm_source import LMSource
from replug.train.run_dir import RunDirectory

log = logging.getLogger(__name__)

NUM_PASSAGES = 10  # where neither an option nor a policy says
FOLDER = Path("runs/ask")  # of what engines answered, where no index is searched


def reply_to(
    question: str, options: AskOptions, decoding: Decoding, config: AskConfig, followed: Followed | None
) -> Reply:
    """LMs are reached before anything is searched for, and read after it, unless a policy asks them first."""
    folder, k = options.index or FOLDER, _num_passages(options, config, followed)
    source = _source(config.lm, folder)
    if followed is not None:
        return Ensemble(source, config.lm, options, decoding).follow(question, k, config, followed)
    way = _way(source, options, decoding, config, folder, k)
    found = find_evidence(question, k, options, config, folder)
    log.info(f"{len(found.passages)} passages from {options.searched}; the LM reads them")
    return way.answer(question, found)


def _way(
    source: LMSource, options: AskOptions, decoding: Decoding, config: AskConfig, folder: Path, k: int
) -> Ensemble | Reranking:
    if not options.reranks:
        return Ensemble(source, config.lm, options, decoding)
    other = _source(config.rerank_lm, folder, "rerank_") if has_rerank_lm(config) else source
    return Reranking(source, other, options, decoding, k)


def _num_passages(options: AskOptions, config: AskConfig, followed: Followed | None) -> int:
    if options.k is None:
        size = followed.policy.ensemble_size if followed else None
        return size or (NUM_PASSAGES if options.engine is None else min(NUM_PASSAGES, config.web.max_passages))
    if options.engine is not None and options.k > config.web.max_passages:
        raise UserError(f"--k is {options.k}, and web.max_passages={config.web.max_passages} are kept; raise that too")
    return options.k


def _source(lm: LMConfig, folder: Path, prefix: str = "") -> LMSource:
    """With its files named as those of a run."""
    files = RunDirectory(folder)
    budget_file, scores = (path.with_name(prefix + path.name) for path in (files.budget_file, files.scores))
    return lm_source(lm, budget_file, scores)
