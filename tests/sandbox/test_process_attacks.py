"""Attacks from the process sandbox on the network, and on files, processes and the kernel of the host."""

import os
import socket
import subprocess
import sys
import tempfile
import threading
import uuid
from pathlib import Path

import pytest

from tests.sandbox.processes import python

ROOT = Path(__file__).parent.parent.parent


# The network.


def test_servers_of_the_host_are_out_of_reach(sandbox, tmp_path):
    name = f"mtrl-{uuid.uuid4().hex}"
    listeners = [socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)]
    listeners[1].bind(f"\0{name}")
    path = tempfile.mktemp(dir="/tmp")
    listeners[2].bind(path)
    port = listeners[0].getsockname()[1]
    attack = (
        "import socket, sys\n"
        "for family, address in ((socket.AF_INET, ('127.0.0.1', int(sys.argv[1]))),\n"
        "                        (socket.AF_UNIX, '\\0' + sys.argv[2]), (socket.AF_UNIX, sys.argv[3])):\n"
        "    try: socket.socket(family).connect(address); print('connected')\n"
        "    except OSError as error: print('refused')\n"
    )
    try:
        for listener in listeners:
            listener.listen()
            listener.settimeout(0)
        here = subprocess.run([sys.executable, "-c", attack, str(port), name, path], capture_output=True, text=True)
        assert here.stdout == "connected\n" * 3, "the attack works outside of the sandbox"
        for listener in listeners:
            listener.accept()[0].close()
        assert python(sandbox, attack, port, name, path).stdout == "refused\n" * 3
        assert sandbox.run(f"exec 3<>/dev/tcp/127.0.0.1/{port}").exit_code == 1
        for listener in listeners:
            with pytest.raises(BlockingIOError):
                listener.accept()
    finally:
        for listener in listeners:
            listener.close()
        os.unlink(path)


def test_only_unix_sockets_can_be_created(sandbox):
    """AF_VSOCK (40), which network namespaces do not cover, would reach the hypervisor."""
    attack = (
        "import socket\n"
        "for family in range(50):\n"
        "    for kind in (1, 2, 3, 5):\n"
        "        try: socket.socket(family, kind); print(family, end=' ')\n"
        "        except OSError: pass\n"
    )
    assert set(python(sandbox, attack).stdout.split()) == {"1"}, "only AF_UNIX"
    assert sandbox.run("tail -n +3 /proc/net/dev | cut -d: -f1").stdout.split() == ["lo"]
    assert sandbox.run("getent hosts example.com").exit_code != 0
    assert (
        python(sandbox, "import socket; a, b = socket.socketpair(); a.send(b'x'); print(b.recv(1))").stdout == "b'x'\n"
    )


# Reading.


def test_files_of_the_host_cannot_be_read(sandbox, tmp_path):
    secret = uuid.uuid4().hex
    (tmp_path / "secret").write_text(secret)
    for path in (
        *("/etc/shadow", "/etc/hostname", "/etc/machine-id", "/root", "/home", "/var", "/run", "/sys", "/boot", "/srv"),
        *("/data", "/oldroot", "/newroot", tmp_path, tmp_path / "secret", ROOT, Path.home(), __file__),
    ):
        result = sandbox.run(["ls", str(path)])
        assert result.exit_code == 2 and not result.stdout, path
    for root in (
        "/proc/1/root",
        "/proc/self/root",
        "/proc/1/cwd/..",
        "/proc/self/fd/0/..",
        "/dev/fd/../../..",
        "/../..",
    ):
        assert sandbox.run(f"cat {root}/{tmp_path}/secret {root}/etc/shadow").stdout == "", root
    found = sandbox.run(
        f"find / -name secret -path '*{tmp_path.name}*' 2>/dev/null; cut -d: -f1 /etc/passwd", timeout=120
    )
    assert found.stdout.split() == ["root", "sandbox"]


def test_environment_of_the_host_cannot_be_read(sandbox, monkeypatch):
    secret = uuid.uuid4().hex
    monkeypatch.setenv("MTRL_TEST_TOKEN", secret)
    assert secret in subprocess.run(["env"], capture_output=True, text=True).stdout
    result = sandbox.run("env; export -p; cat /proc/*/environ /proc/*/cmdline /proc/*/task/*/environ | tr '\\0' '\\n'")
    assert "HOME=/workspace" in result.stdout and not result.truncated
    assert secret not in result.stdout and "MTRL" not in result.stdout


def test_other_processes_cannot_be_seen(sandbox):
    result = sandbox.run("for f in /proc/[0-9]*/comm; do cat $f; done; ls -l /proc/1/fd /proc/self/fd")
    names, listing = result.stdout.split("/proc/1/fd:")
    assert set(names.split()) <= {"bash", "cat"}
    targets = {line.split(" -> ")[1].split(":")[0] for line in listing.splitlines() if " -> " in line}
    assert {target for target in targets if not target.startswith("/proc/")} == {"/dev/null", "pipe"}


def test_other_workspaces_cannot_be_reached(sandbox, bystander):
    secret = uuid.uuid4().hex
    bystander.write_file("secret", secret)
    bystander.run(f"echo {secret} > /tmp/secret; echo {secret} > /dev/shm/secret")
    thread = threading.Thread(target=bystander.run, args=(f"exec -a {secret} sleep 2",))
    thread.start()
    try:
        result = sandbox.run(
            "grep -rs . /workspace /tmp /dev/shm /data; cat /proc/*/cmdline; find /proc/[0-9]*/cwd/.. -name secret"
        )
        assert secret not in result.stdout.replace("\0", "")
        assert "/secret" not in result.stdout
    finally:
        thread.join()


# Writing.


def test_nothing_outside_can_be_written(sandbox):
    for folder in (
        "/",
        "/usr",
        "/usr/bin",
        "/etc",
        "/lib",
        "/opt",
        "/opt/python",
        "/dev",
        "/proc",
        "/proc/sys",
        "/proc/1",
    ):
        assert sandbox.run(["touch", f"{folder}/mtrl-attack"]).exit_code == 1, folder
        assert not Path(folder, "mtrl-attack").exists()
    for file in ("/usr/bin/env", "/etc/passwd", "/etc/ld.so.cache", "/bin/bash"):
        assert sandbox.run(f"echo x >> {file}; chmod 777 {file}; rm -f {file}; mv {file} /usr/x").exit_code == 1
    writable = sandbox.run(
        "find / -path /proc -prune -o -writable ! -type l -print 2>/dev/null", timeout=120
    ).stdout.split()
    assert set(writable) <= {
        *("/workspace", "/tmp", "/dev/shm", "/dev/ptmx", "/dev/pts", "/dev/pts/ptmx"),
        *("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty"),
    }


def test_kernel_settings_cannot_be_changed(sandbox):
    """Settings of the namespaces of the command cannot be changed either."""
    attempt = "find /proc -type f -not -path '/proc/[0-9]*' -writable -exec sh -c 'true >> $0 && echo $0' {} ';'"
    assert sandbox.run(f"{attempt} 2>/dev/null", timeout=120).stdout == ""
    assert sandbox.run("echo 1 > /proc/sysrq-trigger").exit_code == 1
    before = Path("/proc/sys/kernel/core_pattern").read_text()
    assert sandbox.run("echo '|/workspace/x' > /proc/sys/kernel/core_pattern").exit_code == 1
    assert sandbox.run("echo 99 > /proc/sys/user/max_user_namespaces").exit_code == 1
    assert sandbox.run("hostname pwned").exit_code == 1
    assert Path("/proc/sys/kernel/core_pattern").read_text() == before


def test_only_harmless_devices_exist(sandbox):
    assert set(sandbox.run("ls /dev").stdout.split()) <= {
        *("null", "zero", "full", "random", "urandom", "tty", "pts", "ptmx", "shm", "fd", "stdin", "stdout", "stderr"),
        *("core", "console"),
    }
    for command in ("mknod /workspace/d b 254 0", "mknod /tmp/m c 1 1", "head -c 1 /dev/mem", "echo > /dev/tty"):
        assert sandbox.run(command).exit_code == 1, command


def test_the_host_does_not_follow_links_of_commands(sandbox, tmp_path):
    """Commands create links; mtrl, perhaps as root, then reads and writes in the same folder."""
    secret = tmp_path / "secret"
    secret.write_text("secret")
    sandbox.run(
        f"ln -s {secret} file; ln -s {tmp_path} folder; ln -s / root; ln -s /proc/self/environ env; mkfifo pipe;"
        "ln -s .. up; ln -s loop loop; ln /etc/passwd hard; ln -s /proc/self/root/etc proc; mkdir real;"
        "printf x > real/x; ln -s real alias; python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"sock\")'"
    )
    for path in (
        *("file", "folder/secret", f"root{secret}", "root/etc/shadow", "env", "up/x", "loop", "hard", "proc/passwd"),
        *("alias/x", "pipe", "sock"),
    ):
        with pytest.raises(OSError) as raised:
            sandbox.read_file(path)
        assert str(tmp_path) not in str(raised.value)
    for path in ("folder/new", f"root{tmp_path}/new", "alias/new", "up/new", "loop/new"):
        with pytest.raises(OSError):
            sandbox.write_file(path, "pwned")
    snapshot = sandbox.snapshot()
    assert snapshot["real/x"] == b"x" and {key for key, value in snapshot.items() if value is not None} == {"real/x"}
    for path in ("file", "loop", "pipe", "sock", "env"):
        sandbox.write_file(path, "mine")
        assert sandbox.read_file(path) == b"mine", "links and pipes are replaced"
    with pytest.raises(OSError):
        sandbox.copy_in(tmp_path, "folder/below")
    assert secret.read_text() == "secret" and [path.name for path in tmp_path.iterdir()] == ["secret"]


def test_a_command_cannot_prevent_the_next_one(sandbox):
    """An episode in which no command starts would count as a failure of the sandbox."""
    for attack in ("chmod 000 /workspace /tmp /dev/shm", "chmod 500 .", "rm -rf /workspace /tmp /dev/shm"):
        assert sandbox.run(attack).killed_by is None
        assert sandbox.run("pwd; touch file").stdout == "/workspace\n", attack
        assert sandbox.snapshot() == {"file": b""}
        sandbox.run("chmod 700 /tmp /dev/shm; rm file")


def test_hard_links_do_not_reach_files_of_the_host(sandbox):
    assert sandbox.run("ln /etc/passwd p; ln /usr/bin/env e; ln /proc/self/status s; ls").stdout == ""
    sandbox.run("echo a > a; ln a b")
    sandbox.write_file("b", "new")
    assert sandbox.run("cat a b").stdout == "a\nnew", "the other name has the old content"


def test_a_hostile_tree_of_files_can_be_read(sandbox):
    sandbox.run("touch $'\\xff' $'new\\nline' ' '; mkdir closed; touch closed/f; chmod 0 closed; touch no; chmod 0 no")
    assert sandbox.snapshot() == {"?": b"", "new\nline": b"", " ": b"", "closed": None, "no": None}
    with pytest.raises(PermissionError):
        sandbox.read_file("no")
    sandbox.run("chmod 700 closed; for i in $(seq 200); do mkdir d; cd d; done; touch f")
    with pytest.raises(OSError, match="nested"):
        sandbox.snapshot()
    sandbox.run("rm -rf d; for i in 1 2 3 4; do truncate -s 4M $i; done")
    with pytest.raises(OSError, match="more than"):
        sandbox.snapshot()  # sparse files, which occupy no space but are read as 16 MB


# Power over other processes.


def test_processes_of_the_host_cannot_be_signalled(sandbox):
    with subprocess.Popen(["sleep", "300"]) as victim:
        attack = (
            "import os, signal, sys\n"
            "for pid in [int(sys.argv[1]), int(sys.argv[2]), *range(3, 5000)]:\n"
            "    for call in (os.kill, os.killpg):\n"
            "        if pid not in (os.getpid(), os.getpgrp()):\n"
            "            try: call(pid, signal.SIGKILL); print('killed', pid)\n"
            "            except OSError: pass\n"
            "os.kill(os.getppid(), signal.SIGKILL); os.kill(1, signal.SIGKILL); print('alive')\n"
            "os.kill(-1, signal.SIGKILL)\n"
        )
        result = python(sandbox, attack, victim.pid, os.getpid())
        assert result.stdout == "alive\n" and result.killed_by is None
        for command in ("kill -9 -1", "kill -9 $PPID; kill -9 0", "kill -STOP 1; kill -STOP $PPID; exit 5"):
            assert sandbox.run(command).killed_by is None
        assert victim.poll() is None
        victim.kill()


def test_system_calls_that_are_refused(sandbox):
    """The filter or missing capabilities refuse the calls, with ENOSYS (38) or EPERM (1)."""
    numbers = {"ptrace": 101, "process_vm_readv": 310, "mount": 165, "umount2": 166, "pivot_root": 155, "chroot": 161,
               "unshare": 272, "setns": 308, "open_tree": 428, "fsopen": 430, "clone3": 435, "memfd_create": 319,
               "memfd_secret": 447, "shmget": 29, "msgget": 68, "semget": 64, "mq_open": 240, "io_uring_setup": 425,
               "userfaultfd": 323, "add_key": 248, "keyctl": 250, "bpf": 321, "perf_event_open": 298,
               "open_by_handle_at": 304, "init_module": 175, "kexec_load": 246, "reboot": 169, "syslog": 103,
               "swapon": 167, "settimeofday": 164, "sethostname": 170, "iopl": 172,
               "clone(NEWUSER)": 56, "x32 getpid": 0x40000000 + 39}  # fmt: skip
    if os.uname().machine != "x86_64":
        pytest.skip("the numbers are those of x86_64")
    attack = (
        "import ctypes, os, sys\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "for number in map(int, sys.argv[1:]):\n"
        "    first = 0x10000011 if number == 56 else 0x10000000 if number == 272 else 0\n"
        "    first = 16 if number == 101 else ctypes.c_char_p(b'/tmp') if number in (161, 165) else first\n"
        "    done = libc.syscall(number, first, 0, 0, 0, 0)\n"
        "    print(number, done, ctypes.get_errno())\n"
    )
    result = python(sandbox, attack, *numbers.values())
    results = {
        int(number): (int(done), int(error)) for number, done, error in map(str.split, result.stdout.splitlines())
    }
    assert results.keys() == set(numbers.values()), result
    assert {
        name for name, number in numbers.items() if results[number][0] != -1 or results[number][1] not in (1, 38)
    } == set()


def test_privileges_cannot_be_raised(sandbox):
    for command in (
        *("unshare -Ur true", "unshare -m true", "mount -t tmpfs x /tmp", "umount /proc", "chroot / true", "su -c id"),
        *("mount --bind / /workspace", "nsenter -t 1 -m true", "setpriv --reuid 0 true", "chown 0 /workspace"),
        *("bwrap --ro-bind / / true", "date -s 2000-01-01", "dmesg", "losetup -f", "chgrp 0 /tmp", "swapoff -a"),
        *("python3 -c 'import os; os.setuid(0)'", "python3 -c 'import os; os.setgroups([0])'"),
    ):
        result = sandbox.run(command)
        assert result.exit_code != 0 and result.killed_by is None, command
    sandbox.run("cp /usr/bin/id /workspace/id; chmod 6755 /workspace/id")
    assert sandbox.run(
        "/workspace/id -u; find / -perm -4000 -type f -exec {} --version ';' >/dev/null 2>&1; id -u"
    ).stdout == ("1000\n1000\n")
    status = sandbox.run("grep -E 'Cap|NoNew|Seccomp:' /proc/self/status").stdout.split()
    assert set(status[1:10:2]) == {"0" * 16} and status[10:] == ["NoNewPrivs:", "1", "Seccomp:", "2"]
