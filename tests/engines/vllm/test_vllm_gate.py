"""The token check of a vLLM server, and its unpickler. The real server: tests/engines/real/vllm."""

import asyncio
import base64
import io
import os
import pickle
from multiprocessing.reduction import ForkingPickler

import pytest
import torch

from mtrl.engines.vllm import gate
from mtrl.engines.vllm.payload import unpack


@pytest.fixture
def guarded(monkeypatch):
    """Function `guarded(app)` that puts an application behind a gate with the token `sesame`."""
    monkeypatch.setattr(gate, "expected_token", None)
    monkeypatch.setenv(gate.TOKEN, "sesame")
    gate.take_token()
    return gate.TokenGate


def ask(app, *shown, kind="http"):
    """Return the messages that are sent for a request with these `Authorization` headers."""
    sent = []

    async def send(message):
        sent.append(message)

    scope = {"type": kind, "path": "/", "method": "GET", "headers": [(b"authorization", value) for value in shown]}
    asyncio.run(app(scope, None, send))
    return sent


async def hello(scope, receive, send):
    await gate.answer(send, 200, "hello")


async def failing(scope, receive, send):
    raise RuntimeError("a group is gone")


def test_the_token_is_removed_from_the_environment(guarded):
    assert gate.TOKEN not in os.environ
    with pytest.raises(SystemExit, match=gate.TOKEN):
        gate.take_token()


@pytest.mark.parametrize(
    "shown",
    [(), (b"",), (b"sesame",), (b"Bearer ",), (b"Bearer sesam",), (b"Bearer sesamee",), (b"bearer sesame ",),
     (b"Bearer sesame", b"Bearer sesame"), (b"Bearer other", b"Bearer sesame"), ("Bearer sésame".encode(),)],
)  # fmt: skip
def test_requests_without_the_token_are_refused(guarded, shown):
    assert ask(guarded(hello), *shown)[0]["status"] == 401
    assert ask(guarded(hello), *shown, kind="websocket") == [{"type": "websocket.close", "code": 1008}]


def test_requests_with_the_token_pass(guarded):
    assert ask(guarded(hello), b"Bearer sesame")[0]["status"] == 200
    assert ask(guarded(hello), kind="lifespan")[0]["status"] == 200


def test_uncaught_errors_are_answered_as_json(guarded):
    start, body = ask(guarded(failing), b"Bearer sesame")
    assert start["status"] == 500 and b"a group is gone" in body["body"]


def test_a_gate_requires_a_token(monkeypatch):
    monkeypatch.setattr(gate, "expected_token", None)
    with pytest.raises(RuntimeError, match="no token"):
        gate.TokenGate(hello)


def packed(pickler, value) -> str:
    buffer = io.BytesIO()
    pickler(buffer).dump(value)
    return base64.b64encode(buffer.getvalue()).decode()


def test_shared_tensors_are_unpacked_unchanged():
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        tensors = {"a": torch.randn(3, 4).share_memory_(), "b": torch.randn(5).bfloat16().share_memory_()[1:]}
        found = unpack(packed(ForkingPickler, list(tensors.items())))
    finally:
        torch.multiprocessing.set_sharing_strategy(before)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) and found[name].dtype == tensors[name].dtype for name in tensors)


class Evil:
    def __reduce__(self):
        return os.system, ("false",)


@pytest.mark.parametrize(
    "payload",
    ["", "*", "bm90aGluZw==", packed(pickle.Pickler, [("a", Evil())]), packed(pickle.Pickler, [("a", 1)]),
     packed(pickle.Pickler, 7), packed(pickle.Pickler, [("a", torch.load)]), packed(pickle.Pickler, [eval])],
)  # fmt: skip
def test_other_pickles_are_refused(payload):
    with pytest.raises(ValueError, match="not a payload of shared tensors"):
        unpack(payload)
