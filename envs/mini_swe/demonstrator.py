"""Demonstrations for generated rows: those of a weak demonstrator for the warm start of the tiny policy, and gold.

The weak demonstrator shows every kind of move, but usually edits a file that it has not read, which is seldom right.
Reinforcement learning then teaches the policy to read the file first, and to choose the edit by its content.
"""

from __future__ import annotations

import random
from typing import Any

from envs.mini_swe.bugs import Bug, edit, pairs, sed
from envs.mini_swe.data import FILE, located
from envs.mini_swe.prompts import SUBMIT
from mtrl.environments.family import Recital
from mtrl.errors import UserError
from mtrl.types import Row

BLIND_SHARE = 0.55
"""Share of episodes that edit without reading the file, as if for another bug of the same function."""
SLIP_SHARE = 0.05
"""Share of the other episodes that read the file, but still edit for another bug."""
SUBMISSION = f"echo {SUBMIT}"


def demonstrate(row: Row, rng: random.Random) -> Recital:
    """Return a weak demonstrator for `row`, which must be a generated training row with a single file."""
    if row.get("split") == "test":
        raise ValueError(f"row {row['id']} is held out and must not be demonstrated")
    if list(row["ground_truth"].get("files", ())) != [FILE]:
        raise UserError(
            f"row {row['id']} is not a generated one with a single function and has no demonstration; set "
            "data.path=null and environment.config.functions=1, or model=hf"
        )
    bug, blind = Bug(**row["bug"]), rng.random() < BLIND_SHARE
    slips = blind or rng.random() < SLIP_SHARE
    repair = _submit_edit(_other(bug, rng) if slips else bug)
    return Recital([repair] if blind else [say(f"cat {FILE}"), repair])


def gold(row: Row) -> list[str]:
    """Return the responses of a perfect player: it reads the code, repairs the line and submits. Rows of `data.path`
    have their own patch."""
    if "bug" not in row:
        return _gold_patch(row)
    bug = Bug(**row["bug"])
    if list(row["ground_truth"]["files"]) == [FILE]:
        return [say(f"cat {FILE}"), _submit_edit(bug)]
    path, number = located(row["ground_truth"]["files"], bug)
    mend = f"sed -i '{number}{sed(*edit(*_lines(bug)))}' {path}"
    return [say(f"grep -rn 'def {bug.name}(' ."), say(f"cat {path}"), say(f"{mend} && {SUBMISSION}")]


def decoys(row: Row) -> list[str]:
    """Return well-formed last responses that repair nothing: other edits, a comment, and no edit."""
    if "bug" not in row:
        return [say(SUBMISSION)]
    bug = Bug(**row["bug"])
    path, _ = located(row["ground_truth"]["files"], bug)
    others = [_submit_edit(_other(bug, random.Random(f"decoy {n}")), path) for n in range(4)]
    return list(dict.fromkeys([*others, say(f"echo '# done' >> {path} && {SUBMISSION}"), say(SUBMISSION)]))


def say(command: str) -> str:
    """Return the response that runs a command."""
    return f"```bash\n{command}\n```"


def _submit_edit(bug: Bug, path: str = FILE) -> str:
    return say(f"sed -i '{sed(*edit(*_lines(bug)))}' {path} && {SUBMISSION}")


def _lines(bug: Bug) -> tuple[str, str]:
    """Return the broken and the fixed line. The edit does not depend on the text before `return`."""
    return tuple(f"{f.signature} return {f.expression}" for f in (bug.broken, bug.fixed))  # type: ignore[return-value]


def _other(bug: Bug, rng: random.Random) -> Bug:
    """Return a bug of the same function with another mutation, or of another function if there is no other mutation."""
    others = [pair for pair in pairs() if pair[0] == bug.name and pair[1] != bug.wrong]
    return Bug(*rng.choice(others or [pair for pair in pairs() if pair[0] != bug.name]), bug.naming)


def _gold_patch(row: dict[str, Any]) -> list[str]:
    if not row.get("patch"):
        raise UserError(f"row {row['id']} has no column patch, so its gold response is not known; add one")
    return [say(f"git apply <<'END_OF_PATCH'\n{row['patch'].rstrip()}\nEND_OF_PATCH"), say(SUBMISSION)]
