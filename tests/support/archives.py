"""Archives as tests need them: of any members, also of those that no program packs."""

import io
import tarfile
from pathlib import Path


def tar(path: Path, *members: tuple[str, bytes | str]) -> Path:
    """Pack an archive: bytes are a file's, a text is the target of a symbolic link, or "/" for a folder."""
    with tarfile.open(path, "w:gz") as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            if isinstance(content, str):
                info.type, info.linkname = (tarfile.DIRTYPE, "") if content == "/" else (tarfile.SYMTYPE, content)
                archive.addfile(info)
            else:
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
    return path
