"""mtrl gateway: a policy behind OpenAI's API, for programs that you start yourself.

    mtrl gateway experiment=gsm8k                          the policy before training
    mtrl gateway experiment=gsm8k gateway.model=RUN        the policy of a run; or a folder or a Hub name
    mtrl gateway experiment=gsm8k generator=vllm           sampled by another engine

Settings in addition to the configuration:

    gateway.model                base, RUN, RUN/checkpoints/best, a model folder, a Hub name
    gateway.out                  folder for the trajectories (outputs/gateway/TIME); mtrl view opens it
    gateway.host, gateway.port   address to listen on (127.0.0.1 and a free port)
    gateway.max_calls            calls of one trajectory (1000); gateway.max_calls_at_once: concurrent calls (8)
    gateway.max_requests_per_second   requests of one trajectory per second (100); further ones get status 429
    gateway.seconds              time limit of one trajectory, from its opening to its completion (3600)

The program prints its URL and the admin's key; MTRL_GATEWAY_KEY sets the key. With this key,

    POST /trajectories {"id": NAME}      opens a trajectory and returns its token and its base_url, which needs no key;
    POST /trajectories/NAME/v1/chat/completions, or /v1/chat/completions with the header X-Mtrl-Trajectory-Id: NAME
                                         opens the trajectory on first use.

POST /update-reward sets the reward of a trajectory and POST /complete-rollout ends it, as in SageMaker's SDK. A
trajectory is written as one line of trajectories/gateway.jsonl in the folder when it ends, when it takes longer than
gateway.seconds, or when Ctrl-C ends the gateway. A name can be used only once.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from mtrl.command.checks import check
from mtrl.command.compose import merge
from mtrl.command.program import run_program
from mtrl.config.derived import serves
from mtrl.config.engine_schema import AgentConfig
from mtrl.config.messages import unknown_choice
from mtrl.config.outputs import check_local
from mtrl.config.overrides import normalise
from mtrl.config.schema import Config
from mtrl.environments.factory import load_task
from mtrl.errors import UserError
from mtrl.evaluation.sources import BASE, source_of
from mtrl.record.run_dir import RunDir
from mtrl.utils.process import settled
from mtrl.utils.serving import bind, is_loopback

if TYPE_CHECKING:
    from mtrl.evaluation.ready_models import ReadyModel
    from mtrl.evaluation.rollouts import Source

KEY_VARIABLE = "MTRL_GATEWAY_KEY"


@dataclass
class GatewaySettings:
    """Settings of the section `gateway`."""

    model: str = BASE
    out: str = ""
    host: str = "127.0.0.1"
    port: int = 0
    max_calls: int = 1000
    max_calls_at_once: int = 8
    max_requests_per_second: float = 100.0
    seconds: float = 3600.0

    @classmethod
    def of(cls, arguments: Sequence[str]) -> tuple[GatewaySettings, list[str]]:
        """Split the command-line arguments into the settings of the gateway and the overrides of the configuration.

        Raises:
            UserError: a setting is unknown, or a value does not fit.
        """
        settings, overrides = cls(), []
        for argument in arguments:
            key, is_set, value = argument.lstrip("+").partition("=")
            section, _, name = key.partition(".")
            if section != "gateway" or not is_set:
                overrides.append(argument)
            elif not name:
                raise UserError(f"{argument} names no setting; gateway has {', '.join(vars(settings))}")
            elif name not in vars(settings):
                raise unknown_choice("gateway", name, list(vars(settings)))
            else:
                setattr(settings, name, _read(key, value, type(getattr(settings, name))))
        return settings, overrides


def _read(key: str, value: str, kind: type) -> Any:
    try:
        parsed = kind(value)
        if kind is str or parsed > 0 or (parsed == 0 and key == "gateway.port"):
            return parsed
    except ValueError:
        pass
    bound = "of at least 0" if key == "gateway.port" else "above 0"
    raise UserError(f"{key}={value} must be {'an integer' if kind is int else 'a number'} {bound}")


def main(argv: Sequence[str] | None = None) -> int:
    """Load the model and serve it. Return the exit status."""
    args = parse(argv)
    settings, overrides = GatewaySettings.of(args.overrides)
    cfg = merge(normalise(overrides, args.config_dir), args.config_dir)
    for warning in check(cfg):
        print(f"warning: {warning}", file=sys.stderr)
    config: Config = OmegaConf.to_object(cfg)  # type: ignore[assignment]
    config.generator.agent = AgentConfig()  # the gateway starts no agents
    disable_deterministic_engine(config)
    key = admin_key(settings.host)
    source = model_source(settings.model)
    check_address(settings)
    out = make_output_folder(settings)
    model = load(config, source, out)
    out.write_config(config)
    model.tokenizer.save_pretrained(out.tokenizer)
    with settled():
        return asyncio.run(serve(model, config, settings, key, out))


def disable_deterministic_engine(config: Config) -> None:
    """Turn off the deterministic engine: it samples nothing until every open trajectory has requested a turn, and the
    times of the programs' calls are unknown.

    Raises:
        UserError: the configuration requires the deterministic engine.
    """
    local = config.generator.local
    if local.deterministic:
        raise UserError(
            "generator.local.deterministic=true makes the calls of all programs wait for each other, and their times "
            "are unknown; leave it null"
        )
    local.deterministic = False


def model_source(text: str) -> Source:
    """Return the source of the model's weights.

    Raises:
        UserError: the model does not exist, or is an endpoint, which returns no token ids.
    """
    source = source_of(text, "gateway.model")
    if source.kind == "endpoint":
        raise UserError(
            f"gateway.model={text} returns no token ids, so no trajectory can be recorded; name a model whose weights "
            "mtrl can load"
        )
    return source


def load(config: Config, source: Source, out: RunDir) -> ReadyModel:
    """Load the model and its engine.

    Raises:
        UserError: the model cannot be loaded.
    """
    from mtrl.evaluation.ready_models import local_model, served_model
    from mtrl.trainer.setup.machine import with_machine_settings
    from mtrl.trainer.setup.parts import start_of

    config = with_machine_settings(config)
    task = load_task(config)
    if source.kind == "base":
        source = replace(source, path=start_of(config, task))
    if serves(config):
        return served_model(source, config, task, [], out.engine)
    return local_model(source, config, task, [])


async def serve(model: ReadyModel, config: Config, settings: GatewaySettings, key: str, out: RunDir) -> int:
    """Serve the model until SIGINT or SIGTERM, and then close it.

    Returns:
        The exit status: 1 if a trajectory could not be written, else 0.

    Raises:
        UserError: the engine is lost.
    """
    from mtrl.gateway.server import Gateway
    from mtrl.gateway.session import SessionLimits
    from mtrl.gateway.session_manager import SessionManager, names_in
    from mtrl.models.plain_tokenizer import plain
    from mtrl.models.renderer import make_renderer
    from mtrl.rollout.conversation import Codec
    from mtrl.trainer.setup.connect import sampling_params

    tokenizer = plain(model.tokenizer)
    codec = Codec(tokenizer, make_renderer(tokenizer, config.model.renderer))
    context = model.loop.limits.max_context_length
    limits = SessionLimits(settings.max_calls, settings.max_calls_at_once, context, settings.max_requests_per_second)
    gateway = Gateway(model.engine, codec, limits, settings.host, settings.port, key="gateway")
    sampling = sampling_params(config.generator.sampling_params, codec.stop_token_ids)
    file = trajectory_file(out)
    manager = SessionManager(
        gateway, sampling, config.seed, file, settings.seconds, lambda line: print(line, flush=True)
    )
    gateway.allow_admin(key, manager.open, names_in(file))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, manager.shutdown.set)
    try:
        await gateway.start()
        shown = f"that of {KEY_VARIABLE}" if os.environ.get(KEY_VARIABLE) else key
        print(f"{settings.model} is at {gateway.url}/v1, the admin's key is {shown}", flush=True)
        print(f"trajectories are written to {file}; Ctrl-C ends the gateway", flush=True)
        await manager.shutdown.wait()
    finally:
        await manager.close()
        await gateway.close()
        await model.close()
        view_hint = f"; mtrl view {out} shows them" if manager.written else ""
        print(f"trajectories written: {manager.written}, to {file}{view_hint}", flush=True)
    if manager.failure is not None:
        raise manager.failure
    return 1 if manager.unwritten else 0


def admin_key(host: str) -> str:
    """Return the admin's key: the value of the variable `KEY_VARIABLE`, or a new one.

    Raises:
        UserError: the host is reachable from other machines and no key is set, or the key is not valid.
    """
    key = os.environ.get(KEY_VARIABLE, "")
    if not key and not is_loopback(host):
        raise UserError(
            f"gateway.host={host} can be reached from other machines; set {KEY_VARIABLE} to a key of your own first"
        )
    if key and (len(key) < 16 or not key.isascii() or not key.isprintable() or " " in key):
        raise UserError(f"{KEY_VARIABLE} must be at least 16 printable ASCII characters without spaces")
    return key or f"sk-mtrl-admin-{secrets.token_urlsafe(24)}"


def check_address(settings: GatewaySettings) -> None:
    """Check that the gateway can listen on its address, before the model takes minutes to load.

    Raises:
        UserError: the gateway cannot listen on its address.
    """
    bind(settings.host, settings.port, "the admin's key", KEY_VARIABLE, "gateway.{}={}").close()


def make_output_folder(settings: GatewaySettings) -> RunDir:
    """Create the folder of the trajectories, with the layout of a run's folder.

    Raises:
        UserError: the folder cannot be written to.
    """
    check_local(f"gateway.out={settings.out}", settings.out)
    run = RunDir(settings.out or f"outputs/gateway/{datetime.now():%Y-%m-%d_%H-%M-%S}")
    try:
        run.trajectories.mkdir(parents=True, exist_ok=True)
        trajectory_file(run).open("a").close()
    except OSError as error:
        raise UserError(f"gateway.out={run} cannot be written ({error.strerror}); name another folder") from error
    return run


def trajectory_file(out: RunDir) -> Path:
    return out.trajectories / "gateway.jsonl"


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="mtrl gateway", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as for mtrl train")
    parser.add_argument("--config-dir", help="config groups of your own")
    return parser.parse_intermixed_args(argv)


def cli(argv: Sequence[str] | None = None) -> None:
    run_program(main, argv)


if __name__ == "__main__":
    cli()
