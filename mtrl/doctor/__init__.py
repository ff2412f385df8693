"""python -m mtrl.doctor: what this machine can do, and what memory a run would take."""
