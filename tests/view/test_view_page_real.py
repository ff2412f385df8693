"""The page of a real language model: a vocabulary of 49,152 tokens, and conversations of 2,000 tokens."""

import json

import pytest
from playwright.sync_api import expect

from mtrl.models.gguf import as_folder
from mtrl.record.trajectories import write_groups
from mtrl.types import FinishReason, Group, StopReason, Trajectory, Turn
from tests.models.gguf_files import real_model
from tests.view.made_runs import TOKEN, viewing
from tests.view.page_browser import fits, opened

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("smollm2")]

TURNS = 4
QUESTION = "Zoë's café sells 3 kinds of bread, and each of its 12 trays holds 1,234 grams of 日本 flour. " * 12
ANSWER = "I multiply 12 by 1,234 first.\n\n<calc>12*1234</calc> gives 14808 🍞, so each tray\tneeds\n" + (
    "another look at the numbers: 3 kinds, 12 trays, 37,020 grams. " * 6
)


def trajectory(tokenizer, index):
    """Return a conversation of about 2,000 tokens in the form of SmolLM2's own template."""
    turns = []
    for number in range(TURNS):
        role = "user" if number else "system\nYou solve problems.<|im_end|>\n<|im_start|>user"
        observed = f"<|im_start|>{role}\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
        action = [*tokenizer.encode(ANSWER), tokenizer.eos_token_id]
        logprobs = [-0.01 - 0.5 * (place % 7) for place in range(len(action))]
        turns.append(
            Turn(
                observation_ids=tokenizer.encode(observed),
                action_ids=action,
                action_logprobs=logprobs,
                version_spans=[(1, len(action))],
                finish=FinishReason.STOP,
                text=ANSWER,
                message={"role": "assistant", "content": ANSWER},
                observation=[{"role": "user", "content": QUESTION}],
                reward=float(number == TURNS - 1),
                components={"correct": float(number == TURNS - 1)},
                advantages=[0.5 - index],
                trainer_logprobs=[value + 1e-3 for value in logprobs],
            )
        )
    return Trajectory("test-0", "step0/0", index, turns, StopReason.DONE, score=1.0)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(as_folder(real_model(), "model.path"))
    folder = tmp_path_factory.mktemp("real") / "run"
    (folder / "trajectories").mkdir(parents=True)
    made = [trajectory(tokenizer, index) for index in range(2)]
    tokens = sum(len(turn.observation_ids) + len(turn.action_ids) for turn in made[0].turns)
    assert len(tokenizer) == 49152 and tokens > 2000
    write_groups(folder / "trajectories", "train", 1, [Group("step0/0", {}, made)])
    tokenizer.save_pretrained(folder / "tokenizer")
    (folder / "metrics.jsonl").write_text('{"step": 1, "rollout/reward/mean": 1.0}\n', encoding="utf-8")
    (folder / "config.yaml").write_text(json.dumps({"name": "real", "seed": 0}), encoding="utf-8")
    return folder


def test_tokens_of_a_real_model_are_readable(run, browser):
    with viewing(run) as client:
        address = f"{str(client.base_url).rstrip('/')}/?token={TOKEN}#trajectory?at=train_step_000001/0"
        with opened(browser, address) as page:
            expect(page.locator("#turn-4")).to_contain_text("37,020 grams")
            expect(page.locator("#turn-1")).to_contain_text("Zoë's café")
            assert fits(page)
            page.evaluate("location.hash = '#trajectory?at=train_step_000001/0&show=tokens'")
            shown = page.locator("#turn-1 .tok")
            expect(shown.first).to_be_visible()
            text = "".join(shown.all_text_contents())  # a dot is a space, and an arrow ends a line
            assert "<|im_start|>" in text and "I·multiply·12" in text and "Zoë's·café" in text and "日" in text
            assert "Ġ" not in text and "�" not in text
            assert fits(page)
            page.evaluate("location.hash = '#trajectory?at=train_step_000001/0&show=tokens&turn=4&token=40'")
            expect(page.locator(".tok.chosen")).to_be_in_viewport()
            expect(page.locator(".token-details")).to_contain_text("40 in turn 4")
            expect(page.locator(".token-details")).to_be_in_viewport()
