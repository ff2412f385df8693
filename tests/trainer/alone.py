"""One process with models to train, for tests that need no run around it. Not a test."""

from mtrl.trainer.update.learner import Learner, alone
from mtrl.trainer.update.update import Updater


def learners_of(config, policy, reference=None, optimizer=None):
    return alone(Learner(config, policy, reference, optimizer))


def updater_of(config, policy, reference, optimizer, dump, kl=None):
    return Updater(config, learners_of(config, policy, reference, optimizer), dump, kl)
