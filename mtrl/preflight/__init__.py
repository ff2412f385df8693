"""The checklist before a run: the environment is reproducible, the reward is honest, and the policy can solve the task.

`mtrl preflight experiment=X` runs the checklist (`__main__.py`); `cheap_checks` is the part that a training
run executes at its start. A check is a function from a `Context` to a `Result`; each file holds the checks of one
subject.
"""
