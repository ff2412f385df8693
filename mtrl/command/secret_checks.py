"""Check that the configuration holds no secret, since config.yaml, run.log, the console and the trackers show it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mtrl.config.secret_names import holds_secret, is_secret, names_secret, shows_secret
from mtrl.errors import UserError

FIXES = {
    "tracker.mlflow.uri": "leave it out, and export the address as MLFLOW_TRACKING_URI",
    "generator.agent.url": "write the address alone, and export its token as {generator[agent][api_key_env]}",
    "generator.agent.command": "export it as an environment variable, and name that in generator.agent.pass_env",
    "generator.vllm.urls": "write the addresses alone, and export their token as {generator[vllm][api_key_env]}",
    "generator.sglang.urls": "write the addresses alone, and export their token as {generator[sglang][api_key_env]}",
    "generator.vllm": "leave it out: a server that is started here makes a key of its own and gets HF_TOKEN, and the "
    "engine reads any other from a file",
    "generator.sglang": "leave it out: a server that is started here makes a key of its own and gets HF_TOKEN, and the "
    "engine reads any other from a file",
    "evaluation": "leave it out, and export the key as {evaluation[endpoint][api_key_env]}",
    "distillation": "leave it out, export the key as an environment variable, and name the variable by "
    "distillation.teacher.endpoint.api_key_env",
    "": "leave it out, export it as an environment variable, and let your code read that",
}
"""Setting -> fix for a secret in the setting or below it; the first match applies."""
ENVIRONMENT = "generator.agent.env"


def check_secrets(values: Mapping[str, Any]) -> None:
    """Check that none of the plain values of a configuration (`keys.plain`) looks like a secret.

    Raises:
        UserError: a setting looks like a secret; the message does not contain its value.
    """
    for path in _secrets(values, ""):
        fix = next(fix for place, fix in FIXES.items() if f"{path}.".startswith(f"{place}.") or not place)
        if path.startswith(f"{ENVIRONMENT}."):
            name = path.removeprefix(f"{ENVIRONMENT}.")
            fix = f"export it as an environment variable, and write generator.agent.pass_env=[{name}]"
        fix = fix.format(**values)
        raise UserError(f"{path} looks like a secret, and config.yaml, run.log and the console would show it; {fix}")


def _secrets(value: Any, path: str) -> Iterator[str]:
    """Yield the paths of all secrets in a setting and below it."""
    name = path.rpartition(".")[2]
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _secrets(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list):
        texts = [item for item in value if isinstance(item, str)]
        if shows_secret(texts) or any(names_secret(name, text) for text in texts):
            yield path
        for item in value:
            if isinstance(item, dict | list):
                yield from _secrets(item, path)
    elif isinstance(value, str | int) and not isinstance(value, bool):
        is_variable = path.rpartition(".")[0] in (ENVIRONMENT, "generator.vllm.env", "generator.sglang.env")
        if (is_secret if is_variable else names_secret)(name, str(value)) or holds_secret(str(value)):
            yield path
