"""Calls to several workers of a vLLM server stay in step after errors, with a stand-in for vLLM's executor. The real
server: tests/engines/real/vllm/test_vllm_workers.py."""

import pickle
import sys
from collections import deque
from types import ModuleType, SimpleNamespace

import pytest

from mtrl.engines.vllm.answers import read_all_answers


class Worker:
    def __init__(self, rank):
        self.rank = rank

    def update_weights(self, refusing):
        if self.rank in refusing:
            raise ValueError(f"refused by {self.rank}")
        return f"updated {self.rank}"

    def compile_or_warm_up_model(self, refusing):
        return self.update_weights(refusing)


@pytest.fixture
def executor(monkeypatch):
    """An executor with three workers, whose class is patched twice, as plugins may be loaded twice."""

    class MultiprocExecutor:
        """Collects answers as that of vLLM 0.32: all workers answer into queues of their own."""

        def __init__(self):
            self.vllm_config = SimpleNamespace(weight_transfer_config=SimpleNamespace(backend="mtrl"))
            self.workers, self.queues = [Worker(rank) for rank in range(3)], [deque() for _ in range(3)]

        def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
            call = method if isinstance(method, str) else pickle.loads(pickle.dumps(method))
            for worker, queue in zip(self.workers, self.queues, strict=True):
                try:
                    call_here = getattr(worker, call) if isinstance(call, str) else lambda *a, w=worker: call(w, *a)
                    queue.append((True, call_here(*args, **(kwargs or {}))))
                except Exception as error:
                    queue.append((False, str(error)))
            found = []
            for queue in self.queues:
                succeeded, answer = queue.popleft()
                if not succeeded:
                    raise RuntimeError(answer)
                found.append(answer)
            return found

    module = ModuleType("vllm.v1.executor.multiproc_executor")
    module.MultiprocExecutor = MultiprocExecutor
    for name in ("vllm", "vllm.v1", "vllm.v1.executor"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    read_all_answers()
    read_all_answers()
    return MultiprocExecutor()


@pytest.mark.parametrize("refusing", [(0,), (1,), (2,), (1, 2), (0, 1, 2)])
def test_a_call_after_a_failed_one_gets_its_own_answers(executor, refusing):
    with pytest.raises(RuntimeError, match=f"^worker {refusing[0]} of 3 failed: refused by {refusing[0]}$"):
        executor.collective_rpc("update_weights", kwargs={"refusing": refusing})
    assert not any(executor.queues)
    assert executor.collective_rpc("update_weights", None, ((),)) == ["updated 0", "updated 1", "updated 2"]


@pytest.mark.parametrize(
    ("method", "config"),
    [
        ("compile_or_warm_up_model", SimpleNamespace(backend="mtrl")),  # a worker may wait for the failed one
        ("update_weights", SimpleNamespace(backend="nccl")),
        ("update_weights", None),
    ],
)
def test_other_calls_and_other_servers_are_left_to_vllm(executor, method, config):
    executor.vllm_config.weight_transfer_config = config
    with pytest.raises(RuntimeError, match="^refused by 1$"):
        executor.collective_rpc(method, args=((1,),))
