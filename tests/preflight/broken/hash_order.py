"""An observation with the order of a set of texts, which depends on the hash seed of the process."""

from tests.preflight.broken.sound import Lookup, family


class HashOrder(Lookup):
    def show(self, word):
        return f"{super().show(word)}; tags: {' '.join({'red', 'green', 'blue', 'white', 'black', 'pink', 'gold'})}"


FAMILY = family(HashOrder)
