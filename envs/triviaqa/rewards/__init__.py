"""Reward files: each defines TURN_REWARD_FUNCS and OUTCOME_REWARD_FUNCS, and implements one `reward.scheme`."""
