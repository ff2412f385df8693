"""Hostile commands in process sandboxes: nothing outside changes, limits hold, and the next command works."""

import subprocess
import time

import pytest
import shell_attacks
from attack_kit import ROOT

from mtrl.sandbox.process import ProcessLimits, ProcessSandbox
from tests.peak import Peak

LIMITS = ProcessLimits(
    seconds=60.0,
    cpu_seconds=3,
    memory_bytes=192 * 2**20,
    processes=24,
    file_bytes=2 * 2**20,
    workspace_bytes=4 * 2**20,
    workspace_files=300,
    output_bytes=2**14,
    printed_bytes=2 * 2**20,
)
MARGIN_SECONDS = 60.0
QUICK, GREEDY = shell_attacks.quick(), shell_attacks.greedy()


@pytest.fixture(scope="module")
def victim():
    """A process of the same user outside of the sandbox, which must not end."""
    with subprocess.Popen(["sleep", "3600"]) as victim:
        yield victim
        assert victim.poll() is None
        victim.kill()


def fill(text, outside, victim):
    more = {"seconds": outside.seconds, "root": str(ROOT), "port": str(outside.port), "pid": str(victim.pid)}
    return outside.fill(text, **more)


def attack_all(attacks, seconds, outside, victim):
    """Run the attacks in one sandbox, and check after each that the sandbox and the outside are intact."""
    with ProcessSandbox(LIMITS) as sandbox:
        for attack in attacks:
            before = time.monotonic()
            result = sandbox.run(fill(attack.text, outside, victim), timeout=seconds)
            assert time.monotonic() - before < seconds + MARGIN_SECONDS, attack.text
            assert len(result.stdout) <= LIMITS.output_bytes and len(result.stderr) <= LIMITS.output_bytes
            assert outside.secret not in result.stdout + result.stderr, attack.text
            assert "connected" not in result.stdout, attack.text
            (result.stdout + result.stderr).encode()
            clean = "chmod -R u+rwx /workspace /tmp /dev/shm; find /workspace /tmp /dev/shm -mindepth 1 -delete"
            again = sandbox.run(
                f"({clean}) >/dev/null 2>&1; echo ok > ok && cat ok && id -u && ps >/dev/null 2>&1; true"
            )
            assert again.stdout.startswith("ok\n1000\n"), (attack.text, again)
            assert victim.poll() is None, attack.text
            outside.check()


def family_of(attacks, family):
    return [attack for attack in attacks if attack.family == family]


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted({attack.family for attack in QUICK}))
def test_hostile_commands_have_no_effect_outside(family, outside, victim):
    attack_all(family_of(QUICK, family), 1.5, outside, victim)


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted({attack.family for attack in GREEDY}))
def test_greedy_commands_are_limited(family, outside, victim):
    with Peak() as peak:
        attack_all(family_of(GREEDY, family), 0.7, outside, victim)
    assert peak.processes < LIMITS.processes + 20, "including those of bubblewrap"
    assert peak.bytes < 6 * LIMITS.memory_bytes, "memory is checked 10 times a second"
