"""From the section `web` of a configuration to what finds evidence."""

from collections.abc import Collection
from pathlib import Path

from replug.config.errors import UserError
from replug.config.evaluation_schema import WebConfig
from replug.config.rules import web_problems
from replug.models.http.request_budget import RequestBudget
from replug.web.engine_kinds import EngineParts, make_engine
from replug.web.evidence import EvidenceFinder, EvidenceSettings
from replug.web.extraction import Extractor
from replug.web.fetching import Fetcher, FetchLimits
from replug.web.guarded_network import HostPort
from replug.web.pages import WebPages
from replug.web.records import SearchEngine
from replug.web.snapshot import BUDGET, Snapshot

LOCAL = "local"
LIMITS = FetchLimits()


def evidence_finder(
    web: WebConfig,
    folder: Path,
    local: SearchEngine | None = None,
    limits: FetchLimits = LIMITS,
    exempt: Collection[HostPort] = (),
) -> EvidenceFinder:
    """`local` is what web.engine=local searches by. The snapshot lies in `folder` unless `web.snapshot` says where.

    Pages come from public addresses only, and from the pairs of host and port in `exempt`: tests name their own servers
    there, and no configuration can. Raises UserError for what the section has wrong, or the environment lacks.
    """
    for problem in web_problems(web):
        raise UserError(problem)
    snapshot = Snapshot(Path(web.snapshot).expanduser() if web.snapshot else folder)
    budget_file = None if web.engine == LOCAL else snapshot.folder / BUDGET
    budget = RequestBudget(budget_file, web.max_requests, section="web")
    engine = make_engine(EngineParts(web, budget, local))
    if web.engine == LOCAL:
        return EvidenceFinder(engine, evidence_settings(web))
    pages = WebPages(Fetcher(limits, exempt), Extractor(), snapshot)
    return EvidenceFinder(engine, evidence_settings(web), pages, snapshot)


def evidence_settings(web: WebConfig) -> EvidenceSettings:
    return EvidenceSettings(
        num_results=web.num_results,
        max_passages=web.max_passages,
        sentences_per_passage=web.sentences_per_passage,
        before=web.before,
        site=web.site,
        blocked_hosts=tuple(web.blocked_hosts),
    )
