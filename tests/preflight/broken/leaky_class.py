"""State on the class: later episodes can see the lookups of an episode."""

from tests.preflight.broken.sound import Lookup, family


class Leaky(Lookup):
    seen: list[str] = []  # noqa: RUF012

    def show(self, word):
        self.seen.append(word)
        return f"{super().show(word)} (look number {len(self.seen)})"


FAMILY = family(Leaky)
