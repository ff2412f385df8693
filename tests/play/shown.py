"""What the tests of play share: the tree, the words that choose their task, and how a screen is read."""

import re
from pathlib import Path

import mtrl

ROOT = Path(mtrl.__file__).parent.parent
TASK = ("experiment=null", "name=awkward")


def flat(shown):
    """What is shown without boxes and line breaks."""
    return re.sub(r"[\s│╭╮╰╯─]+", " ", shown)
