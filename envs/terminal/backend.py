"""The backend of a run, which makes the container of each episode from its task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from envs.terminal.task import TerminalTask
from mtrl.environments.config_values import check_count, check_positive
from mtrl.errors import UserError
from mtrl.sandbox.bubblewrap_container import BubblewrapContainer, may_be_cwd
from mtrl.sandbox.container import Container, ContainerLimits
from mtrl.sandbox.container_image import build_image
from mtrl.sandbox.process import ProcessLimits
from mtrl.sandbox.swerex_client import checked_url, token
from mtrl.sandbox.swerex_container import SweRexContainer
from mtrl.sandbox.warm_containers import ContainerKind, WarmContainer, warm_containers

ENGINES = ("podman", "docker")
"""Backends that start containers from the image of a task."""
BACKENDS = ("sandbox", *ENGINES, "swerex")
SANDBOX_CWD = "/app"
"""Working directory of tasks without an image, if task.toml names none."""
TESTS_FOLDERS = ("logs", "tests")
"""Names of the folders of the root that the tests use."""
LIFETIME_SECONDS = 7200.0
"""Maximum number of seconds of an episode without its tests, after which a container ends by itself."""
OUTPUT_BYTES = 2**20
"""Maximum output of a command in the sandbox, in bytes."""


@dataclass(frozen=True)
class Backend:
    """The place where the tasks of a run are executed, and the limits of a container.

    Raises:
        UserError: a value is out of its range, or has no effect on this backend.
    """

    name: str = "sandbox"
    """sandbox (bubblewrap), podman, docker, or swerex: remote containers that run a server of SWE-ReX."""
    memory_mb: int = 2048
    """Maximum memory of a container, in MiB."""
    cpus: float | None = None
    """Maximum number of cores of a container; None: what the task asks for, or all cores."""
    processes: int = 256
    """Maximum number of concurrent processes and threads in a container."""
    disk_mb: int = 10240
    """Maximum size of the files that a container writes, in MiB."""
    network: bool = False
    """Whether containers get the network of the container engine, unless their task declines it."""
    servers: Sequence[str] = ()
    """Addresses of the servers of swerex, each in a container of its own."""
    warm_containers: int = 0
    """Maximum number of containers that are started before an episode needs them."""

    def __post_init__(self) -> None:
        if self.name not in BACKENDS:
            raise UserError(f"environment.config.backend={self.name} is not known; choose one of {', '.join(BACKENDS)}")
        for key in ("memory_mb", "processes", "disk_mb"):
            check_count(key, getattr(self, key))
        if self.cpus is not None:
            check_positive("cpus", self.cpus)
        check_count("warm_containers", self.warm_containers, low=0)
        if not isinstance(self.network, bool):
            raise UserError(f"environment.config.network={self.network!r} must be true or false")
        self._refuse_idle()
        if self.name == "swerex":
            self._check_servers()

    def check(self, task: TerminalTask) -> None:
        """Raise a UserError if this backend cannot run the task."""
        if self.name not in ENGINES and task.needs_image:
            raise UserError(
                f"task {task.name} has an image of its own, and environment.config.backend={self.name} runs tasks "
                "without one; set it to podman or docker"
            )
        if self.name in ENGINES and not task.needs_image:
            raise UserError(
                f"task {task.name} has neither environment/Dockerfile nor environment.docker_image, and "
                f"environment.config.backend={self.name} needs one of them; set it to sandbox or swerex"
            )
        cwd = task.cwd or SANDBOX_CWD
        if self.name == "sandbox" and (not may_be_cwd(cwd) or cwd.strip("/") in TESTS_FOLDERS):
            raise UserError(
                f"task {task.name} has environment.workdir={task.cwd!r}, and the sandbox has working directories "
                "directly below / only, which are none of the system or of the tests; write one such as /app"
            )

    def container(self, task: TerminalTask) -> Container:
        """Return the container of an episode, which has not been started; an image that is missing is built.

        Raises:
            ContainerError: the image cannot be built.
        """
        memory_mb = min(self.memory_mb, task.memory_mb or self.memory_mb)
        if self.name == "sandbox":
            limits = ProcessLimits(
                memory_bytes=memory_mb * 2**20, processes=self.processes, cpu_seconds=3600, output_bytes=OUTPUT_BYTES
            )
            return BubblewrapContainer(limits, task.cwd or SANDBOX_CWD, TESTS_FOLDERS)
        if self.name == "swerex":
            return SweRexContainer(self.servers, task.cwd or SANDBOX_CWD, LIFETIME_SECONDS + task.tests_seconds)
        image = task.image or build_image(self.name, task.folder / "environment", task.build_seconds)
        wanted = [cpus for cpus in (self.cpus, task.cpus) if cpus is not None]
        limits_of_all = ContainerLimits(
            memory=f"{memory_mb}m",
            cpus=min(wanted) if wanted else None,
            processes=self.processes,
            disk_mb=min(self.disk_mb, task.storage_mb or self.disk_mb),
            network=self.network and task.wants_network is not False,
            seconds=LIFETIME_SECONDS + task.tests_seconds,
        )
        kind = ContainerKind(self.name, image, limits_of_all, task.cwd)
        return WarmContainer(kind, warm_containers(self.warm_containers)) if self.warm_containers else kind.make()

    def _refuse_idle(self) -> None:
        """Raise a UserError if a setting has no effect on this backend."""
        defaults = {field.name: field.default for field in fields(self)}
        idle = {
            "sandbox": ("network", "cpus", "disk_mb", "servers", "warm_containers"),
            "swerex": ("network", "cpus", "disk_mb", "memory_mb", "processes", "warm_containers"),
        }.get(self.name, ("servers",))
        for key in idle:
            value = getattr(self, key)
            is_set = bool(value) if key == "servers" else value != defaults[key]
            if is_set:
                where = "servers of swerex" if key == "servers" else "containers of podman and docker"
                raise UserError(
                    f"environment.config.{key} is for {where}, and environment.config.backend is {self.name}; leave "
                    "it out"
                )

    def _check_servers(self) -> None:
        """Raise a UserError if an address of a server is missing or invalid, or if there is no token."""
        servers = self.servers
        if isinstance(servers, str) or not isinstance(servers, Sequence) or not servers:
            raise UserError(
                f"environment.config.servers={servers!r} must be a list of addresses, such as [http://127.0.0.1:8001], "
                "because environment.config.backend=swerex runs each episode on a server of its own"
            )
        if len(set(map(checked_url, servers))) < len(servers):
            raise UserError("environment.config.servers names a server twice; name each address once")
        token()
