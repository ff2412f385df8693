"""The rules. The order of these imports is the order in which the rules are checked (R154): prerequisites of training,
the five rules, and then the rest, from learning to cost."""

# ruff: noqa: F401, I001
from mtrl.diagnose.rules import baseline
from mtrl.diagnose.rules import guesses
from mtrl.diagnose.rules import undecided
from mtrl.diagnose.rules import update
from mtrl.diagnose.rules import flat
from mtrl.diagnose.rules import equal_groups
from mtrl.diagnose.rules import hacked
from mtrl.diagnose.rules import collapse
from mtrl.diagnose.rules import stall
from mtrl.diagnose.rules import held_out
from mtrl.diagnose.rules import signal
from mtrl.diagnose.rules import completion
from mtrl.diagnose.rules import budgets
from mtrl.diagnose.rules import growth
from mtrl.diagnose.rules import tasks
from mtrl.diagnose.rules import policy
from mtrl.diagnose.rules import gradient
from mtrl.diagnose.rules import sources
from mtrl.diagnose.rules import episodes
from mtrl.diagnose.rules import credit
