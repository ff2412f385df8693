"""Run in a process of its own: makes the calls on stdin with the manager class of a folder's `tools.py`.

python -I record_tools.py FOLDER < calls.json > results.json

The calls are a list of `[tool, arguments]`; each result is `{"result": …}` or `{"error": "…"}`. It imports nothing of
this package, so that the folder's code meets none of it.
"""

import contextlib
import importlib.util
import json
import os
import random
import sys


def main(folder):
    calls = json.load(sys.stdin)
    with contextlib.redirect_stdout(sys.stderr):  # what the tools print is no result
        random.seed(0)  # those that draw at random answer the same in every run
        manager = make_manager(os.path.join(folder, "tools.py"))
        results = [answer(manager, name, arguments) for name, arguments in calls]
    json.dump(results, sys.stdout)


def make_manager(path):
    """An object of the first class whose name ends in Manager."""
    spec = importlib.util.spec_from_file_location("tools_of_folder", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    names = sorted(name for name, value in vars(module).items() if isinstance(value, type) and name.endswith("Manager"))
    if not names:
        sys.exit(f"{path} has no class whose name ends in Manager")
    return getattr(module, names[0])()


def answer(manager, name, arguments):
    """What the tool returns as plain JSON; numbers that JSON does not have become null."""
    try:
        if hasattr(manager, "process_tool_call"):
            result = manager.process_tool_call(name, arguments)
        else:
            result = getattr(manager, name)(**arguments)
        return {"result": json.loads(json.dumps(result, default=plain), parse_constant=lambda constant: None)}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def plain(value):
    """numpy's and pandas' scalars as Python's."""
    return value.item() if hasattr(value, "item") else str(value)


if __name__ == "__main__":
    main(sys.argv[1])
