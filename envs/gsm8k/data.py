"""Rows of the gsm8k family: synthetic word problems, real GSM8K, and GSM8K in SkyRL's format."""

from __future__ import annotations

from decimal import Decimal
from functools import partial
from typing import Any

from envs.gsm8k.problems import Problem, generate
from envs.gsm8k.prompts import EXAMPLE_ROW, full_prompt, opening
from envs.gsm8k.reward import parse_answer, parse_number
from mtrl.datasets import Splits, cap, load_splits, to_row
from mtrl.errors import UserError
from mtrl.types import Message, Row

HUB_NAME = "openai/gsm8k"


def load(data: Any, seed: int, calculator: bool = False, operations: int = 2, prompt: str = "short") -> Splits:
    """Return the rows of `data.path`; without a path, synthetic problems with up to `operations` operations.

    Args:
        data: the `data` section of the config.
        seed: seed of the synthetic problems.
        calculator: whether the environment offers the calculator.
        operations: maximum number of operations of a synthetic problem.
        prompt: full, or short: only the question of synthetic problems, and SkyRL's prompt of other rows.
    """
    full = prompt == "full"
    if data.path is None:
        return _synthetic(data, seed, calculator, operations, full)
    return load_splits(data, partial(_real_row, calculator=calculator, full=full), hub_config={HUB_NAME: "main"})


def gold(row: Row) -> list[str]:
    """Return the responses of a perfect player."""
    if row.get("source") == "synthetic":
        compute = [f"<calc>{row['expression']}</calc>"] if row["calculator"] else []
        return [*compute, f"#### {row['ground_truth']['answer']}"]
    return [row.get("solution") or f"#### {row['ground_truth']['answer']}"]


def worked_example(row: Row) -> Row:
    """Return the row that the worked example of full prompts solves."""
    return EXAMPLE_ROW


def decoys(row: Row) -> list[str]:
    """Return well-formed answers that are wrong: off by one, ten times too large, or with the other sign."""
    answer = Decimal(row["ground_truth"]["answer"])
    others = (answer + 1, answer - 1, answer * 10 or answer + 10, -answer or answer + 2)
    return [f"#### {other}" for other in dict.fromkeys(others)]


def _synthetic(data: Any, seed: int, calculator: bool, operations: int, full: bool) -> Splits:
    train, test = generate(data.synthetic_train_rows, data.synthetic_test_rows, seed, operations)
    rows = {
        split: [_synthetic_row(f"{split}-{n}", split, problem, calculator, full) for n, problem in enumerate(problems)]
        for split, problems in (("train", train), ("test", test))
    }
    return cap(Splits(**rows), data)


def _synthetic_row(row_id: str, split: str, problem: Problem, calculator: bool, full: bool) -> Row:
    question: list[Message] = [{"role": "user", "content": problem.question}]
    row = {
        "id": row_id,
        "prompt": full_prompt(problem.question, calculator) if full else question,
        "ground_truth": {"answer": problem.answer},
        "question": problem.question,
        "source": "synthetic",
        "split": split,
        "key": problem.key,
        "expression": problem.expression,
        "calculator": calculator,
    }
    return row | ({"style": "full"} if full else {})


def _real_row(raw: dict[str, Any], split: str, index: int, calculator: bool, full: bool) -> Row:
    """Convert a row of GSM8K (`question`, `answer`) or of SkyRL (`prompt`, `reward_spec`, `extra_info`)."""
    extra = raw.get("extra_info") if isinstance(raw.get("extra_info"), dict) else {}
    solution = raw.get("answer") or extra.get("answer")
    row = to_row(raw, split, index)
    if not raw.get("prompt"):  # Parquet and CSV give a row without a prompt an empty one if others have a prompt
        question = row["question"]
        skyrl = opening(question, multi_turn=True, calculator=calculator)
        row["prompt"] = full_prompt(question, calculator) if full else skyrl
    row.setdefault("question", extra.get("question") or row["prompt"][-1]["content"])
    row["ground_truth"] = {"answer": _answer(str(row["ground_truth"].get("answer", "")), row["id"])}
    # `gold` returns the solution as written, if it is in the right format.
    row["solution"] = solution if isinstance(solution, str) and parse_answer(solution) is not None else None
    return row


def _answer(text: str, row_id: str) -> str:
    """Return the number of a ground truth: a bare number, or the text after the last `####` of a solution."""
    answer = text.rpartition("####")[2].strip()
    if parse_number(answer) is None:  # before the commas are removed, which would make 314 of 3,14
        raise UserError(
            f"row {row_id} of data.path has the answer {text[-40:]!r}; write a number, such as 1,000 or 3.14, "
            "or a solution that ends with '#### number'"
        )
    return answer.replace("$", "").replace(",", "")
