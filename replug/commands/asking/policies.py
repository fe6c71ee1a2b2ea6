"""The policy that a question follows, and what of the options it has no use for."""

from dataclasses import dataclass
from pathlib import Path

from replug.config.errors import UserError
from replug.models.policy import KnownFrom, Policy, Subject, load_policy


@dataclass(frozen=True, slots=True)
class Followed:
    """A policy, and what the question asks about."""

    policy: Policy
    subject: Subject


def policy_of(path: Path | None, subject: Subject) -> Followed | None:
    """The policy of a file, and what the question asks about; raises UserError for what the policy has no use for."""
    if path is None:
        for option, value in (("--relation", subject.relation), ("--popularity", subject.popularity)):
            if value is not None:
                raise UserError(f"{option} is for a policy; expected --policy too")
        return None
    policy = load_policy(path)
    if subject.popularity is None and policy.decides_by.known_from is KnownFrom.question:
        raise UserError(f"--popularity is missing: the policy decides by {policy.signal} ({policy.decides_by.title})")
    if subject.popularity is not None and policy.decides_by.known_from is not KnownFrom.question:
        raise UserError(f"--popularity: the policy decides by {policy.signal}; leave it out")
    return Followed(policy, subject)
