"""An observation with the current date."""

import datetime

from tests.preflight.broken.sound import Lookup, family


class WallClock(Lookup):
    def show(self, word):
        return f"{super().show(word)} as of {datetime.date.today()}"


FAMILY = family(WallClock)
