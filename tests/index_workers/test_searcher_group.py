"""How long searchers are waited for, and what is said of those that do not answer. Without Ray."""

from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import GetTimeoutError

from replug.configs.errors import RunError
from replug.index_workers import searcher_group
from replug.index_workers.searcher_group import SearcherGroup
from replug.index_workers.service import IndexSettings, Tries


def group(timeout_seconds: float) -> SearcherGroup:
    call = SimpleNamespace(remote=lambda *_: None)
    return SearcherGroup(lambda shard: SimpleNamespace(load=call, search=call, release=call), 2, timeout_seconds)


def test_loading_has_the_time_of_the_configuration_and_is_named_by_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    waited = []

    def never(references: list[Any], timeout: float) -> None:
        waited.append(timeout)
        raise GetTimeoutError

    monkeypatch.setattr(searcher_group.ray, "get", never)
    says = r"do not answer \(GetTimeoutError, after at most 7200 s, index\.timeout_seconds\): is there room"
    for ask in (lambda of: of.load(1, 10), lambda of: of.search(1, None, 3), lambda of: of.release([1])):
        with pytest.raises(RunError, match=says):
            ask(group(7200.0))
    assert waited == [7200.0] * 3


def test_a_version_of_55_gb_has_more_than_ten_minutes_by_default() -> None:
    assert IndexSettings().tries == Tries(3, 3600.0)
