"""The cases of servers in `mtrl doctor --self-test`, with real engines."""

import pytest

from mtrl.doctor.self_test import random_model, servers
from mtrl.doctor.self_test.bench import QUICK, Bench
from tests.engines.real.installed import engine_python

pytestmark = [pytest.mark.slow, pytest.mark.rare]


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_a_server_samples_before_and_after_an_update(name, tmp_path):
    engine_python(name)
    bench = Bench(str(tmp_path / "model"), QUICK, 0, str(tmp_path))
    random_model.build(bench)
    found = getattr(servers, name)(bench)
    assert found.passed, found
    assert found.figures["gap_mean_after_update_nats"] < 1e-3
