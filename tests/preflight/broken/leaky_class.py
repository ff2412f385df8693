"""State on the class: what one episode looks up, the next ones can see."""

from tests.preflight.broken.sound import Lookup, family


class Leaky(Lookup):
    seen: list[str] = []  # noqa: RUF012

    def show(self, word):
        self.seen.append(word)
        return f"{super().show(word)} (look number {len(self.seen)})"


FAMILY = family(Leaky)
