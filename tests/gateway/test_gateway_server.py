"""Start and end of a gateway: inside a run, on several event loops one after the other, and as a program."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from live_gateway import HELLO, LIMITS, HeldEngine, Live

from mtrl.command.program import run_program
from mtrl.engines.base import EngineLostError, SamplingParams
from mtrl.engines.scripted import ScriptedEngine
from mtrl.errors import UserError
from mtrl.gateway import session_manager as manager_module
from mtrl.gateway.__main__ import KEY_VARIABLE, GatewaySettings, admin_key, main, make_output_folder, trajectory_file
from mtrl.gateway.server import Gateway
from mtrl.gateway.session_manager import SessionManager, names_in
from mtrl.record.library import find_runs
from mtrl.record.run_dir import RunDir
from mtrl.rollout.rollouts import stream_seed
from mtrl.types import StopReason, read_trajectories
from mtrl.view.__main__ import main as main_of_the_viewer
from tests import forked

ROOT = Path(__file__).parent.parent.parent
KEY = "an-admin-key-of-tests"


@pytest.fixture
def make_gateway(tiny_codec):
    def make_gateway(**options):
        engine = ScriptedEngine(lambda name, turn: f"{name} {turn}", tiny_codec.tokenizer)
        return Gateway(engine, tiny_codec, LIMITS, **options)

    return make_gateway


async def healthy(gateway):
    async with httpx.AsyncClient(trust_env=False) as client:
        return (await client.get(f"{gateway.url}/health")).status_code == 200


class TestLife:
    def test_the_address_stays_the_same_on_consecutive_event_loops(self, make_gateway):
        gateway, urls = make_gateway(), []

        async def use():
            await gateway.start()
            await gateway.start()
            assert await healthy(gateway)
            urls.append(gateway.url)

        for _ in range(3):
            asyncio.run(use())
        assert len(set(urls)) == 1
        asyncio.run(gateway.close())
        asyncio.run(gateway.close())
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{urls[0]}/health", trust_env=False)

    def test_a_closed_gateway_can_start_again(self, make_gateway):
        async def use():
            gateway = make_gateway()
            for _ in range(2):
                await gateway.start()
                assert await healthy(gateway)
                await gateway.close()

        asyncio.run(use())

    def test_the_gateway_listens_only_on_loopback(self, make_gateway):
        async def use():
            gateway = make_gateway()
            await gateway.start()
            assert gateway.url.startswith("http://127.0.0.1:")
            await gateway.close()

        asyncio.run(use())

    def test_signal_handlers_are_unchanged(self, make_gateway):
        async def use():
            gateway = make_gateway()
            await gateway.start()
            assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
            await gateway.close()

        def mine(*_):
            raise AssertionError

        old = signal.signal(signal.SIGTERM, mine)
        try:
            before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
            # Within `asyncio.run` the runner handles SIGINT.
            with asyncio.Runner() as runner:
                runner.get_loop().run_until_complete(use())
            assert signal.getsignal(signal.SIGTERM) is mine
        finally:
            signal.signal(signal.SIGTERM, old)

    def test_a_taken_address_is_reported(self, make_gateway):
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            words = f"generator.agent.host=127.0.0.1 generator.agent.port={port} is not available"
            with pytest.raises(UserError, match=words):
                asyncio.run(make_gateway(port=port).start())

    def test_closing_aborts_running_calls(self, tiny_codec):
        engine = HeldEngine(lambda name, turn: "never", tiny_codec.tokenizer)

        async def use():
            gateway = Gateway(engine, tiny_codec, LIMITS)
            await gateway.start()
            session = gateway.open("a", SamplingParams())
            async with httpx.AsyncClient(trust_env=False) as client:
                body = {"model": "m", "messages": HELLO}
                asking = asyncio.create_task(client.post(f"{gateway.base_url(session)}/chat/completions", json=body))
                while not engine.requested:
                    await asyncio.sleep(0.01)
                await gateway.close()
                done, _ = await asyncio.wait({asking}, timeout=10)
                assert asking in done
                assert asking.exception() is not None or asking.result().status_code == 410
            assert engine.released["a"].is_set()
            assert session.turns() == []

        asyncio.run(asyncio.wait_for(use(), 20))

    def test_open_sessions_need_different_names(self, tiny_codec):
        with Live(tiny_codec) as live:
            session = live.open("a")
            with pytest.raises(ValueError, match="open trajectory a"):
                live.open("a")
            for _ in range(2):
                live.close(session)
            assert live.open("a").token != session.token


class TestSessionManager:
    @pytest.fixture
    def manager(self, tiny_codec, tmp_path, monkeypatch):
        """A gateway with an admin, whose trajectories are written to a file."""
        monkeypatch.setattr("mtrl.gateway.session_manager.SECONDS_FOR_REWARD", 0.3)
        live = Live(tiny_codec)
        sampling = SamplingParams(max_generate_length=100, stop_token_ids=tiny_codec.stop_token_ids)
        noted = []
        manager = SessionManager(live.gateway, sampling, 3, tmp_path / "t.jsonl", seconds=20, note=noted.append)
        live.gateway.allow_admin(KEY, manager.open)
        with live:
            manager.noted = noted
            manager.live = live
            yield manager
            live.run(manager.close())

    def finished(self, manager):
        manager.live.run(asyncio.wait_for(all_written(manager), 20))
        return list(read_trajectories(manager.path))

    def test_a_complete_trajectory_is_written(self, manager):
        live = manager.live
        status, _, message = live.ask("POST", "/trajectories", {"id": "mine"}, KEY)
        assert (status, message["id"]) == (200, "mine")
        client_path = message["base_url"].removeprefix(live.gateway.url)
        for _ in range(2):
            assert live.ask("POST", f"{client_path}/chat/completions", {"messages": HELLO})[0] == 200
        about = {"TrajectoryId": "mine"}
        assert live.ask("POST", "/complete-rollout", {**about, "Status": "ready"}, message["token"])[0] == 200
        assert live.ask("POST", "/update-reward", {**about, "Rewards": [0.5]}, message["token"])[0] == 200
        (trajectory,) = self.finished(manager)
        assert (trajectory.task_id, trajectory.stop_reason) == ("mine", StopReason.DONE)
        assert trajectory.trainable
        assert trajectory.rewards == [0.0, 0.5]
        assert [turn.text for turn in trajectory.turns] == ["mine 0", "mine 1"]

    def test_the_first_call_of_the_admin_opens_the_trajectory(self, manager):
        live = manager.live
        ask = {"messages": HELLO}
        header = [("X-Mtrl-Trajectory-Id", "by header")]
        assert live.ask("POST", "/v1/chat/completions", ask, KEY, header)[0] == 200
        assert live.ask("POST", "/trajectories/by%2Fpath/v1/chat/completions", ask, KEY)[0] == 200
        assert live.ask("POST", "/trajectories/by%2Fpath/v1/chat/completions", ask, KEY)[0] == 200
        assert live.ask("POST", "/v1/chat/completions", ask, KEY)[0] == 400
        live.run(manager.close())
        found = {t.task_id: t for t in read_trajectories(manager.path)}
        assert {name: len(t.turns) for name, t in found.items()} == {"by header": 1, "by/path": 2}
        assert {t.stop_reason for t in found.values()} == {StopReason.ABORTED}
        assert not any(t.trainable for t in found.values())

    def test_late_calls_open_no_second_trajectory(self, manager):
        """Otherwise calls after the end would be a further trajectory."""
        live, naming = manager.live, [("X-Mtrl-Trajectory-Id", "mine")]
        assert live.ask("POST", "/v1/chat/completions", {"messages": HELLO}, KEY, naming)[0] == 200
        assert live.ask("POST", "/update-reward", {"TrajectoryId": "mine", "Rewards": [0.5]}, KEY)[0] == 200
        assert live.ask("POST", "/complete-rollout", {"TrajectoryId": "mine"}, KEY)[0] == 200
        self.finished(manager)
        assert live.ask("POST", "/v1/chat/completions", {"messages": HELLO}, KEY, naming)[0] == 410
        assert live.ask("POST", "/update-reward", {"TrajectoryId": "mine", "Rewards": [1]}, KEY)[0] == 404
        assert live.ask("POST", "/complete-rollout", {"Status": "ready"}, KEY, naming)[0] == 404
        status, _, body = live.ask("POST", "/trajectories", {"id": "mine"}, KEY)
        assert (status, body["error"]["message"]) == (
            409,
            "the id mine belongs to another trajectory; choose a new one",
        )
        live.run(manager.close())
        assert [trajectory.reward for trajectory in read_trajectories(manager.path)] == [0.5]

    def test_names_stay_used_after_a_restart(self, manager, tiny_codec):
        live, naming = manager.live, [("X-Mtrl-Trajectory-Id", "mine")]
        assert live.ask("POST", "/v1/chat/completions", {"messages": HELLO}, KEY, naming)[0] == 200
        live.run(manager.close())
        with manager.path.open("a") as file:
            file.write('{"task_id": "cut')
        later = Live(tiny_codec)
        again = SessionManager(later.gateway, manager.sampling, 3, manager.path, seconds=20, note=print)
        later.gateway.allow_admin(KEY, again.open, names_in(manager.path))
        with later:
            assert later.ask("POST", "/v1/chat/completions", {"messages": HELLO}, KEY, naming)[0] == 410
            assert later.ask("POST", "/trajectories", {"id": "mine"}, KEY)[0] == 409
            assert later.ask("POST", "/trajectories", {"id": "another"}, KEY)[0] == 200
            later.run(again.close())
        assert names_in(manager.path) == {"mine"} and names_in(manager.path.parent / "none") == set()

    def test_a_name_stays_used_after_its_token_is_dropped(self, manager, monkeypatch):
        monkeypatch.setattr("mtrl.gateway.auth.MAX_FINISHED", 1)
        for name in ("one", "two"):
            session = manager.gateway.open(name, manager.sampling)
            manager.gateway.close_session(session)
        assert manager.live.ask("POST", "/trajectories", {"id": "one"}, KEY)[0] == 409

    def test_a_report_opens_no_trajectory(self, manager):
        for route in ("/update-reward", "/complete-rollout"):
            body = {"TrajectoryId": "never seen", "Rewards": [1.0]}
            status, _, answer = manager.live.ask("POST", route, body, KEY)
            assert (status, answer["error"]["code"]) == (404, "trajectory_not_found")
        assert list(manager.gateway.registry) == []

    def test_a_failed_write_is_reported_and_leaves_no_partial_line(self, manager, monkeypatch):
        """The disk is full in the middle of a line."""
        live, real = manager.live, manager_module.write_jsonl

        def write_half(path, trajectories):
            path.open("a").write('{"task_id": "lo')
            raise OSError(28, "No space left on device")

        for name in ("kept", "lost", "kept too"):
            monkeypatch.setattr(manager_module, "write_jsonl", write_half if name == "lost" else real)
            message = live.ask("POST", "/trajectories", {"id": name}, KEY)[2]
            assert live.ask("POST", "/v1/chat/completions", {"messages": HELLO}, message["token"])[0] == 200
            live.run(manager.close())
        assert [trajectory.task_id for trajectory in read_trajectories(manager.path)] == ["kept", "kept too"]
        assert (manager.written, manager.unwritten) == (2, 1)
        assert f"lost: lost, because {manager.path} cannot be written (No space left on device)" in manager.noted

    def test_a_reported_error_that_no_file_can_hold_loses_no_trajectory(self, manager):
        live, naming = manager.live, [("X-Mtrl-Trajectory-Id", "mine")]
        assert live.ask("POST", "/v1/chat/completions", {"messages": HELLO}, KEY, naming)[0] == 200
        report = {"TrajectoryId": "mine", "Status": "failed", "Error": "no \ud800"}
        assert live.ask("POST", "/complete-rollout", report, KEY)[0] == 200
        (trajectory,) = self.finished(manager)
        assert (trajectory.task_id, trajectory.error) == ("mine", "no ?")
        assert (trajectory.stop_reason, trajectory.trainable) == (StopReason.ENV_ERROR, False)

    def test_a_lost_engine_ends_the_gateway(self, manager, monkeypatch):
        async def generate(*_):
            raise EngineLostError("the servers are gone")

        monkeypatch.setattr(manager.live.engine, "generate", generate)
        naming = [("X-Mtrl-Trajectory-Id", "mine")]
        assert manager.live.ask("POST", "/v1/chat/completions", {"messages": HELLO}, KEY, naming)[0] == 503
        manager.live.run(asyncio.wait_for(manager.shutdown.wait(), 20))
        assert "servers are gone" in str(manager.failure)

    def test_only_the_admin_opens_trajectories(self, manager):
        live = manager.live
        session = live.ask("POST", "/trajectories", {}, KEY)[2]
        for token in (None, "wrong", session["token"]):
            assert live.ask("POST", "/trajectories", {"id": "x"}, token)[0] == 401
        assert (
            live.ask("POST", "/v1/chat/completions", {"messages": HELLO}, "wrong", [("X-Mtrl-Trajectory-Id", "x")])[0]
            == 401
        )
        assert live.ask("POST", "/trajectories", {"id": session["id"]}, KEY)[0] == 409
        assert live.ask("POST", "/trajectories", {"id": "x" * 201}, KEY)[0] == 400
        assert live.ask("POST", "/trajectories", [], KEY)[0] == 400

    def test_a_trajectory_that_takes_too_long_is_written(self, manager):
        manager.seconds = 0.2
        message = manager.live.ask("POST", "/trajectories", {"id": "slow"}, KEY)[2]
        assert manager.live.ask("POST", "/v1/chat/completions", {"messages": HELLO}, message["token"])[0] == 200
        (trajectory,) = self.finished(manager)
        assert (trajectory.stop_reason, trajectory.trainable) == (StopReason.TIMEOUT, False)

    def test_the_name_seeds_the_random_stream(self, manager):
        session = manager.live.call(manager.open, "x")
        assert session.sampling.seed == stream_seed(3, "x", 0)


async def all_written(manager):
    while list(manager.gateway.registry):  # a trajectory is written before the event loop goes on
        await asyncio.sleep(0.01)


class TestProgram:
    def test_settings_are_parsed(self):
        settings, overrides = GatewaySettings.of(
            ["gateway.port=80", "seed=3", "+gateway.seconds=1.5", "gateway.model=x=y"]
        )
        assert (settings.port, settings.seconds, settings.model, overrides) == (80, 1.5, "x=y", ["seed=3"])

    @pytest.mark.parametrize(
        ("word", "sentence"),
        [
            ("gateway.prot=1", "gateway=prot is not known; did you mean port"),
            ("gateway.port=x", "gateway.port=x must be an integer of at least 0"),
            ("gateway.=3", "gateway.=3 names no setting; gateway has model, out"),
            ("gateway.max_requests_per_second=0", "must be a number above 0"),
            ("gateway.max_calls=0", "gateway.max_calls=0 must be an integer above 0"),
            ("gateway.seconds=nan", "gateway.seconds=nan must be a number above 0"),
        ],
    )
    def test_invalid_settings_are_refused(self, word, sentence):
        with pytest.raises(UserError, match=sentence):
            GatewaySettings.of([word])

    def test_a_public_address_needs_a_chosen_key(self, monkeypatch):
        monkeypatch.delenv(KEY_VARIABLE, raising=False)
        with pytest.raises(UserError, match=f"0.0.0.0 can be reached from other machines; set {KEY_VARIABLE}"):
            admin_key("0.0.0.0")
        assert admin_key("127.0.0.1") != admin_key("127.0.0.1")
        for bad in ("short", "with spaces in between", "né" * 10):
            monkeypatch.setenv(KEY_VARIABLE, bad)
            with pytest.raises(UserError, match="at least 16"):
                admin_key("127.0.0.1")
        monkeypatch.setenv(KEY_VARIABLE, KEY)
        assert admin_key("0.0.0.0") == KEY

    def test_the_output_folder(self, tmp_path):
        out = make_output_folder(GatewaySettings(out=str(tmp_path / "a" / "b")))
        assert trajectory_file(out).is_file()
        assert list(find_runs(tmp_path)) == [Path(out)]
        with pytest.raises(UserError, match="gateway.out=.*name another folder"):
            make_output_folder(GatewaySettings(out=str(trajectory_file(out))))

    @pytest.fixture
    def model(self, make_tiny_model, tiny_tokenizer, tmp_path):
        from mtrl.models.tiny import save

        save(make_tiny_model(), tiny_tokenizer, tmp_path / "model")
        return tmp_path / "model"

    @pytest.mark.slow
    def test_the_program_serves_until_ctrl_c(self, model, tmp_path):
        """A model folder behind the API until Ctrl-C, with two trajectories: one completed, one left behind."""
        out = RunDir(tmp_path / "out")
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", KEY_VARIABLE: KEY}
        words = [f"gateway.model={model}", f"gateway.out={out}", "generator.sampling_params.max_generate_length=5"]
        command = [sys.executable, "-m", "mtrl.gateway", *words]
        with forked.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=tmp_path) as process:
            try:
                message = process.stdout.readline()
                url = message.partition(" is at ")[2].partition(",")[0]
                assert f"the admin's key is that of {KEY_VARIABLE}" in message
                with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {KEY}"}, timeout=60) as client:
                    for name in ("done", "left"):
                        naming = {"X-Mtrl-Trajectory-Id": name}
                        answer = client.post("/chat/completions", json={"messages": HELLO}, headers=naming)
                        assert answer.status_code == 200, answer.text
                    root = url.removesuffix("/v1")
                    naming = {"X-Mtrl-Trajectory-Id": "done"}
                    client.post(f"{root}/update-reward", json={"Rewards": [1.0]}, headers=naming).raise_for_status()
                    client.post(f"{root}/complete-rollout", json={"Status": "ready"}, headers=naming)
                process.send_signal(signal.SIGINT)
                rest = process.stdout.read()
                assert process.wait(30) == 0, rest
                assert KEY not in message + rest
                assert rest.endswith(
                    f"trajectories written: 2, to {trajectory_file(out)}; mtrl view {out} shows them\n"
                )
            finally:
                process.kill()
        found = {t.task_id: t for t in read_trajectories(trajectory_file(out))}
        assert (found["done"].stop_reason, found["done"].reward) == (StopReason.DONE, 1.0)
        assert found["left"].stop_reason == StopReason.ABORTED
        assert all(1 <= len(t.turns[0].action_ids) <= 5 for t in found.values())
        assert all(value < 0 for t in found.values() for value in t.turns[0].action_logprobs)
        assert json.loads(trajectory_file(out).read_text().splitlines()[0])["task_id"] == "done"
        assert main_of_the_viewer([str(out), "--export", str(tmp_path / "page.html")]) == 0
        page = (tmp_path / "page.html").read_text()
        assert all(f'"{name}"' in page for name in found)

    @pytest.mark.parametrize(
        ("word", "sentence"),
        [
            ("gateway.model=m@http://127.0.0.1:1/v1", "returns no token ids"),
            ("gateway.model=nowhere", "gateway.model=nowhere does not exist"),
            ("generator.local.deterministic=true", "wait for each other"),
            ("gateway.host=0.0.0.0", "can be reached from other machines"),
            ("gateway.port=70000", "gateway.port=70000 does not exist"),
        ],
    )
    def test_unusable_models_are_refused(self, word, sentence, tmp_path, monkeypatch):
        monkeypatch.delenv(KEY_VARIABLE, raising=False)
        with pytest.raises(UserError, match=sentence):
            main([word, f"gateway.out={tmp_path / 'x'}"])
        assert not (tmp_path / "x").exists()

    def test_a_taken_port_is_reported_before_the_model_loads(self, tmp_path, monkeypatch):
        monkeypatch.setattr("mtrl.gateway.__main__.load", None)
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            with pytest.raises(UserError, match=f"gateway.host=127.0.0.1 gateway.port={port} is not available"):
                main([f"gateway.port={port}", f"gateway.out={tmp_path / 'x'}"])

    def test_the_gateway_starts_no_agent(self, tmp_path, monkeypatch):
        """The gateway accepts the experiment of an agent, whose service need not run."""
        found = []

        def load(config, *_):
            found.append(config.generator)
            raise KeyboardInterrupt

        monkeypatch.setattr("mtrl.gateway.__main__.load", load)
        with pytest.raises(SystemExit) as end:
            run_program(main, ["generator.agent.url=http://127.0.0.1:1", f"gateway.out={tmp_path}"])
        assert end.value.code == 130
        assert (found[0].agent.url, found[0].local.deterministic) == (None, False)
