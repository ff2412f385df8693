"""Checks of `generator.agent`, the program that runs the episodes, and warnings about settings that it ignores."""

from __future__ import annotations

import inspect
import os
import shutil

from omegaconf import DictConfig

from mtrl.config.derived import PROGRAM_KEYS, program_path
from mtrl.config.engine_schema import CALL_KINDS
from mtrl.config.messages import unknown_choice
from mtrl.errors import UserError
from mtrl.utils.http_address import http_address
from mtrl.utils.user_code import load_function

LOOPBACK = ("127.0.0.1", "::1", "localhost")
EVERYWHERE = ("0.0.0.0", "::", "")


def check_agent(cfg: DictConfig) -> list[str]:
    """Check the agent program. Return warnings.

    Raises:
        UserError: the agent cannot run, or the environment needs an agent and none is set.
    """
    from mtrl.environments.agent import ProgramTask
    from mtrl.environments.family import get_family

    agent, family = cfg.generator.agent, get_family(cfg.environment.name, cfg.environment.target)
    chosen = [key for key in PROGRAM_KEYS if agent[key] is not None]
    if len(chosen) > 1:
        raise UserError(
            f"generator.agent.{chosen[0]} and generator.agent.{chosen[1]} both name an agent program; set one of "
            "them to null"
        )
    if not chosen:
        if family.environment is ProgramTask:
            raise UserError(
                f"environment.name={cfg.environment.name} needs an agent program, and none is named; set "
                "generator.agent.target=package.module.function, generator.agent.command or generator.agent.url"
            )
        return []
    if not cfg.generator.use_conversation_multi_turn:
        raise UserError(
            "generator.use_conversation_multi_turn=false puts all turns into one message, and a program sends messages "
            "of its own; set it to true, or remove the program"
        )
    for kind in agent.leave_out:
        if kind not in CALL_KINDS:
            raise unknown_choice("generator.agent.leave_out", kind, CALL_KINDS)
    {"target": _target, "command": _command, "url": _url}[chosen[0]](cfg)
    return [*_host(cfg, chosen[0]), *_scorer(cfg, family.has_scorer)]


def _target(cfg: DictConfig) -> None:
    path = cfg.generator.agent.target
    function = load_function(path, "generator.agent.target")
    try:
        inspect.signature(function).bind("row", "client")
    except TypeError as error:
        raise UserError(
            f"generator.agent.target={path} cannot be called as function(row, client) ({error}); let it accept both"
        ) from error
    except ValueError:  # a function in C without a signature
        return


def _command(cfg: DictConfig) -> None:
    command = list(cfg.generator.agent.command)
    if not command or not command[0]:
        raise UserError("generator.agent.command=[] names no program; write [python,/path/of/agent.py]")
    if shutil.which(command[0], path=program_path()) is None:
        raise UserError(f"generator.agent.command={command} cannot be run: {command[0]} is no program; write its path")
    for name in cfg.generator.agent.pass_env:
        if name not in os.environ:
            raise UserError(f"generator.agent.pass_env=[{name}] is no environment variable here; export {name} first")


def _url(cfg: DictConfig) -> None:
    url = cfg.generator.agent.url
    address = http_address(url)
    if address is None or address.query:
        raise UserError(f"generator.agent.url={url} is no address of an agent; write http://HOST:PORT")


def _host(cfg: DictConfig, kind: str) -> list[str]:
    host = cfg.generator.agent.host
    if host in EVERYWHERE:
        raise UserError(
            f"generator.agent.host={host} is no address that a program can reach; name an address of this machine that "
            "it reaches, 127.0.0.1 if it runs here"
        )
    if kind == "url":
        return []
    return [
        f"generator.agent.host={host} lets other machines call the policy, and the program runs on this machine; "
        "127.0.0.1 is enough"
    ] * (host not in LOOPBACK)


def _scorer(cfg: DictConfig, has_scorer: bool) -> list[str]:
    if has_scorer:
        return []
    name = cfg.environment.target or cfg.environment.name
    return [
        f"{name} has no scorer of its own, so the number that the program reports is both the reward and the "
        "measured success; provide one: agent_family(name, score) of mtrl.environments.agent"
    ]
