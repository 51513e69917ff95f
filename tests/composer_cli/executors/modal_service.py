"""A fake of Modal on loopback, in the protocol of Modal's own SDK, that really runs the sandboxes' commands.

Only what a chain needs is answered: apps, images, volumes, secrets, sandboxes, logs. Any other call fails as at a
server that does not know it.
"""

# ruff: noqa: N802 (the names of the protocol)

import asyncio
import base64
import json
import os
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from google.protobuf.timestamp_pb2 import Timestamp
from grpclib.const import Status
from grpclib.exceptions import GRPCError
from grpclib.server import Server
from modal_proto import api_pb2
from modal_proto.api_grpc import ModalClientBase

from tests.composer_cli.executors.container import container

SUCCESS = api_pb2.GenericResult.GENERIC_STATUS_SUCCESS
FAILURE = api_pb2.GenericResult.GENERIC_STATUS_FAILURE
TERMINATED = api_pb2.GenericResult.GENERIC_STATUS_TERMINATED
TIMEOUT = api_pb2.GenericResult.GENERIC_STATUS_TIMEOUT


@dataclass
class Running:
    """A sandbox: what was asked for, its process, its output, and what ended it from outside."""

    id: str
    app_id: str
    asked: Any
    secrets: list[str]
    process: subprocess.Popen[str]
    lines: list[tuple[int, str]] = field(default_factory=list)
    """What it printed, each with its time in nanoseconds."""
    cut: int | None = None

    def kill(self, why: int, number: int = signal.SIGKILL) -> None:
        """End it from outside."""
        if self.process.poll() is None:
            self.cut = why
            os.killpg(self.process.pid, number)

    def result(self) -> Any:
        """What became of it; without a status while it runs."""
        code = self.process.poll()
        if code is None:
            return api_pb2.GenericResult()
        status = self.cut or (SUCCESS if code == 0 else FAILURE)
        return api_pb2.GenericResult(status=status, exitcode=code if code >= 0 else 128 - code)


@dataclass
class Modal:
    """The service: volumes are folders, secrets are variables."""

    token: tuple[str, str]
    volumes: dict[str, Path]
    secrets: dict[str, dict[str, str]]
    url: str = ""
    sandboxes: list[Running] = field(default_factory=list)
    images: dict[str, list[str]] = field(default_factory=dict)

    def launch(self, request: Any, secret_ids: list[str], form: str) -> Running:
        """The sandbox of a request; `form` is how the backend writes the number of a sandbox."""
        asked = request.definition
        mounts = {mount.mount_path: self.volumes[mount.volume_id.removeprefix("vo-")] for mount in asked.volume_mounts}
        given = {name: value for secret in asked.secret_ids for name, value in self.secrets[secret[3:]].items()}
        process = subprocess.Popen(
            [*container(mounts), *asked.entrypoint_args],
            stdout=subprocess.PIPE,
            text=True,
            env={"PATH": os.environ["PATH"], "HOME": "/tmp", **given},
            start_new_session=True,
        )
        running = Running(f"sb-{len(self.sandboxes):{form}}", request.app_id, asked, secret_ids, process)
        self.sandboxes.append(running)
        threading.Timer(asked.timeout_secs, running.kill, (TIMEOUT,)).start() if asked.timeout_secs < 60 else None
        threading.Thread(target=self._read, args=(running,), daemon=True).start()
        return running

    @staticmethod
    def _read(running: Running) -> None:
        for line in running.process.stdout or ():
            running.lines.append((time.time_ns(), line))
        running.process.wait()


def _part(value: dict[str, int]) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).decode().rstrip("=")


JWT = f"{_part({})}.{_part({'exp': 2**33})}.x"
"""A token that expires in the year 2242."""


def _both(call: Any) -> tuple[Any, Any]:
    """A call of the first backend, and the same of the second."""

    async def first(self: Any, stream: Any) -> None:
        await stream.send_message(await call(self, await self._asked(stream)))

    async def second(self: Any, stream: Any) -> None:
        await stream.send_message(await call(self, await self._asked(stream, second=True)))

    return first, second


class Answers:
    """The calls that are answered, by their names in the protocol."""

    service: Modal

    async def _asked(self, stream: Any, second: bool = False) -> Any:
        """The message of a call with the right token; those of the second backend have a token of their own too."""
        if second and stream.metadata.get("x-modal-auth-token") != JWT:
            raise GRPCError(Status.UNAUTHENTICATED, "No auth token")
        held = tuple(stream.metadata.get(f"x-modal-token-{part}") for part in ("id", "secret"))
        if held != self.service.token:
            raise GRPCError(Status.UNAUTHENTICATED, "Token missing. Could not authenticate client.")
        return await stream.recv_message()

    def _sandbox(self, wanted: str) -> Running:
        for running in self.service.sandboxes:
            if running.id == wanted:
                return running
        raise GRPCError(Status.NOT_FOUND, f"No sandbox {wanted}")

    async def ClientHello(self, stream: Any) -> None:
        await self._asked(stream)
        await stream.send_message(api_pb2.ClientHelloResponse())

    async def AppGetOrCreate(self, stream: Any) -> None:
        request = await self._asked(stream)
        await stream.send_message(api_pb2.AppGetOrCreateResponse(app_id=f"ap-{request.app_name}"))

    async def EnvironmentGetOrCreate(self, stream: Any) -> None:
        await self._asked(stream)
        metadata = api_pb2.EnvironmentMetadata(
            name="main", settings=api_pb2.EnvironmentSettings(image_builder_version="2025.06")
        )
        await stream.send_message(api_pb2.EnvironmentGetOrCreateResponse(environment_id="en-1", metadata=metadata))

    async def ImageGetOrCreate(self, stream: Any) -> None:
        request = await self._asked(stream)
        image = f"im-{len(self.service.images)}"
        self.service.images[image] = list(request.image.dockerfile_commands)
        done = api_pb2.GenericResult(status=SUCCESS)
        await stream.send_message(api_pb2.ImageGetOrCreateResponse(image_id=image, result=done))

    async def VolumeGetOrCreate(self, stream: Any) -> None:
        name = (await self._asked(stream)).deployment_name
        if name not in self.service.volumes:
            raise GRPCError(Status.NOT_FOUND, f"Volume {name} not found")
        await stream.send_message(api_pb2.VolumeGetOrCreateResponse(volume_id=f"vo-{name}"))

    async def SecretGetOrCreate(self, stream: Any) -> None:
        request = await self._asked(stream)
        held = self.service.secrets.get(request.deployment_name)
        if held is None:
            raise GRPCError(Status.NOT_FOUND, f"Secret {request.deployment_name} not found")
        if missing := [name for name in request.required_keys if name not in held]:
            raise GRPCError(Status.NOT_FOUND, f"Secret {request.deployment_name} is missing {missing}")
        await stream.send_message(api_pb2.SecretGetOrCreateResponse(secret_id=f"st-{request.deployment_name}"))

    async def AuthTokenGet(self, stream: Any) -> None:
        await self._asked(stream)
        await stream.send_message(api_pb2.AuthTokenGetResponse(token=JWT))

    async def SandboxCreate(self, stream: Any) -> None:
        """Of the first backend, which the SDK takes for sandboxes with a GPU."""
        request = await self._asked(stream)
        running = self.service.launch(request, list(request.definition.secret_ids), "022d")
        await stream.send_message(api_pb2.SandboxCreateResponse(sandbox_id=running.id))

    async def SandboxCreateV2(self, stream: Any) -> None:
        request = await self._asked(stream, second=True)
        running = self.service.launch(request, [source.secret_id for source in request.secret_sources], "026d")
        await stream.send_message(api_pb2.SandboxCreateV2Response(sandbox_id=running.id, task_id=f"ta-{running.id}"))

    async def _task(self, request: Any) -> Any:
        return api_pb2.SandboxGetTaskIdResponse(task_id=f"ta-{self._sandbox(request.sandbox_id).id}")

    async def _result(self, request: Any) -> Any:
        running = self._sandbox(request.sandbox_id)
        metadata = api_pb2.SandboxHandleMetadata(app_id=running.app_id)
        return api_pb2.SandboxWaitResponse(result=running.result(), metadata=metadata)

    async def _terminate(self, request: Any) -> Any:
        self._sandbox(request.sandbox_id).kill(TERMINATED, signal.SIGTERM)
        return api_pb2.SandboxTerminateResponse()

    SandboxGetTaskId, SandboxGetTaskIdV2 = _both(_task)
    SandboxWait, SandboxWaitV2 = _both(_result)
    SandboxTerminate, SandboxTerminateV2 = _both(_terminate)

    async def AppCountLogs(self, stream: Any) -> None:
        request = await self._asked(stream)
        size, counts = request.bucket_secs, Counter[int]()
        for at, _ in self._logged(request):
            counts[at // 10**9 // size * size] += 1
        buckets = [
            api_pb2.AppCountLogsResponse.LogBucket(bucket_start_at=Timestamp(seconds=start), stdout_logs=count)
            for start, count in sorted(counts.items())
        ]
        await stream.send_message(api_pb2.AppCountLogsResponse(buckets=buckets))

    async def AppFetchLogs(self, stream: Any) -> None:
        items = [
            api_pb2.TaskLogs(data=line, timestamp_ns=at, file_descriptor=api_pb2.FILE_DESCRIPTOR_STDOUT)
            for at, line in self._logged(await self._asked(stream))
        ]
        await stream.send_message(api_pb2.AppFetchLogsResponse(batches=[api_pb2.TaskLogsBatch(items=items)]))

    def _logged(self, request: Any) -> list[tuple[int, str]]:
        """The lines of a sandbox's task between two times."""
        running = self._sandbox(request.task_id.removeprefix("ta-"))
        return [one for one in running.lines if request.since.ToNanoseconds() <= one[0] < request.until.ToNanoseconds()]


def _unknown(name: str) -> Any:
    async def refuse(self: Any, stream: Any) -> None:
        del self, stream
        raise GRPCError(Status.UNIMPLEMENTED, f"The fake has no answer to {name}")

    return refuse


UNKNOWN = {name: _unknown(name) for name in ModalClientBase.__abstractmethods__ if not hasattr(Answers, name)}
Service = type("Service", (Answers, ModalClientBase), UNKNOWN)


@contextmanager
def serving_modal(
    token: tuple[str, str], volumes: dict[str, Path], secrets: dict[str, dict[str, str]]
) -> Iterator[Modal]:
    """A running service; what still runs is killed when the block ends."""
    modal = Modal(token, volumes, secrets)
    loop, ready = asyncio.new_event_loop(), threading.Event()

    async def serve() -> Server:
        handler = Service()
        handler.service = modal
        server = Server([handler])
        await server.start("127.0.0.1", 0)
        port = server._server.sockets[0].getsockname()[1]
        modal.url = f"http://127.0.0.1:{port}"
        ready.set()
        return server

    def run() -> None:
        asyncio.set_event_loop(loop)
        modal_server = loop.run_until_complete(serve())
        loop.run_forever()
        modal_server.close()
        loop.run_until_complete(modal_server.wait_closed())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    ready.wait(10)
    try:
        yield modal
    finally:
        for running in modal.sandboxes:
            running.kill(TERMINATED)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
