"""Helpers for the tests of all task families: run an episode, and build the trajectory that a scorer judges."""

from mtrl.types import FinishReason, StopReason, Trajectory, Turn


def play_responses(family, row, responses, **settings):
    """Return the step results of an episode up to its end, and close the environment."""
    environment = family.environment(**settings)
    try:
        environment.reset(row)
        results = []
        for response in responses:
            results.append(environment.step(response, row["ground_truth"]))
            if results[-1].done:
                break
        return results
    finally:
        environment.close()


def trajectory_of(responses, rewards=None, stop_reason=StopReason.DONE, final=()):
    """Return a trajectory with these responses and rewards; scorers and estimators read nothing else of it."""
    rewards = rewards or [0.0] * len(responses)
    turns = [
        Turn([], [1], [0.0], [(0, 1)], FinishReason.STOP, text, {"role": "assistant", "content": text}, reward=reward)
        for text, reward in zip(responses, rewards, strict=True)
    ]
    return Trajectory("row", "group", 0, turns, stop_reason, list(final))
