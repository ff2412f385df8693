"""The process sandbox in ordinary use: commands, results, files, limits, threads, and unsuitable machines."""

import os
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mtrl.errors import UserError
from mtrl.sandbox import bubblewrap, isolation, seccomp
from mtrl.sandbox.process import ProcessLimits, ProcessResult, ProcessSandbox, SandboxError, check_isolation
from tests.sandbox.processes import processes_with

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def sandbox():
    with ProcessSandbox() as sandbox:
        yield sandbox


def descriptors():
    return set(os.listdir("/proc/self/fd"))


def test_commands_return_output_and_exit_code(sandbox):
    result = sandbox.run("echo out; echo err >&2; exit 3")
    assert result == ProcessResult(3, "out\n", "err\n", seconds=result.seconds)
    assert sandbox.run("[[ abc == a* ]] && echo $((6 * 7))").stdout == "42\n", "bash runs lines"
    assert sandbox.run(["printf", "%s|", "a b", "$HOME", ""]).stdout == "a b|$HOME||", "no shell interprets lists"
    assert sandbox.run(["/bin/sh", "-c", "echo $0"]).stdout == "/bin/sh\n"
    assert sandbox.run(["type", "echo"]).exit_code == 127, "a list cannot name a command of the shell"
    assert sandbox.run("nosuchprogram").exit_code == 127
    assert sandbox.run("kill -TERM $$").exit_code == 128 + 15
    assert sandbox.run("if then").exit_code == 2


def test_commands_read_stdin(sandbox):
    assert sandbox.run("cat", stdin="grüße").stdout == "grüße"
    assert sandbox.run("cat").stdout == "", "stdin is empty, and the command does not wait"
    assert sandbox.run("wc -c", stdin=b"\0\xff" * 2_000_000).stdout == "4000000\n"
    assert "0" in sandbox.run("head -c 1; echo x >> /proc/self/fd/0; head -c 1", stdin="00").stdout


def test_only_folders_persist_between_commands(sandbox):
    sandbox.run("echo a > a; echo b > /tmp/b; echo c > /dev/shm/c; cd /; export X=1; sleep 100 &")
    result = sandbox.run("pwd; cat a /tmp/b /dev/shm/c; echo [$X]; set -- /proc/[0-9]*; echo $#")
    assert result.stdout == "/workspace\na\nb\nc\n[]\n2\n"  # the processes are the shell and its parent


def test_python_of_the_host_runs(sandbox):
    code = "import sys, json, sqlite3, ctypes, multiprocessing; print(sys.version); multiprocessing.Lock()"
    result = sandbox.run(["python3", "-c", code])
    assert result.stdout == f"{sys.version}\n", "with its own shared library, and not one of the system" + result.stderr


def test_results_are_equal_in_every_sandbox(tmp_path):
    """Results contain nothing of the host, the clock or the run."""
    commands = [
        "python3 -c 1/0",
        "cd nowhere",
        "nosuchprogram",
        "env | sort",
        "id; hostname; pwd; echo ~ $$ $PPID; ls -a /workspace /tmp",
        "sh -c 'kill -SEGV $$'; ulimit -a; umask",
        "python3 -c 'print({*\"abcdef\"})'",
    ]
    results = []
    for _ in range(2):
        with ProcessSandbox() as sandbox:
            results.append([(r.exit_code, r.stdout, r.stderr) for r in map(sandbox.run, commands)])
    assert results[0] == results[1]
    for private in (str(ROOT), str(Path.home()), sys.base_prefix, os.uname().nodename, tempfile.gettempdir() + "/"):
        assert private in ("/usr", "/") or private not in str(results)


def test_invalid_text_in_commands_and_output(sandbox):
    assert sandbox.run(r"printf 'a\377\0b\xc3'").stdout == "a\ufffd\0b\ufffd"
    for command in (
        "echo a\0b",
        "echo \ud800",
        [],
        ["echo", "\0"],
        "echo " + "x" * 200_000,
        ["echo"] + ["y" * 99] * 20_000,
    ):
        result = sandbox.run(command)
        assert result.exit_code == 126 and result.stderr.startswith("the command "), result
    assert sandbox.run("echo " + "x" * 60_000).stdout == "x" * 60_000 + "\n"


def test_output_is_cut():
    with ProcessSandbox(ProcessLimits(output_bytes=1000)) as sandbox:
        result = sandbox.run("printf 'a%.0s' {1..1000}; printf 'b%.0s' {1..1000} >&2")
        assert (result.stdout, result.stderr, result.truncated) == ("a" * 1000, "b" * 1000, False)
        result = sandbox.run("printf 'a%.0s' {1..1001}; printf 'ä%.0s' {1..501} >&2; exit 4")
        assert (result.stdout, result.stderr, result.truncated) == ("a" * 1000, "ä" * 500, True)
        assert (result.exit_code, result.killed_by) == (4, None), "the command itself is not affected"
        assert sandbox.run("printf '%999s€' x").stdout == f"{'x':>999}", "a split character is left out"


def test_time_is_limited(sandbox):
    result = sandbox.run("echo before; sleep 100; echo after", timeout=0.5)
    assert (result.exit_code, result.stdout, result.timed_out, result.killed_by) == (137, "before\n", True, "time")
    assert 0.5 <= result.seconds < 30
    with ProcessSandbox(ProcessLimits(seconds=0.5)) as other:
        assert other.run("sleep 100").timed_out
    assert sandbox.run("echo again").stdout == "again\n"


def test_processor_time_is_limited():
    with ProcessSandbox(ProcessLimits(cpu_seconds=1, seconds=60)) as sandbox:
        result = sandbox.run(["python3", "-c", "while True: pass"])
        assert result.exit_code in (128 + 24, 128 + 9) and not result.timed_out  # SIGXCPU, or SIGKILL a moment later


def test_limits_cannot_be_raised(sandbox):
    for option in ("-t", "-v", "-u", "-n", "-f", "-l", "-q"):
        assert sandbox.run(f"ulimit {option} $(( $(ulimit -H {option}) + 1 ))").exit_code == 1, option
    assert sandbox.run("echo -1000 > /proc/self/oom_score_adj").exit_code == 1
    assert sandbox.run(["nice", "-n", "-5", "true"]).stderr


def test_the_host_writes_and_reads_files(sandbox):
    sandbox.write_file("src/a.py", "print('ä')")
    sandbox.write_file("/workspace/bin/tool", b"#!/bin/sh\necho tool\n", mode=0o755)
    assert sandbox.run("python3 src/a.py; bin/tool; stat -c '%U %a %n' src src/a.py bin/tool").stdout.splitlines() == [
        *("ä", "tool", "sandbox 755 src", "sandbox 644 src/a.py", "sandbox 755 bin/tool")
    ]
    assert sandbox.run("echo more >> src/a.py; mkdir src/new; rm bin/tool; mv src/a.py src/new").exit_code == 0
    assert sandbox.read_file("src/new/a.py") == "print('ä')more\n".encode()
    sandbox.write_file("src/new/a.py", "")
    assert sandbox.snapshot() == {"src/new/a.py": b""}
    for path in (
        "",
        ".",
        "/",
        "..",
        "../x",
        "a/../../x",
        "/etc/passwd",
        "a\0b",
        "\ud800",
        "/workspace/..",
        "/workspace",
    ):
        for call in (sandbox.read_file, lambda path: sandbox.write_file(path, "x")):
            with pytest.raises(OSError, match="must lie in the workspace"):
                call(path)
    with pytest.raises(FileNotFoundError):
        sandbox.read_file("src/nowhere")
    with pytest.raises(NotADirectoryError):
        sandbox.write_file("src/new/a.py/b", "x")
    with pytest.raises(IsADirectoryError):
        sandbox.write_file("src", "x")
    with pytest.raises(OSError):
        sandbox.read_file("src")
    with pytest.raises(OSError, match="too long"):
        sandbox.write_file("n" * 300, "x")


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=200), path=st.text(min_size=1, max_size=12))
def test_written_content_is_read_back_for_any_path(sandbox, content, path):
    try:
        sandbox.write_file(path, content)
    except OSError:
        return
    assert sandbox.read_file(path) == content
    assert content in sandbox.snapshot().values()
    inside = str(PurePosixPath("/workspace", path))
    assert sandbox.run(["cat", inside]).stdout == content.decode(errors="replace")


def test_copy_in_copies_files_folders_and_links(sandbox, tmp_path):
    (tmp_path / "pkg" / "empty").mkdir(parents=True)
    (tmp_path / "pkg" / "m.py").write_text("x = 1")
    (tmp_path / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (tmp_path / "run.sh").chmod(0o755)
    (tmp_path / "link").symlink_to("pkg/m.py")
    sandbox.copy_in(tmp_path)
    sandbox.copy_in(tmp_path / "run.sh", "deep/er/again.sh")
    assert sandbox.run("./run.sh; deep/er/again.sh; cat link; ls -d pkg/empty").stdout == "ran\nran\nx = 1pkg/empty\n"
    assert set(sandbox.snapshot()) == {"pkg/m.py", "run.sh", "link", "deep/er/again.sh"}
    with pytest.raises(FileNotFoundError):
        sandbox.copy_in(tmp_path / "nowhere")


def test_close_releases_all_descriptors():
    ProcessSandbox().close()
    before = descriptors()
    for command in ("echo a > a", "sleep 100", "yes"):
        sandbox = ProcessSandbox()
        sandbox.run(command, timeout=0.3)
        sandbox.close()
        sandbox.close()
        for call in (lambda: sandbox.run("true"), sandbox.snapshot, lambda: sandbox.read_file("a")):  # noqa: B023
            with pytest.raises(SandboxError, match="closed"):
                call()
    forgotten = ProcessSandbox()
    del forgotten
    assert descriptors() <= before


MOUNTS_AFTER_A_SANDBOX = """
from pathlib import Path
from mtrl.sandbox.process import ProcessSandbox
mounts = lambda: set(Path("/proc/self/mounts").read_text().splitlines())
before = mounts()
sandbox = ProcessSandbox()
assert sandbox.run("echo a > a; cat a").stdout == "a\\n"
assert mounts() <= before, "an open sandbox has a mount on the host"
sandbox.close()
assert mounts() <= before, "a closed sandbox left a mount on the host"
"""


def test_the_host_has_no_mount_of_a_sandbox():
    """The process has its own list of mounts, because containers of other tests come and go in that of the host. A
    mount whose folder is removed on the host disappears from this list too."""
    own_mounts = ["unshare", "--mount", "--propagation", "private"]
    own_mounts += ["--user", "--map-current-user"] if os.geteuid() else []
    subprocess.run([*own_mounts, sys.executable, "-c", MOUNTS_AFTER_A_SANDBOX], cwd=ROOT, check=True)


def test_close_stops_a_command_of_another_thread(sandbox):
    results, marker = [], f"11{os.getpid()}"
    thread = threading.Thread(target=lambda: results.append(sandbox.run(f"sleep {marker}", timeout=500)))
    thread.start()
    deadline = time.monotonic() + 60
    while not processes_with(f"sleep\0{marker}"):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    sandbox.close()
    thread.join(60)
    assert results and results[0].killed_by == "closed" and results[0].exit_code == 137


@pytest.mark.ci
def test_two_hundred_sandboxes_run_at_once():
    """Each sandbox has its own folder and its own count of processes."""
    all_exist = threading.Barrier(200, timeout=300)

    def episode(number):
        with ProcessSandbox() as sandbox:
            all_exist.wait()
            sandbox.write_file("me", str(number))
            result = sandbox.run("cat me; sleep 0.2 & sleep 0.2 & sleep 0.2 & wait; ls | wc -l", timeout=300)
            return result.stdout, result.stderr, result.exit_code

    before = descriptors()
    with ThreadPoolExecutor(200) as pool:
        assert list(pool.map(episode, range(200))) == [(f"{number}1\n", "", 0) for number in range(200)]
    assert descriptors() <= before


def test_one_sandbox_runs_one_command_at_a_time(sandbox):
    command = "[ -e busy ] && echo both; touch busy; sleep 0.05; rm busy"
    with ThreadPoolExecutor(8) as pool:
        assert {(r.stdout, r.exit_code) for r in pool.map(sandbox.run, [command] * 10)} == {("", 0)}


def test_commands_end_with_a_killed_run():
    """The kernel ends the commands, although mtrl is killed and cannot clean up."""
    marker = f"10{os.getpid()}"
    code = f"from mtrl.sandbox.process import *; ProcessSandbox().run('setsid sleep {marker} & sleep {marker}', 900)"
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    deadline = time.monotonic() + 60
    while len(processes_with(f"sleep\0{marker}")) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.kill()
    process.wait()
    while processes_with(marker):
        assert time.monotonic() < deadline + 60
        time.sleep(0.05)


def test_commands_leave_no_orphans():
    """Without an init that reaps them, as in most containers, each orphan would stay as a zombie."""
    code = (
        "import ctypes, os\n"
        "from mtrl.sandbox.process import *\n"
        "ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: orphans come here\n"
        "with ProcessSandbox() as sandbox:\n"
        "    sandbox.run('sleep 100', timeout=0.3)\n"
        "    sandbox.run('(setsid sleep 100 &); exit 1')\n"
        "try: print(os.waitpid(-1, 0))\n"
        "except ChildProcessError: print('none')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.stdout == "none\n", done


def test_a_lack_of_descriptors_is_a_sandbox_error():
    """The sandbox raises an error while descriptors are missing, and works again afterwards."""
    code = (
        "import os, resource\n"
        "from mtrl.sandbox.process import *\n"
        "check_isolation()\n"
        "sandbox, hard = ProcessSandbox(), resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n"
        "before = len(os.listdir('/proc/self/fd'))\n"
        "for most in range(before - 1, before + 12):\n"
        "    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))\n"
        "    for call in (lambda: sandbox.run('true'), lambda: ProcessSandbox().close()):\n"
        "        try: call(); last = 'works'\n"
        "        except SandboxError as error: last = 'fails'\n"
        "        print(last)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))\n"
        "assert len(os.listdir('/proc/self/fd')) == before\n"
        "print(sandbox.run('echo again').stdout)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    lines = done.stdout.split()
    assert lines[:2] == ["fails", "fails"] and lines[-3:] == ["works", "works", "again"], done


# Unsuitable machines.


@pytest.fixture
def fresh_check(monkeypatch):
    """Reset the cached checks, as in a new process."""
    monkeypatch.setattr(isolation, "CHECKED", threading.Event())
    bubblewrap.find_programs.cache_clear()
    yield
    bubblewrap.find_programs.cache_clear()


def test_commands_are_isolated_on_this_machine(fresh_check):
    check_isolation()


def test_missing_bubblewrap_is_a_user_error(fresh_check, monkeypatch):
    monkeypatch.setattr(bubblewrap.shutil, "which", lambda name, path: None if name == "bwrap" else f"/usr/bin/{name}")
    for call in (check_isolation, ProcessSandbox):
        with pytest.raises(UserError, match="needs bwrap, .* apt-get install bubblewrap"):
            call()


def test_programs_outside_of_the_system_folders_are_not_used(fresh_check, monkeypatch, tmp_path):
    """The mount namespace contains /usr, but no home folder and no conda environment."""
    for name in bubblewrap.PACKAGES:
        (tmp_path / name).write_text("#!/bin/sh\nexit 1\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert not [path for path in bubblewrap.find_programs().values() if path.startswith(str(tmp_path))]
    bubblewrap.find_programs.cache_clear()
    monkeypatch.setattr(bubblewrap, "SYSTEM_PATH", "/nonexistent")
    with pytest.raises(UserError, match=f"apt-get install .*{tmp_path}/bwrap.* cannot be taken"):
        bubblewrap.find_programs()


def test_another_operating_system_is_a_user_error(fresh_check, monkeypatch):
    monkeypatch.setattr(bubblewrap.sys, "platform", "darwin")
    with pytest.raises(UserError, match="needs Linux namespaces, which darwin lacks"):
        ProcessSandbox()


def test_another_architecture_is_a_user_error(fresh_check, monkeypatch):
    monkeypatch.setattr(seccomp.platform, "machine", lambda: "riscv64")
    seccomp.denied_system_calls.cache_clear()
    with pytest.raises(UserError, match="riscv64; use x86_64 or aarch64"):
        ProcessSandbox()


def test_an_old_kernel_is_a_user_error(fresh_check, monkeypatch):
    monkeypatch.setattr(isolation.os, "uname", lambda: os.uname_result(("Linux", "h", "5.10.0-21-amd64", "", "x86_64")))
    with pytest.raises(UserError, match="needs Linux 5.14 or newer, and this is 5.10.0-21-amd64"):
        ProcessSandbox()


def test_forbidden_user_namespaces_are_a_user_error():
    """The sandbox runs in a user namespace that permits no further namespaces."""
    code = (
        "import sys\nfrom mtrl.errors import UserError\nfrom mtrl.sandbox.process import ProcessSandbox\n"
        "try: ProcessSandbox()\nexcept UserError as error: sys.exit(str(error))"
    )
    script = f'echo 0 > /proc/sys/user/max_user_namespaces && exec {sys.executable} -c "$1"'
    command = ["unshare", "--user", "--map-root-user", "bash", "-c", script, "bash", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1, done
    assert "cannot isolate" in done.stderr and "never run without" in done.stderr
    assert done.stderr.strip().endswith("sysctl -w user.max_user_namespaces=10000")


def test_the_library_of_another_python_is_a_user_error(fresh_check, monkeypatch):
    monkeypatch.setattr(isolation.sys, "version", "3.99.1 (of another library)")
    if bubblewrap.Path(sys.base_prefix).resolve().is_relative_to("/usr"):
        pytest.skip("this Python is one of the system, which is seen at its own path")
    with pytest.raises(UserError, match="it loads the library of Python 3.*; use one that is installed under /usr"):
        ProcessSandbox()


def test_the_check_reads_the_privileges_from_the_kernel(fresh_check, monkeypatch):
    """The check uses the report of the kernel, not the exit status of bubblewrap."""

    class Execution:
        def __init__(self, *_):
            pass

        def wait(self, timeout):
            return ProcessResult(0, Path("/proc/self/status").read_text(), "")

    monkeypatch.setattr(isolation, "Execution", Execution)
    with pytest.raises(UserError, match="cannot isolate commands here"):
        ProcessSandbox()


@pytest.mark.skipif(os.geteuid() != 0, reason="all the other tests already run without root")
def test_commands_are_isolated_without_root(tmp_path_factory):
    """The sandbox runs as the user `nobody`, with an interpreter that this user can execute."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in ("mtrl/__init__.py", "mtrl/errors.py", "mtrl/sandbox"):
            (copy / name).parent.mkdir(exist_ok=True)
            (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, copy / name)
        for path in (copy, *copy.rglob("*")):
            path.chmod(path.stat().st_mode | stat.S_IROTH | (stat.S_IXOTH if path.is_dir() else 0))
        code = (
            "from mtrl.sandbox.process import *\n"
            "with ProcessSandbox() as s:\n"
            "    s.write_file('a', 'text')\n"
            "    print(s.run('id -u; cat a; echo b > b; cat /etc/shadow').stdout, s.snapshot())\n"
            "    s.run('chmod 000 .')\n"
            "    print(s.read_file('b'), s.run('pwd').stdout)\n"
            "    bomb = '''import os, time\\nfor n in range(500):\\n"
            "  try:\\n    if not os.fork(): time.sleep(99)\\n  except OSError: print(n < 64); break'''\n"
            "    print(s.run(['python3', '-c', bomb]).stdout, s.run('sleep 100', timeout=0.3).killed_by)\n"
        )
        nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
        candidates = (sys.executable, "/usr/local/bin/python3", "/usr/bin/python3")
        works = [*nobody, "{}", "-c", "import sys; sys.exit(sys.version_info < (3, 11))"]
        for python in candidates:
            if not subprocess.run([part.format(python) for part in works], cwd="/", capture_output=True).returncode:
                break
        else:
            pytest.skip("the user nobody can execute no Python")
        done = subprocess.run([*nobody, python, "-c", code], cwd=copy, capture_output=True, text=True, env={})
    assert done.stdout == "1000\ntext {'a': b'text', 'b': b'b\\n'}\nb'b\\n' /workspace\n\nTrue\n time\n", done
