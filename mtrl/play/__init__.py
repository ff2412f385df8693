"""Interactive episodes in which a person is the policy: `python -m mtrl.play`."""
