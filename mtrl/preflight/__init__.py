"""The checklist before a run: is the environment repeatable, the reward honest, the task within the policy's reach?

`python -m mtrl.preflight experiment=X` runs it (`__main__.py`); `cheap_checks` is the part that a run makes at its
start. A check is a function from a `Context` to a `Result`; one file holds the checks of one noun.
"""
