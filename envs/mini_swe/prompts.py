"""All texts of the environment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mtrl.environments.worked_example import Line, with_example
from mtrl.types import Message, Row

SUBMIT = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
"""mini-swe-agent's marker: a successful command with this text as the first line of its output ends the task."""
SYSTEM = f"""You repair software with shell commands. Each of your responses must hold exactly one command, in a block:

THOUGHT: what you want to do, and why

```bash
your command
```

Every command runs in a new shell in the folder of the repository, and its exit code and output are shown to you. \
Look at the code first, then edit it, for example with sed or by writing the file anew, and try what you did.
Edit source files only: changes to tests and to configuration are dropped before the hidden tests run.
When the issue is resolved, submit with the command `echo {SUBMIT}`. After it you cannot go on. \
The number of responses is limited."""

TASK = "Resolve this issue of the repository in the current folder:\n\n<issue>\n{issue}\n</issue>"
EXAMPLE: list[Line] = [
    ("User", TASK.format(issue="`total` gives wrong results: `total([2, 3])` returns 4; it should return 5.")),
    ("Assistant", "THOUGHT: I look for the function first.\n\n```bash\ngrep -rn -A 2 'def total' .\n```"),
    (
        "User",
        "<returncode>0</returncode>\n<output>\n./shop.py:1:def total(prices):\n./shop.py-2-    return sum(prices) - 1\n"
        "</output>\nYou have 19 responses left.",
    ),
    (
        "Assistant",
        "THOUGHT: The `- 1` is wrong. I remove it, and try the example of the issue.\n\n```bash\n"
        "sed -i 's/ - 1$//' shop.py && python3 -c 'from shop import total; print(total([2, 3]))'\n```",
    ),
    ("User", "<returncode>0</returncode>\n<output>\n5\n</output>\nYou have 18 responses left."),
    ("Assistant", f"THOUGHT: The issue is resolved, so I submit.\n\n```bash\necho {SUBMIT}\n```"),
]
EXAMPLE_ROW: Row = {
    "id": "worked example",
    "prompt": [],
    "ground_truth": {
        "files": {"shop.py": "def total(prices):\n    return sum(prices) - 1\n"},
        "calls": [["shop.total", [[2, 3]], 5], ["shop.total", [[]], 0], ["shop.total", [[7]], 7]],
    },
}
"""The row that the example solves."""


@dataclass(frozen=True)
class Style:
    """Wording and layout of observations."""

    output: str
    cut: str
    """Template that replaces `output` if the output is too long."""
    problem: str
    turns: str
    malformed: str
    characters: int
    """Maximum number of characters of the output to show: half from its start, half from its end."""
    strip: bool
    """Whether the white space around the output is removed."""

    def observation(self, result: dict[str, Any], turns_left: int) -> str:
        """Return the observation after a command."""
        text = result["output"].strip() if self.strip else result["output"]
        half = self.characters // 2
        parts = {"returncode": result["returncode"], "output": text, "elided": len(text) - 2 * half}
        fits = len(text) <= self.characters
        shown = (self.output if fits else self.cut).format(**parts, head=text[:half], tail=text[len(text) - half :])
        problem = self.problem.format(result["exception_info"]) if result["exception_info"] else ""
        return problem + shown + self._turns(turns_left)

    def complaint(self, turns_left: int) -> str:
        """Return the observation after a response that is not exactly one command."""
        return self.malformed + self._turns(turns_left)

    def _turns(self, left: int) -> str:
        return self.turns.format(turns=left, s="" if left == 1 else "s")


FULL = Style(
    # The layout of mini-swe-agent.
    output="<returncode>{returncode}</returncode>\n<output>\n{output}</output>",
    cut="<returncode>{returncode}</returncode>\n<warning>\nThe output of your last command was too long.\n</warning>\n"
    "<output_head>\n{head}\n</output_head>\n<elided_chars>\n{elided} characters elided\n</elided_chars>\n"
    "<output_tail>\n{tail}\n</output_tail>",
    problem="<exception>{}</exception>\n",
    turns="\nYou have {turns} response{s} left.",
    malformed="Format error: a response must hold exactly one command, in one block that begins with a line ```bash "
    "and ends with a line ```.",
    characters=10_000,
    strip=False,
)
SHORT = Style(
    output="{returncode} ; {output}",
    cut="{returncode} ; {head} ... {tail}",
    problem="{} ; ",
    turns=" ; {turns} left",
    malformed="write one command",
    characters=300,
    strip=True,
)
"""Style for models with contexts of a few dozen tokens."""


def style_of(row: Row | None) -> Style:
    """Return the style of a row. Generated rows are short with `environment.prompt=short`."""
    return SHORT if row and row.get("style") == "short" else FULL


def full_prompt(issue: str, example: bool = True) -> list[Message]:
    """Return the prompt for a language model. Prompts of `environment.prompt=short` for rows of `data.path` lack the
    worked example."""
    system = with_example(SYSTEM, EXAMPLE) if example else SYSTEM
    return [{"role": "system", "content": system}, {"role": "user", "content": TASK.format(issue=issue.strip())}]
