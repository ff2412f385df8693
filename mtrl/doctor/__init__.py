"""mtrl doctor: checks of this machine, and an estimate of the memory that a run needs."""
