"""Reports of a program about its trajectory: the protocol of SageMaker's `RolloutFeedbackClient`.

    POST /complete-rollout    {"JobArn": "…", "TrajectoryId": "…", "Status": "ready" | "failed"}
    POST /update-reward       {"JobArn": "…", "TrajectoryId": "…", "Rewards": [0.0, 1.0]}

Keys may also be in camelCase or snake_case, and a missing Status means ready. The SDK first completes a trajectory and
then reports its reward; both requests may be repeated.
The SDK signs its requests for AWS, so the trajectory is named by the URL (`metadata.endpoint` is
`…/trajectories/TOKEN`), or by a TrajectoryId that is the token. The answer for a finished trajectory is 404, which the
SDK takes as "nothing more to report".
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from mtrl.gateway import fields
from mtrl.gateway.exchange import RequestError

if TYPE_CHECKING:
    from mtrl.gateway.session import Session

ID = ("TrajectoryId", "trajectoryId", "trajectory_id", "RolloutId", "rolloutId", "rollout_id")
STATUS = ("Status", "status")
REWARDS = ("Rewards", "rewards", "Reward", "reward")
ERROR = ("Error", "error", "ErrorMessage", "errorMessage", "error_message")
STATUSES = ("ready", "failed")
MAX_ERROR_CHARACTERS = 2_000
"""Maximum number of characters that are stored of a program's error message."""


def trajectory_of(body: Any) -> str | None:
    """Return the token or the name of the trajectory that a report names; None if the report has none.

    Raises:
        RequestError: 400, the body is not a report.
    """
    if not isinstance(body, dict):
        raise RequestError(400, "the body is not a JSON object; send one with a TrajectoryId")
    name = _first_value(body, ID)
    if name is not None and not isinstance(name, str):
        raise RequestError(400, f"TrajectoryId is {name!r:.50}; it must be a text", param="TrajectoryId")
    return name or None


def complete_rollout(session: Session, report: dict[str, Any]) -> dict[str, Any]:
    """Record the end of the trajectory, and return the response.

    Raises:
        RequestError: 400 the report is malformed; 409 the trajectory has ended with the other status.
    """
    status = _first_value(report, STATUS)
    status = STATUSES[0] if status is None else status.lower() if isinstance(status, str) else status
    if status not in STATUSES:
        raise RequestError(400, f"Status is {status!r:.50}; it must be ready or failed", param="Status")
    if session.status not in (None, status):
        raise RequestError(
            409, f"Cannot transition trajectory {session.name} from {session.status} to {status}", "trajectory_complete"
        )
    error = _first_value(report, ERROR)
    session.finish(status, fields.text(error[:MAX_ERROR_CHARACTERS]) if isinstance(error, str) else None)
    return {"TrajectoryId": session.name, "Status": status}


def update_reward(session: Session, report: dict[str, Any]) -> dict[str, Any]:
    """Record the reported rewards, and return the response.

    The newest report counts. One value is the reward of the trajectory, several values are the rewards of its calls.

    Raises:
        RequestError: 400 the report is malformed; 410 the trajectory is over.
    """
    rewards = _first_value(report, REWARDS)
    values = rewards if isinstance(rewards, list) else [rewards]
    if not values or not all(_is_number(value) for value in values):
        raise RequestError(
            400, f"Rewards is {rewards!r:.80}; it must be a number or one for each turn", param="Rewards"
        )
    numbers = [float(value) for value in values]
    # The SDK sends a scalar as a list with one value.
    session.set_rewards(numbers[0] if len(numbers) == 1 else numbers)
    return {"TrajectoryId": session.name, "Rewards": numbers}


def _first_value(body: dict[str, Any], names: tuple[str, ...]) -> Any:
    return next((body[name] for name in names if body.get(name) is not None), None)


def _is_number(value: Any) -> bool:
    try:
        return type(value) in (int, float) and math.isfinite(value)
    except OverflowError:  # an integer beyond all floats
        return False
