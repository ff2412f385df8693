"""One episode of a trivia question."""

from __future__ import annotations

from typing import Any, ClassVar

from envs.triviaqa.prompts import style_of
from envs.triviaqa.protocol import Action, parse_action
from envs.triviaqa.retriever import open_retriever, searching
from envs.triviaqa.reward import SCHEMES, EpisodeReward, load_rewards
from envs.triviaqa.tools import ERROR, call_tool, load_tools
from mtrl.environments.base import BaseEnvironment, StepResult
from mtrl.environments.config_values import check_count
from mtrl.errors import UserError
from mtrl.types import Message, Row

OBSERVATION_CHARACTERS = 1000


class TriviaQaEnv(BaseEnvironment):
    """In each turn the model calls a tool and reads its result, or ends the episode with an answer.

    Any number of calls is possible, up to `max_turns`. A turn that is neither one call nor one answer gets an error as
    its observation. In the last turn only an answer has an effect: a tool call is not executed, because its result
    could not be read.
    """

    reward_schemes: ClassVar[tuple[str, ...]] = SCHEMES

    def __init__(
        self,
        max_turns: int = 3,
        reward: str = "default",
        tools_file: str | None = None,
        reward_file: str | None = None,
        retriever: str = "bm25",
        corpus: str | None = None,
        url: str | None = None,
        observation_characters: int = OBSERVATION_CHARACTERS,
        **config: Any,
    ):
        super().__init__(max_turns)  # the other keys of environment.config are for the loader
        if max_turns < 1:
            raise UserError(f"generator.max_turns={max_turns} leaves no turn to answer; set it to 1 or more")
        check_count("observation_characters", observation_characters)
        self.observation_characters = observation_characters
        self.toolbox = load_tools(tools_file)
        self.reward_functions = load_rewards(reward, reward_file)
        self.retriever = open_retriever(retriever, corpus, url)
        self.reset()

    def reset(self, row: Row | None = None) -> list[Message] | None:
        super().reset(row)
        self.style = style_of(row)
        self.reward = EpisodeReward(self.reward_functions)
        return None

    def step(self, response: str, ground_truth: dict[str, Any]) -> StepResult:
        self.current_turn += 1
        action = parse_action(response)
        answered = action is not None and action.kind == "answer"
        done = answered or self.current_turn >= self.max_turns
        result = None if done or action is None else self._call(action)
        observation = None if done else self.style.reply(result, self.observation_characters)
        components = self.reward.components(response, observation, answers_of(ground_truth), done)
        return StepResult(
            reward=sum(components.values()),
            observation=observation,
            done=done,
            truncated=done and not answered,
            components=components,
            metrics={
                "tool_calls": float(result is not None),
                "tool_errors": float(result is not None and result.startswith(ERROR)),
                "malformed": float(action is None),
            },
        )

    def truncate(self, ground_truth: dict[str, Any]) -> dict[str, float]:
        return self.reward.outcomes(answers_of(ground_truth))

    def _call(self, call: Action) -> str:
        with searching(self.retriever):
            return call_tool(self.toolbox, call.text)


def answers_of(ground_truth: dict[str, Any]) -> list[str]:
    """Return the accepted answers of a row.

    Raises:
        UserError: the row has no valid list of answers.
    """
    answers = ground_truth.get("answers")
    if not isinstance(answers, list) or not answers or not all(isinstance(a, str) and a.strip() for a in answers):
        raise UserError(f"ground_truth.answers={answers!r} is no list of texts; give at least one accepted answer")
    return answers
