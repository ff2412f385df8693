"""The one-shot example shows a field that the ground truth does not have."""

import json

from mtrl.datasets import Splits
from mtrl.environments.base import BaseEnvironment
from tests.preflight.broken import sound

EXAMPLE = '<final_output>{"ready": "yes", "weather": "fine"}</final_output>'


def make_row(number, split):
    prompt = [{"role": "user", "content": f"Is plane {number} ready? Answer like this: {EXAMPLE}"}]
    truth = {"ready": "yes" if number % 3 else "no", "gate": str(number % 5)}
    return {"id": f"{split}-{number}", "prompt": prompt, "ground_truth": truth}


def load(data, seed, **config):
    return Splits([make_row(n, "train") for n in range(40)], [make_row(n, "test") for n in range(40, 70)])


def gold(row):
    return [f"<final_output>{json.dumps(row['ground_truth'])}</final_output>"]


class Report(BaseEnvironment):
    def step(self, response, ground_truth):
        return float(response.strip() == f"<final_output>{json.dumps(ground_truth)}</final_output>"), None, True


def score(trajectory, row):
    text = trajectory.messages[-1]["content"].strip()
    return float(text == f"<final_output>{json.dumps(row['ground_truth'])}</final_output>")


FAMILY = sound.family(Report, load=load, gold=gold, score=score, demonstrate=None)
