"""A local S3 server with one bucket: moto's, from an environment of its own."""

import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator

import pytest
from needs import where

from support.command_line import until


@pytest.fixture
def s3() -> Iterator[dict[str, str]]:
    """The variables that lead to a local S3 server with the bucket `runs`, in a test that needs `moto`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    server = subprocess.Popen([where("moto"), "-H", "127.0.0.1", "-p", str(port)], env=clean, stderr=subprocess.DEVNULL)
    try:
        until(lambda: _answers(address), 120)
        urllib.request.urlopen(urllib.request.Request(f"{address}/runs", method="PUT"))
        keys = {"AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any", "AWS_REGION": "us-east-1"}
        yield {**keys, "AWS_ENDPOINT_URL": address, "AWS_ALLOW_HTTP": "true"}
    finally:
        server.terminate()
        server.wait()


def _answers(address: str) -> bool:
    try:
        urllib.request.urlopen(f"{address}/moto-api/")
    except OSError:
        time.sleep(0.2)
        return False
    return True
