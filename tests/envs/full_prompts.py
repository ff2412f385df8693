"""The full prompts of all shipped tasks, by the name of their golden file in this folder's `full_prompts/`.

`python -m tests.envs.full_prompts` writes the files again after a change of a prompt.
"""

from pathlib import Path

from mtrl.config.schema import DataConfig
from mtrl.environments.family import get_family

FOLDER = Path(__file__).with_suffix("")
TASKS = {
    "gsm8k": ("gsm8k", {}),
    "gsm8k_calculator": ("gsm8k", {"calculator": True}),
    "text_to_sql": ("text_to_sql", {}),
    "mastermind": ("games", {"game": "mastermind"}),
    "maze": ("games", {"game": "maze"}),
    "search": ("search", {}),
    "triviaqa": ("triviaqa", {}),
    "mini_swe": ("mini_swe", {}),
    "aircraft_inspection": ("sop", {"domain": "aircraft_inspection"}),
    "customer_service": ("sop", {"domain": "customer_service"}),
    "tic_tac_toe": ("tic_tac_toe", {}),
    "service": ("service", {}),
    "order_fulfilment": ("sop", {"domain": "order_fulfilment"}),
}
"""Family and settings of each prompt."""


def rows(name, prompt="full"):
    """Return the generated training rows of a task."""
    family, config = TASKS[name]
    data = DataConfig(synthetic_train_rows=2, synthetic_test_rows=1)
    return get_family(family).load(data, 0, prompt=prompt, **config).train


def text_of(prompt):
    return "".join(f"--- {message['role']}\n{message['content']}\n" for message in prompt)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name in TASKS:
        (FOLDER / f"{name}.txt").write_text(text_of(rows(name)[0]["prompt"]), encoding="utf-8")
