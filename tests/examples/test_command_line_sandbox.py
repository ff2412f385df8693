"""The sandbox for agents of the command line, without an agent."""

import asyncio
import os
import subprocess

import pytest

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


def test_the_gateway_is_reached_from_a_long_temporary_folder(monkeypatch, tmp_path):
    long = tmp_path / ("d" * 100)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    ask = "import socket; print(socket.create_connection(('127.0.0.1', 8000)).recv(9).decode())"

    async def greet(reader, writer):
        writer.write(b"hello")
        writer.close()

    async def episode():
        async with await asyncio.start_server(greet, "127.0.0.1", 0) as gateway:
            port = gateway.sockets[0].getsockname()[1]
            async with CommandLineSandbox([], f"http://127.0.0.1:{port}", 2**20) as sandbox:
                return await sandbox.run(["python3", "-c", ask], {}), sandbox.output

    assert asyncio.run(episode()) == (0, b"hello\n")
    assert list(long.iterdir()) == []


def test_a_sandbox_that_cannot_start_leaves_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    async def refuse(*_):
        raise OSError("too many open files")

    monkeypatch.setattr(asyncio, "start_unix_server", refuse)

    async def episode():
        opened = len(os.listdir("/proc/self/fd"))
        with pytest.raises(OSError, match="too many"):
            async with CommandLineSandbox([], "http://127.0.0.1:9", 2**20):
                pass
        return len(os.listdir("/proc/self/fd")) - opened

    assert asyncio.run(episode()) == 0
    assert list(tmp_path.iterdir()) == []
