"""Reward files: each defines TURN_REWARD_FUNCS and OUTCOME_REWARD_FUNCS, and stands for a `reward.scheme`."""
