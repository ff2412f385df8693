"""The reward also accepts `<final_response>`, which the scorer does not read."""

import re

from tests.preflight.broken.sound import Lookup, family


class LenientTag(Lookup):
    ANSWER = re.compile(r"\s*<final_(?:output|response)>(\d+)</final_(?:output|response)>\s*")


FAMILY = family(LenientTag)
