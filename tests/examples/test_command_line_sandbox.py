"""The sandbox for agents of the command line, without an agent."""

import asyncio
import subprocess

from examples.agents.command_line_sandbox import CommandLineSandbox


def test_nothing_is_left_of_hostile_folders(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    attack = "mkdir -p d/e; touch d/e/f; chmod 000 d; mkdir -p $(printf 'x/%.0s' {1..2000})"

    async def episode():
        async with CommandLineSandbox([], "http://127.0.0.1:9", 2**20) as sandbox:
            return await sandbox.run(["bash", "-c", attack], {}), [entry.name[:9] for entry in tmp_path.iterdir()]

    try:
        assert asyncio.run(episode()) == (0, ["mtrl-cli-"])
        assert list(tmp_path.iterdir()) == []
    finally:  # pytest cannot remove such a folder either
        subprocess.run(["rm", "-rf", "--", *tmp_path.iterdir()], check=True)
