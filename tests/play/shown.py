"""Helpers of the tests of play: the root of the tree, the overrides of their task, and a reader of the screen."""

import re
from pathlib import Path

import mtrl

ROOT = Path(mtrl.__file__).parent.parent
TASK = ("experiment=null", "name=awkward")


def flat(shown):
    """Return the text of the screen without boxes and line breaks."""
    return re.sub(r"[\s│╭╮╰╯─]+", " ", shown)
