"""One episode of a question with a search engine."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, ClassVar

from envs.search.exact_match import f1, is_match, occurs
from envs.search.prompts import style_of
from envs.search.retrievers import RetrieverSettings, private_retriever
from envs.search.reward import SCHEMES, EpisodeReward, Outcome
from mtrl.environments.base import BaseEnvironment, StepResult
from mtrl.environments.config_values import check_count
from mtrl.errors import UserError
from mtrl.retrieval import Retriever
from mtrl.types import Message, Row

LONGEST_QUERY = 512
"""Maximum length of a query, in characters."""
_TAG = re.compile(r"</?(?:search|answer|information)>")
_ACTION = re.compile(r"<(search|answer)>(.*?)</\1>", re.DOTALL)


def parse_action(response: str) -> tuple[str, str] | None:
    """Return `("search" or "answer", text)` if the response, without its thinking, holds exactly one of them; else
    None.

    A response with results that the model invented (`<information>`) is not valid.
    """
    visible = response.rpartition("</think>")[2]
    # The tags are counted first, because a search for a pair among many opening tags takes quadratic time.
    action = _ACTION.search(visible) if len(_TAG.findall(visible)) == 2 else None
    if action is None:
        return None
    kind, text = action[1], action[2].strip()
    return (kind, text) if text and (kind == "answer" or len(text) <= LONGEST_QUERY) else None


class SearchEnv(BaseEnvironment):
    """In each turn the model runs one `<search>query</search>` and reads passages, or ends with
    `<answer>text</answer>`.

    Any other response uses up the turn, and always gets the same observation. If the retriever does not answer, the
    episode fails; the failure never becomes an observation, because a policy must not learn from a search engine that
    is down.
    """

    reward_schemes: ClassVar[tuple[str, ...]] = SCHEMES

    def __init__(
        self,
        max_turns: int = 4,
        reward: str = "default",
        retriever: str = RetrieverSettings.retriever,
        url: str | None = None,
        corpus: str | None = None,
        topk: int | None = None,
        observation_characters: int | None = None,
        **options: Any,
    ):
        super().__init__(max_turns)
        if max_turns < 1:
            raise UserError(f"generator.max_turns={max_turns} leaves no turn to answer; set it to 1 or more")
        for name, value in (("topk", topk), ("observation_characters", observation_characters)):
            if value is not None:
                check_count(name, value)
        sizes = {"topk": topk, "characters": observation_characters}
        self.sizes: dict[str, Any] = {name: value for name, value in sizes.items() if value is not None}
        self.settings = RetrieverSettings.of(retriever, url, corpus, options)
        self.scheme = reward
        self.reset()

    def reset(self, row: Row | None = None) -> list[Message] | None:
        super().reset(row)
        self.reward = EpisodeReward(self.scheme)
        self.style = replace(style_of(row), **self.sizes)
        self.corpus = (row or {}).get("corpus")
        return None

    def step(self, response: str, ground_truth: dict[str, Any]) -> StepResult:
        self.current_turn += 1
        action = parse_action(response)
        if action is None:
            return self._result(Outcome(None), self.style.malformed)
        kind, text = action
        if kind == "answer":
            targets = ground_truth["target"]
            return self._result(Outcome("answer", correct=is_match(text, targets), f1=f1(text, targets)))
        return self._search(text, ground_truth)

    def _search(self, query: str, truth: dict[str, Any]) -> StepResult:
        (hits,) = self._retriever(truth).search([query], self.style.topk)
        passages = self.style.fit(hits)
        hit = any(occurs(truth["target"], part) for passage in passages for part in passage)
        return self._result(Outcome("search", hit=hit), self.style.show(passages))

    def _retriever(self, truth: dict[str, Any]) -> Retriever:
        if "passages" in truth:
            return private_retriever(tuple((title, text) for title, text in truth["passages"]))
        settings = self.settings
        if settings.corpus is None and settings.retriever != "server" and self.corpus is not None:
            settings = replace(settings, corpus=self.corpus)
        return settings.make()

    def _result(self, outcome: Outcome, text: str = "") -> StepResult:
        turns_left = self.max_turns - self.current_turn
        done = outcome.kind == "answer" or turns_left <= 0
        components = self.reward.components(outcome, done)
        metrics = {"searches": outcome.kind == "search", "hits": outcome.hit, "malformed": outcome.kind is None}
        return StepResult(
            reward=sum(components.values()),
            observation=None if done else self.style.observation(text, turns_left),
            done=done,
            truncated=outcome.kind != "answer" and done,
            components=components,
            metrics={name: float(value) for name, value in metrics.items()},
        )
