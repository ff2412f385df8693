"""Program for a process of its own: runs the calls on stdin with the manager class of a folder's `tools.py`.

PYTHONHASHSEED=0 python -s -P record_tools.py FOLDER < calls.json > results.json

The calls are a list of `[tool, arguments]`; each result is `{"result": …}` or `{"error": "…"}`. The program imports
nothing of this package, to keep it separate from the folder's code.
"""

import importlib.util
import json
import os
import random
import sys


def main(folder):
    calls = json.load(sys.stdin)
    # The output of the tools, and of the programs that they start, must not mix with the results.
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as output:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        random.seed(0)  # tools with random results give the same ones in every run
        manager = make_manager(os.path.join(folder, "tools.py"))
        json.dump([answer(manager, name, arguments) for name, arguments in calls], output)


def make_manager(path):
    """Return an object of the first class whose name ends in Manager."""
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
    """Return the tool's result as plain JSON; numbers that JSON cannot express become null."""
    try:
        if hasattr(manager, "process_tool_call"):
            result = manager.process_tool_call(name, arguments)
        else:
            result = getattr(manager, name)(**arguments)
        return {"result": json.loads(json.dumps(result, default=plain), parse_constant=lambda constant: None)}
    except (Exception, SystemExit) as error:
        return {"error": f"{type(error).__name__}: {error}"}


def plain(value):
    """Convert scalars of numpy and pandas to Python's, and other objects to text."""
    return value.item() if hasattr(value, "item") else str(value)


if __name__ == "__main__":
    main(sys.argv[1])
