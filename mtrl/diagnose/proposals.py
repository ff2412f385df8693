"""Filter of proposals: a proposal must change a setting, pass the checks of the configuration, and be untried."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import cache, cached_property
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from mtrl.command.checks import check
from mtrl.config import keys
from mtrl.config.mixture import is_replaced
from mtrl.config.schema import Config
from mtrl.diagnose.finding import Finding, Proposal
from mtrl.errors import UserError


class Proposals:
    """Settles the proposals of findings against one configuration."""

    def __init__(self, config: Mapping[str, Any], tried: Collection[tuple[str, ...]] = ()):
        """
        Args:
            config: Content of config.yaml.
            tried: Overrides that an earlier run of the lineage applied without success.
        """
        self._config = config
        self._tried = {frozenset(words) for words in tried}

    def settle(self, finding: Finding) -> Finding:
        """Return the finding with its applicable proposals, each with the current settings."""
        settled = (self._settled(proposal) for proposal in finding.proposals)
        return finding.with_proposals(tuple(proposal for proposal in settled if proposal is not None))

    def _settled(self, proposal: Proposal) -> Proposal | None:
        current = tuple(OmegaConf.select(self._base, key) for key in proposal.keys)
        values = [_value(word) for word in proposal.words]
        words = [w for w, now, then in zip(proposal.words, current, values, strict=True) if not _same(now, then)]
        if not words or any(set(words) <= tried for tried in self._tried) or not self._fits(words):
            return None
        if any(is_replaced(self._config.get("environments"), key) for key in proposal.keys):
            return None  # the run's value of the key has no effect
        was = tuple(f"{key}={keys.typed(now)}" for key, now in zip(proposal.keys, current, strict=True))
        changed = [i for i, word in enumerate(proposal.words) if word in words]
        return replace(proposal, words=tuple(words), current=tuple(was[i] for i in changed))

    @cached_property
    def _base(self) -> DictConfig:
        cfg = _schema().copy()
        for section, value in self._config.items():
            if section in cfg:
                try:  # section by section, because each merge copies what it merges into
                    cfg[section] = OmegaConf.merge(cfg[section], value) if isinstance(value, Mapping) else value
                except (OmegaConfBaseException, ValueError):
                    continue  # the section is of another version; the schema's defaults are used
        return cfg

    @cached_property
    def _own_problem(self) -> str | None:
        """Error of the checks for the run's own configuration: its task or its data may not be on this machine."""
        return _problem(self._base.copy())

    def _fits(self, words: list[str]) -> bool:
        cfg = self._base.copy()
        try:
            for word in words:
                key, _, _ = word.partition("=")
                with open_dict(cfg):
                    OmegaConf.update(cfg, key, _value(word), merge=True)
        except OmegaConfBaseException:
            return False
        problem = _problem(cfg)
        keys_named = any(word.partition("=")[0] in (problem or "") for word in words)
        return problem is None or (self._own_problem is not None and not keys_named)


@cache
def _schema() -> DictConfig:
    return OmegaConf.structured(Config())


def _value(word: str) -> Any:
    return OmegaConf.to_container(OmegaConf.from_dotlist([f"x={word.partition('=')[2]}"]))["x"]  # type: ignore[index,call-overload]


def _same(now: Any, then: Any) -> bool:
    return bool(now == then)


def _problem(cfg: DictConfig) -> str | None:
    """Return the error of the checks if they refuse the configuration, else None. The checks may change it."""
    try:
        check(cfg)
    except (UserError, NotImplementedError, OmegaConfBaseException) as error:
        return str(error)
    return None
