"""Be the policy at the keyboard: `python -m mtrl.play`."""
