"""mtrl doctor --self-test: runs each part of a training run on this machine, checks it and measures it."""
