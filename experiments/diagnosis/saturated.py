"""gsm8k for a policy that was fine-tuned on the easy half: it always solves problems of one operation and no others.

All trajectories of a group therefore have the same reward, so that group estimators give no advantage.
"""

from __future__ import annotations

import random
import re
from dataclasses import replace

from envs.gsm8k import FAMILY as GSM8K
from envs.gsm8k.data import gold
from envs.gsm8k.demonstrator import WeakPlayer
from envs.gsm8k.demonstrator import demonstrate as demonstrate_gsm8k
from mtrl.environments.family import Recital
from mtrl.types import Row


def demonstrate(row: Row, rng: random.Random) -> WeakPlayer | Recital:
    """Return a demonstrator that solves easy problems and guesses at the others. `row` must be a training row."""
    guesser = demonstrate_gsm8k({**row, "calculator": False}, rng)
    easy = len(re.findall("[-+*/]", row["expression"])) == 1
    return Recital(gold(row)) if easy else guesser


FAMILY = replace(GSM8K, name="saturated", demonstrate=demonstrate, gold=None, decoys=None)
