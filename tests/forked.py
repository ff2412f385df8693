"""`Popen` and `run` of `subprocess` for Python programs, forked from a server that has imported all modules.

The imports of torch and transformers take seconds, which is most of the time of a small run. `Popen` and `run` accept
commands that begin with `sys.executable`. The process has its own folder, environment, arguments, standard streams,
signals and exit code; `tests/test_forked.py` compares it with a started process. Variables that Python or a library
reads only at its start are refused (`SETTLED`). The command line in /proc is that of the server, so tests that search
processes by their command line must use `subprocess`.
"""

import atexit
import gc
import inspect
import multiprocessing
import os
import re
import runpy
import signal
import subprocess
import sys
import threading
import time
import types
from contextlib import chdir, suppress
from multiprocessing.forkserver import ensure_running
from multiprocessing.reduction import DupFd
from pathlib import Path
from unittest import mock
from weakref import WeakSet

ROOT = Path(__file__).parent.parent
SETTLED = re.compile(r"PYTHON(?!PATH$)|(MKL|OPENBLAS|HF|TRANSFORMERS|TORCH|CUDA|TOKENIZERS)_|LD_|MPL")
"""Variables that are read once, when the server starts."""
AT_START = {name: value for name, value in os.environ.items() if SETTLED.match(name)}
PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
STARTS = inspect.signature(subprocess.Popen._execute_child)
CONTEXT = multiprocessing.get_context("forkserver")
STARTED: WeakSet = WeakSet()
STARTING = threading.Lock()
"""The start of the server changes the environment and the folder of this process for a moment."""
atexit.register(
    lambda: [process.kill() for process in STARTED]
)  # before the exit handler of multiprocessing, which waits for them


def preloaded() -> list[str]:
    """Return the names of this module and of all modules of mtrl, except programs and modules inside engines."""
    files = [path.relative_to(ROOT) for path in (ROOT / "mtrl").rglob("*.py")]
    chosen = [path for path in files if path.stem != "__main__" and not {"vllm", "sglang"} & {*path.parts}]
    names = sorted(".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in chosen)
    return ["tests.forked", *names, "matplotlib.figure", "peft", "tests.forked_server"]


def begin() -> None:
    """Start the fork server of this process, unless it runs. The first start determines its imported modules."""
    with STARTING:
        _begin()


def _begin() -> None:
    CONTEXT.set_forkserver_preload(preloaded())
    with chdir(ROOT), mock.patch.dict(os.environ, AT_START | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}):
        ensure_running()


class Descriptor:
    """A file descriptor that is unpickled in the child as its number there."""

    def __init__(self, number: int):
        self.number = number

    def __reduce__(self):
        return _detached, (DupFd(self.number),)


def _detached(duplicate) -> int:
    return duplicate.detach()


class Popen(subprocess.Popen):
    """`subprocess.Popen([sys.executable, "-m" | "-c" | path, …], …)`, forked.

    Raises:
        ValueError: another program, or a variable of `SETTLED` that is not the server's.
    """

    def _execute_child(self, *arguments):
        call = STARTS.bind(self, *arguments).arguments
        python, *words = map(str, call["args"])
        environment = {str(k): str(v) for k, v in (os.environ if call["env"] is None else call["env"]).items()}
        settled = {k: v for k, v in environment.items() if SETTLED.match(k)}
        refused = sorted({name for name, _ in settled.items() ^ AT_START.items()})
        if python != sys.executable or refused or call["preexec_fn"] or call["pass_fds"]:
            raise ValueError(f"{refused or python}: only subprocess can start this")
        files = (call["p2cread"], call["c2pwrite"], call["errwrite"])
        streams = [Descriptor(number if file == -1 else file) for number, file in enumerate(files)]
        folder, session = str(call["cwd"] or os.getcwd()), call["start_new_session"]
        self._process = CONTEXT.Process(
            name="MainProcess", target=_become, args=(words, folder, environment, streams, session)
        )
        begin()
        self._process.start()
        self.pid, self._child_created = self._process.pid, True
        STARTED.add(self)
        self._close_pipe_fds(*(call[name] for name in PIPES))

    def _internal_poll(self, _deadstate=None):
        if self.returncode is None:
            self.returncode = self._process.exitcode
        return self.returncode

    def _wait(self, timeout):
        self._process.join(timeout)
        if self._internal_poll() is None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self.returncode


def run(command, *, input=None, timeout=None, check=False, capture_output=False, **settings):
    """`subprocess.run`, forked."""
    if capture_output:
        settings |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    if input is not None:
        settings["stdin"] = subprocess.PIPE
    with Popen(command, **settings) as process:
        try:
            output, errors = process.communicate(input, timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(command, process.returncode, output, errors)
    if check:
        done.check_returncode()
    return done


def _become(words: list[str], folder: str, environment: dict[str, str], streams: list[int], session: bool) -> None:
    """Behave as the requested interpreter in the child, and exit."""
    gc.freeze()
    gc.get_freeze_count = lambda: 1  # `mtrl.utils.process` asks whether there are any; counting a million takes 0.1 s
    if session:
        os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    for number, stream in enumerate(
        (sys.stdout, sys.stderr), 1
    ):  # the same objects, because log handlers refer to them
        file = open(number, "wb", buffering=0 if stream.write_through else -1, closefd=False)  # noqa: SIM115
        settings = {name: getattr(stream, name) for name in ("encoding", "errors", "write_through")}
        stream.__init__(file, **settings, line_buffering=number == 2 and stream.line_buffering)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    time.tzset()
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()  # Python seeds its own generator after a fork
    code = _ended(lambda: _execute(words, folder, environment.get("PYTHONPATH", "")))
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(code & 0xFF)


def _execute(words: list[str], folder: str, path: str) -> None:
    """Execute the words after `python` of a command line."""
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__builtins__ = __builtins__
    first, *sys.argv = words
    if first != "-m":  # the program may patch modules of mtrl before other modules import them
        if server := sys.modules.get("tests.forked_server"):
            server.CACHED.close()  # its merges refer to classes of the modules below
        for name in [name for name in sys.modules if name.partition(".")[0] == "mtrl"]:
            del sys.modules[name]
    python = [entry for entry in sys.path if entry.startswith((sys.prefix, sys.base_prefix))]
    named = [os.path.abspath(entry) for entry in path.split(os.pathsep) if entry]  # as the module `site` does
    sys.path[:] = [folder, *named, *python]
    if first == "-m":
        name, sys.argv[0] = sys.argv[0], "-m"
        for loaded in (name, f"{name}.__main__"):
            if not hasattr(sys.modules.get(loaded), "__path__"):
                sys.modules.pop(loaded, None)
        runpy._run_module_as_main(name)
    elif first == "-c":
        source, sys.argv[0], sys.path[0] = sys.argv[0], "-c", ""
        exec(compile(source, "<string>", "exec"), vars(main))
    else:
        main.__file__ = first
        sys.argv, sys.path[0] = words, str(Path(first).resolve().parent)
        exec(compile(Path(first).read_bytes(), first, "exec"), vars(main))


def _ended(execute) -> int:
    """Call `execute`, print its error as Python does, and return the exit code."""
    try:
        execute()
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
    except KeyboardInterrupt:
        sys.excepthook(*sys.exc_info())
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    else:
        return 0
    return 1
