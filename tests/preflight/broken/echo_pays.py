"""The reward counts words of the question in the response, so that a copy of the question gets nearly all of it."""

from tests.preflight.broken.sound import Lookup, family


class EchoPays(Lookup):
    def reset(self, row=None):
        self.question = set(row["prompt"][0]["content"].split()) if row else set()
        return super().reset(row)

    def step(self, response, ground_truth):
        result = super().step(response, ground_truth)
        shared = self.question & set(response.split())
        if len(shared) > 5:
            result.reward, result.done = 0.9 * len(shared) / len(self.question), True
        return result


FAMILY = family(EchoPays)
