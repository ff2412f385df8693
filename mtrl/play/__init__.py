"""Interactive episodes in which a person is the policy: `mtrl play`."""
