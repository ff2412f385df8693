"""Learners of one process, for tests without a run. Not a test."""

from mtrl.trainer.update.learner import Learner, alone
from mtrl.trainer.update.update import Updater


def learners_of(config, policy, reference=None, optimizer=None):
    return alone(Learner(config, policy, reference, optimizer))


def updater_of(config, policy, reference, optimizer, dump, kl=None):
    return Updater(config, learners_of(config, policy, reference, optimizer), dump, kl)
