"""The reward accepts an answer anywhere in the text."""

from tests.preflight.broken.sound import Lookup, family


class LenientPlace(Lookup):
    def step(self, response, ground_truth):
        answer = f"<final_output>{ground_truth['answer']}</final_output>"
        return super().step(answer if answer in response else response, ground_truth)


FAMILY = family(LenientPlace)
