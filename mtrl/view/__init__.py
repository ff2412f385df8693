"""What the agent did, as a web page on this machine: `python -m mtrl.view`."""
