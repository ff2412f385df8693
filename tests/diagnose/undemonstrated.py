"""A task without a demonstrator."""

from dataclasses import replace

from envs.gsm8k import FAMILY as GSM8K

FAMILY = replace(GSM8K, demonstrate=None)
