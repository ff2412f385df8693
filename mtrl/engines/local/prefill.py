"""Plan of a prefill: which waiting prompts are fed to the model, and which parts of them are copied in the cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mtrl.config.derived import PREFILL_TOKENS
from mtrl.engines.local.batch import EngineSession

PASS = {"cpu": 64}
"""Cost of an additional prefill pass by device type, as the number of tokens that the device computes in the same time;
`PREFILL_TOKENS` on other devices. A pass holds at most this many tokens of padding, and a shared prefix of at least
this many tokens is fed in a pass of its own."""


@dataclass(frozen=True)
class SharedPrefix:
    """Sessions without cached tokens whose contexts begin with the same `length` tokens."""

    sessions: list[EngineSession]
    length: int


@dataclass(frozen=True)
class PrefillPlan:
    """The work of one prefill, in this order: the prefixes are fed once and copied, then the rest of each context is
    fed, then whole contexts are copied."""

    prefixes: list[SharedPrefix]
    fed: list[EngineSession]
    """Sessions whose contexts differ, sorted by their number of tokens to feed, so that a pass needs little padding."""
    copies: list[tuple[EngineSession, EngineSession]]
    """Pairs (copy, source): `copy` has the same context as `source`, which is fed."""

    @property
    def sessions(self) -> list[EngineSession]:
        return [*self.fed, *(copy for copy, _ in self.copies)]


def pass_cost_on(device: str) -> int:
    """Return the cost of an additional prefill pass on this type of device; see `PASS`."""
    return PASS.get(device, PREFILL_TOKENS)


def plan_prefill(admitted: Sequence[EngineSession], pass_cost: int) -> PrefillPlan:
    """Plan the prefill of `admitted` so that no tokens are computed twice without need.

    Equal new contexts, such as those of a group, are fed once. New contexts that begin alike, such as prompts with the
    same instructions, share the pass of their common prefix. The plan depends on the contexts and on the order of
    `open` alone, so that a deterministic engine repeats its numbers.

    Args:
        pass_cost: number of tokens that the device computes in the time of one additional pass.
    """
    fed, copies = _without_copies(admitted)
    prefixes = _shared_prefixes([session for session in fed if not session.ids], pass_cost)
    shared = {session: prefix.length for prefix in prefixes for session in prefix.sessions}
    fed.sort(key=lambda s: (len(s.request.context) - shared.get(s, len(s.ids)), s.order))
    return PrefillPlan(prefixes, fed, copies)


def passes(sessions: Sequence[EngineSession], max_padding: int) -> Iterator[list[EngineSession]]:
    """Split sessions into consecutive runs whose new tokens fit one prefill pass with at most `max_padding` tokens of
    padding."""
    chunk: list[EngineSession] = []
    tokens = 0
    for session in sessions:
        length = len(session.request.context) - len(session.ids)
        cells = (len(chunk) + 1) * length
        if chunk and (cells > PREFILL_TOKENS or cells - tokens - length > max_padding):
            yield chunk
            chunk, tokens = [], 0
        chunk.append(session)
        tokens += length
    yield chunk


def _without_copies(
    admitted: Sequence[EngineSession],
) -> tuple[list[EngineSession], list[tuple[EngineSession, EngineSession]]]:
    sources: dict[tuple[int, ...], EngineSession] = {}
    fed: list[EngineSession] = []
    copies: list[tuple[EngineSession, EngineSession]] = []
    for session in sorted(admitted, key=lambda s: s.order):
        source = sources.setdefault(tuple(session.request.context), session) if not session.ids else session
        if source is session:
            fed.append(session)
        else:
            copies.append((session, source))
    return fed, copies


def _shared_prefixes(fresh: Sequence[EngineSession], pass_cost: int) -> list[SharedPrefix]:
    """Group contexts that are neighbours in lexicographic order. A group ends where the next context shares less than
    half of the group's prefix, or less than `pass_cost` tokens."""
    ordered = sorted(fresh, key=lambda s: (s.request.context, s.order))
    groups: list[tuple[list[EngineSession], int]] = []
    group, length = ordered[:1], 0
    for session in ordered[1:]:
        common = common_length(group[-1].request.context, session.request.context)
        if common >= pass_cost and common >= length // 2:
            length = min(length or common, common)
            group.append(session)
        else:
            groups.append((group, length))
            group, length = [session], 0
    groups.append((group, length))
    return [SharedPrefix(sorted(group, key=lambda s: s.order), length) for group, length in groups if len(group) > 1]


def common_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the number of tokens that two different contexts begin with; at least one token of each is left to
    feed."""
    limit = min(len(first), len(second)) - 1
    return next((i for i in range(limit) if first[i] != second[i]), limit)
