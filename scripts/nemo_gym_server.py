"""Serve a resources server of NeMo Gym on 127.0.0.1, without Ray, for mtrl/environments/adapters/nemo_gym.py.

    PYTHON_WITH_NEMO_GYM scripts/nemo_gym_server.py NAME [--port PORT]

NAME is a folder of NeMo Gym's package `resources_servers`, such as example_multi_step. `scripts/install_nemo_gym.sh`
makes the interpreter. NeMo Gym's own start of a server joins or starts a Ray cluster; here the server's FastAPI
application runs alone, so that a server which asks other servers, such as a judge, cannot reach them. The first line of
the output is the address. Ctrl-C or SIGTERM ends the server.
"""

import argparse
import importlib
import inspect
import socket
import sys
from pathlib import Path

import uvicorn
from nemo_gym.base_resources_server import SimpleResourcesServer
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.server_utils import ServerClient
from omegaconf import OmegaConf

HOST = "127.0.0.1"


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve a resources server of NeMo Gym on 127.0.0.1.")
    parser.add_argument("name", help="folder of the package resources_servers, such as example_multi_step")
    parser.add_argument("--port", type=int, default=0, help="port; by default a free one")
    arguments = parser.parse_args()
    try:
        module = importlib.import_module(f"resources_servers.{arguments.name}.app")
    except ImportError as error:
        sys.exit(f"resources_servers.{arguments.name}.app cannot be imported ({error}); check the name")
    with socket.create_server((HOST, arguments.port)) as listener:
        port = listener.getsockname()[1]
        app = server_of(module, arguments.name, port).setup_webserver()
        print(f"http://{HOST}:{port}", flush=True)
        uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])


def server_of(module, name: str, port: int) -> SimpleResourcesServer:
    """Return the server of a module, with the settings of the package's own configuration file."""
    found = [
        each
        for _, each in inspect.getmembers(module, inspect.isclass)
        if issubclass(each, SimpleResourcesServer) and each.__module__ == module.__name__
    ]
    if len(found) != 1:
        sys.exit(f"{module.__name__} has {len(found)} resources servers instead of one")
    file = Path(module.__file__).parent / "configs" / f"{name}.yaml"
    settings = settings_of(OmegaConf.to_container(OmegaConf.load(file)), name) if file.is_file() else {}
    settings |= {"entrypoint": "app.py", "host": HOST, "port": port, "name": name}
    client = ServerClient(
        head_server_config=BaseServerConfig(host=HOST, port=port), global_config_dict=OmegaConf.create({})
    )
    return found[0](config=found[0].model_fields["config"].annotation(**settings), server_client=client)


def settings_of(config: dict, name: str) -> dict:
    """Return the settings under `*.resources_servers.NAME` of a configuration; {} if it has none."""
    for instance in config.values():
        if isinstance(instance, dict) and name in (instance.get("resources_servers") or {}):
            return dict(instance["resources_servers"][name])
    return {}


if __name__ == "__main__":
    main()
