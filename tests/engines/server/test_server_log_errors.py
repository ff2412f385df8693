"""The line of a log that best explains why a server ended. The logs are parts of logs of the real engines."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtrl.engines.server.log_errors import error_line, is_port_taken

LOGS = {
    "vllm: the engine's process fails and its parent follows": (
        """\
(APIServer pid=28192) WARNING 11-21 22:20:49 [system_utils.py:255] Found ulimit of 20000 and failed. This can cause \
errors like `OSError: [Errno 24] Too many open files`. Consider increasing with ulimit -n
(EngineCore pid=28351) ERROR 11-21 22:21:16 [core.py:1510]     return func(*args, **kwargs)
(EngineCore pid=28351) ERROR 11-21 22:21:16 [core.py:1510] ImportError: cannot import name 'x' from 'vllm.y'
ImportError: cannot import name 'x' from 'vllm.y'
Traceback (most recent call last):
    raise RuntimeError(
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
""",
        "ImportError: cannot import name 'x' from 'vllm.y'",
    ),
    "vllm: a value that its configuration refuses": (
        """\
  File "pydantic/_internal/_dataclasses.py", line 121, in __init__
pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig
  Value error, User-specified max_model_len (1000000000) is greater than 512 [type=value_error]
    For further information visit https://errors.pydantic.dev/2.14/v/value_error
""",
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig Value error, User-specified "
        "max_model_len (1000000000) is greater than 512 [type=value_error] For further information visit "
        "https://errors.pydantic.dev/2.14/v/value_error",
    ),
    "vllm: an argument that it does not know": (
        "usage: serve.py [-h] [--headless]\n                [--host HOST]\n"
        "serve.py: error: unrecognized arguments: --no-such\n",
        "serve.py: error: unrecognized arguments: --no-such",
    ),
    "vllm: too little memory": (
        "ValueError: Available memory on node 0 (12.98/22.84 GiB) is less than desired (0.92, 21.01 GiB)\n"
        "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}\n",
        "ValueError: Available memory on node 0 (12.98/22.84 GiB) is less than desired (0.92, 21.01 GiB)",
    ),
    "sglang: a value that an argument may not have": (
        "[2026-11-21 22:23:32] Cuda graph is disabled\n"
        "sglang serve: error: argument --attention-backend: invalid choice: 'nonsense' (choose from 'triton')\n"
        "\x1b[0;36mbye\x1b[0m\n",
        "sglang serve: error: argument --attention-backend: invalid choice: 'nonsense' (choose from 'triton')",
    ),
    "sglang: a port that another has": (
        "[2026-11-21 22:23:43] Using default chat template\n"
        "ERROR:    [Errno 98] error while attempting to bind on address ('127.0.0.1', 30000): address already in use\n"
        "INFO:     Waiting for application shutdown.\nasyncio.exceptions.CancelledError\n",
        "[Errno 98] error while attempting to bind on address ('127.0.0.1', 30000): address already in use",
    ),
    "sglang: a scheduler that fails": (
        "[2026-11-21 22:23:43 TP0] Scheduler hit an exception: Traceback (most recent call last):\n"
        "    self.embed(ids)\nIndexError: index out of range in self\n\n"
        "[2026-11-21 22:23:44] ERROR: scheduler process died\nEOFError\n",
        "IndexError: index out of range in self",
    ),
    "an exception whose name has no Error": ("torch.cuda.DeviceGone: x\nqueue.Empty\n", "queue.Empty"),
    "only what follows from something else": ("EOFError: closed\nbye\n", "EOFError: closed"),
    "the kernel's words": ("Killed\n", "Killed"),
    "nothing": ("\n \n", ""),
}  # fmt: skip


@pytest.mark.parametrize("case", LOGS)
def test_the_line_with_the_cause_is_found(case):
    log, words = LOGS[case]
    assert error_line(log) == words


def test_taken_ports_are_recognised_in_the_logs_of_both_engines():
    message = {case for case, (log, _) in LOGS.items() if is_port_taken(log)}
    assert message == {"sglang: a port that another has"}
    assert is_port_taken("OSError: [Errno 98] Address already in use")


def test_old_lines_of_a_log_are_ignored():
    assert error_line("torch.OutOfMemoryError: CUDA out of memory\n" + "a turn\n" * 1000) == "a turn"


@given(st.text())
def test_any_log_yields_one_short_printable_line(log):
    message = error_line(log)
    assert message.isprintable() and len(message) < 2000
    assert bool(message) == any(line.strip() for line in log.splitlines()) or "\x1b" in log
