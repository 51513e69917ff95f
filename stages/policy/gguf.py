"""A GGUF file as an ordinary Hugging Face folder: its header is checked, and its weights are dequantised once.

`read_header` reads what comes before the weights: the format is ggml's (ggml-org/ggml, docs/gguf.md, versions 2 and 3).
Every length in it is compared with the size of the file before it is used, so that a file of unknown origin costs
neither memory nor time. `ensure` writes the folder in float32, with tokenizer, chat template and generation config;
what comes out is what every other program reads. transformers translates architecture, names and tokenizer, the package
`gguf` the blocks of quantised weights.
"""

import mmap
import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from shutil import rmtree
from typing import TYPE_CHECKING, Any, NamedTuple

from filelock import FileLock

from composer_stages.data_files import load_template
from composer_stages.errors import BadInput
from composer_stages.runs import store
from composer_stages.runs.activity import Notice, Preparation
from composer_stages.runs.run import Listener
from composer_stages.stopping import dropped_on_stop
from composer_stages.words import Sentence

if TYPE_CHECKING:
    from torch import Tensor


def user_cache() -> Path:
    """Return the folder of models that are made or downloaded once per user."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "composer"


BuiltModel = tuple[Any, Any, str]
"""A model, its tokenizer, and the text of its model card."""


def ensure_folder(folder: Path, build: Callable[[], BuiltModel]) -> Path:
    """Return the folder; build and save the model first if the folder is missing.

    Of several processes that call this at the same time one builds and the others wait. The model is saved under a
    temporary name, fsynced and renamed, so that a folder of that name is complete, also after a power cut. An error of
    `build` or of the saving is raised, and leaves no folder; a signal that stops the run does the same at once.
    """
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(f".{folder.name}.lock")):
        if not folder.is_dir():
            unfinished = folder.with_name(f".{folder.name}.{os.getpid()}")
            with dropped_on_stop():
                try:
                    model, tokenizer, card = build()
                    model.save_pretrained(unfinished)
                    tokenizer.save_pretrained(unfinished)
                    (unfinished / "README.md").write_text(card)
                    store.publish_folder(unfinished, folder)
                finally:
                    rmtree(unfinished, ignore_errors=True)
    return folder


SUFFIX = ".gguf"
CONVERSION = 1
"""Version of the conversion: increase it when the same file gives another folder."""
VERSIONS = (2, 3)
MOST = 2**16
"""Entries and tensors that a header may announce; known models have below 3,000."""
LONGEST = 2**24
"""Elements of an array in a header; the largest vocabularies have 2**18 tokens."""
SCALARS = dict(enumerate("BbHhIif?", start=0)) | {10: "Q", 11: "q", 12: "d"}
"""GGUF's number of a type -> its letter in `struct`."""
STRING, ARRAY = 8, 9
OTHER_NAMES = {"qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe"}
"""Architectures that transformers spells otherwise than GGUF."""
WHOLE_ROWS = ("llama", "qwen2", "qwen3")
"""Architectures whose layers all attend to the whole row."""


class Stored(NamedTuple):
    """One tensor of a file. shape: rows first, in elements. type: ggml's number. begin, size: its bytes in the file."""

    name: str
    shape: tuple[int, ...]
    type: int
    begin: int
    size: int


@dataclass(frozen=True)
class Header:
    """The header of a GGUF file. values: numbers and texts by key; the length of an array."""

    path: Path
    values: dict[str, Any]
    tensors: tuple[Stored, ...]

    @property
    def architecture(self) -> str:
        """Return the name of the architecture, such as `llama`."""
        return str(self.values["general.architecture"])

    def number(self, name: str) -> int:
        """Return a size of the model, such as `context_length`; 0 if the header lacks it."""
        value = self.values.get(f"{self.architecture}.{name}", 0)
        return value if isinstance(value, int) else 0


class _Unreadable(Exception):
    """The header is not one: the message completes the sentence "FILE is no readable GGUF file: ..."."""


class _Cursor:
    """A place in the bytes of a file; every read is checked against its end."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 0

    def skip(self, size: int) -> int:
        """Return the place, and go on by this many bytes."""
        begin, self.at = self.at, self.at + size
        if self.at > len(self.data):
            raise _Unreadable(Sentence("policy.gguf-header-truncated", size=len(self.data)))
        return begin

    def scalar(self, letter: str) -> Any:
        return struct.unpack_from(f"<{letter}", self.data, self.skip(struct.calcsize(f"<{letter}")))[0]

    def text(self) -> str:
        begin = self.skip(self.scalar("Q"))
        return self.data[begin : self.at].decode(errors="replace")

    def count(self, noun: str, most: int) -> int:
        number = int(self.scalar("Q"))
        if number > most:
            raise _Unreadable(Sentence("policy.gguf-too-many-entries", number=number, noun=noun, most=most))
        return number

    def value(self) -> Any:
        kind = self.scalar("I")
        if kind == STRING:
            return self.text()
        if kind != ARRAY:
            return self.scalar(_letter(kind))
        inner, length = self.scalar("I"), self.count("elements of an array", LONGEST)
        if inner == STRING:
            for _ in range(length):
                self.skip(self.scalar("Q"))
        else:
            self.skip(length * struct.calcsize(f"<{_letter(inner)}"))
        return length


def _letter(kind: int) -> str:
    if kind not in SCALARS:
        raise _Unreadable(Sentence("policy.gguf-unknown-value-type", kind=kind))
    return SCALARS[kind]


def read_header(path: Path) -> Header:
    """Return the header of a GGUF file; `BadInput` for another file, a truncated one, and one part of several."""
    if not path.is_file():
        raise BadInput("policy.no-gguf-file", path=path)
    stat = path.stat()
    return _read_header(path, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=4)
def _read_header(path: Path, changed_ns: int, size: int) -> Header:
    """Return the header of a file as it was changed last; a vocabulary takes a third of a second to read."""
    del changed_ns
    try:
        with path.open("rb") as file:
            if not size:
                raise _Unreadable("it is empty")  # noqa: TRY301 - an empty file has no map
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _header(path, _Cursor(data))
    except _Unreadable as error:
        raise BadInput("policy.gguf-unreadable", path=path, error=str(error)) from None


def _header(path: Path, cursor: _Cursor) -> Header:
    if cursor.data[cursor.skip(4) : 4] != b"GGUF":
        raise _Unreadable(Sentence("policy.gguf-magic-missing"))
    if (version := cursor.scalar("I")) not in VERSIONS:
        raise _Unreadable(Sentence("policy.gguf-other-version", version=version, versions=VERSIONS))
    number, entries = cursor.count("tensors", MOST), cursor.count("entries", MOST)
    values = {}
    for _ in range(entries):
        key = cursor.text()
        values[key] = cursor.value()
    if not isinstance(values.get("general.architecture"), str):
        raise _Unreadable(Sentence("policy.gguf-without-architecture"))
    alignment = values.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise _Unreadable(f"its alignment is {alignment!r}")
    tensors = tuple(_tensors(cursor, number, alignment))
    header = Header(path, values, tensors)
    if values.get("split.count", 1) != 1:
        raise _Unreadable(Sentence("policy.gguf-part"))
    if header.number("block_count") > number:
        raise _Unreadable(Sentence("policy.gguf-layers-missing", number=number, layers=header.number("block_count")))
    return header


def _tensors(cursor: _Cursor, number: int, alignment: int) -> Iterator[Stored]:
    """Yield name, sizes, type and byte range of each tensor; every range is within the file."""
    from gguf import GGML_QUANT_SIZES

    sizes = {int(kind): blocks for kind, blocks in GGML_QUANT_SIZES.items()}
    described = []
    for _ in range(number):
        name, dimensions = cursor.text(), cursor.scalar("I")
        if dimensions > 4:
            raise _Unreadable(Sentence("policy.gguf-tensor-dimensions", name=name[:60], dimensions=dimensions))
        shape = tuple(cursor.scalar("Q") for _ in range(dimensions))[::-1]
        described.append((name, shape, cursor.scalar("I"), cursor.scalar("Q")))
    weights = -(-cursor.at // alignment) * alignment
    for name, shape, kind, offset in described:
        if kind not in sizes:
            raise _Unreadable(Sentence("policy.gguf-unknown-tensor-type", name=name[:60], kind=kind))
        block, width = sizes[kind]
        if not shape or shape[-1] % block:
            raise _Unreadable(Sentence("policy.gguf-tensor-sizes", name=name[:60], shape=list(shape), block=block))
        size = prod(shape) // block * width
        if weights + offset + size > len(cursor.data):
            raise _Unreadable(Sentence("policy.gguf-tensor-truncated", size=len(cursor.data), name=name[:60]))
        yield Stored(name, shape, kind, weights + offset, size)


def recipe_fingerprint(name: str) -> str:
    """Return the digest of a file and of the version of the conversion."""
    return digest_conversion(store.known_sha256(_file(name)))


def digest_conversion(sha256: str) -> str:
    """Return the digest of a file's SHA-256 and the version of the conversion."""
    return store.digest({"gguf": sha256, "conversion": CONVERSION})


def facts(name: str) -> dict[str, Any]:
    """Return the manifest's entry of a model that was read from a file."""
    return {"gguf_sha256": store.known_sha256(_file(name))}


def header(name: str) -> Header:
    """Return the header of a file."""
    return read_header(_file(name))


def folder(name: str, sha256: str) -> Path:
    """Return the folder of a file: the one with this digest, half a gigabyte once for a user, else a new name."""
    ending = f"-{sha256[:12]}-{CONVERSION}"
    return next(user_cache().glob(f"*{ending}"), user_cache() / f"{name[:50]}{ending}")


def to_make(name: str) -> str:
    """Return the file if the cache lacks its folder, else nothing; `BadInput` for a file that cannot be converted."""
    path = _file(name)
    if folder(path.stem, store.known_sha256(path)).is_dir():
        return ""
    return describe_conversion(require_convertible(path))


def describe_conversion(header: Header) -> str:
    """Return what a conversion will make, in words."""
    size = 4 * sum(prod(tensor.shape) for tensor in header.tensors)
    return Sentence("policy.gguf-to-convert", name=header.path.name, size=size / 1e9)


def ensure(name: str, progress: Listener) -> Path:
    """Return the folder of a GGUF file; make it if the cache lacks it. `BadInput` for a file that cannot be read."""
    path = _file(name)
    return convert(path, store.known_sha256(path), progress)


def convert(path: Path, sha256: str, progress: Listener) -> Path:
    """Return the converted folder of a file with this SHA-256; convert the file if the cache lacks it."""
    target = folder(path.stem, sha256)

    def build() -> BuiltModel:
        header = require_convertible(path)
        progress(Notice(Sentence("policy.dequantising", path_name=path.name, target=target)), 0, 0)
        return _dequantised(header, sha256, progress)

    return ensure_folder(target, build)


def require_convertible(path: Path) -> Header:
    """Return the header of a file that can be converted; `BadInput` for an architecture that transformers lacks."""
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

    header = read_header(path)
    supported = sorted({*GGUF_SUPPORTED_ARCHITECTURES} - {"general", "tokenizer"})
    name = header.architecture
    if OTHER_NAMES.get(name, name.replace("-", "_")) not in supported:
        raise BadInput("policy.gguf-architecture-unsupported", path=path, name=name[:60], supported=supported)
    if "tokenizer.chat_template" not in header.values:
        raise BadInput("policy.gguf-without-template", path=path)
    return header


def _file(name: str) -> Path:
    path = Path(name).expanduser()
    if not path.is_file():
        read_header(path)  # says that there is none
    return path


def _dequantised(header: Header, sha256: str, progress: Listener) -> BuiltModel:
    """Return the model of a file in float32 and its tokenizer, held once in memory.

    `from_pretrained` would give a model that cannot be saved, and hold the weights twice.
    """
    import torch
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    folder, name = str(header.path.parent), header.path.name
    try:
        config: Any = AutoConfig.from_pretrained(folder, gguf_file=name)
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, gguf_file=name)
        with init_empty_weights():
            model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except Exception as error:  # the file's author chooses what is read; tokenizers raises plain exceptions
        raise BadInput("policy.gguf-not-a-model", path=header.path, error=" ".join(str(error).split())[:200]) from None
    weights, unmapped = _weights(header, model, progress)
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    names = {module: name for name, module in model.named_modules()}
    output, inputs = (f"{names[module]}.weight" for module in (head, embeddings))
    # A file may hold the embeddings once more as its output matrix. They are one only where the numbers are the same:
    # tied weights that were quantised differently are not.
    if output in weights and torch.equal(weights[output], weights[inputs]):
        config.tie_word_embeddings = model.config.tie_word_embeddings = True
        del weights[output]
    missing, _ = model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    if absent := [name for name in missing if not (name == output and model.config.tie_word_embeddings)]:
        raise BadInput(
            "policy.gguf-weights-missing",
            path=header.path,
            number=len(absent),
            architecture=header.architecture,
            absent=absent[0],
        )
    card = load_template(__package__, "gguf_card.jinja")
    return model, tokenizer, card.render(header=header, sha256=sha256, unmapped=unmapped)


def _weights(header: Header, model: Any, progress: Listener) -> tuple[dict[str, "Tensor"], list[str]]:
    """Return the dequantised weights by transformers' names, and the names of tensors that have no place there."""
    import numpy
    import torch
    from gguf import GGMLQuantizationType, dequantize
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

    # What `load_gguf_checkpoint` of transformers does tensor by tensor, without its own display of progress.
    processor = TENSOR_PROCESSORS.get(header.architecture, TensorProcessor)(config=model.config.to_dict())
    places = get_gguf_hf_weights_map(model, processor)
    stored = numpy.memmap(header.path, mode="r")
    weights = dict[str, torch.Tensor]()
    unmapped = []
    steps = Preparation(f"tensors of {header.path.name}")
    for number, tensor in enumerate(header.tensors, start=1):
        rows = stored[tensor.begin : tensor.begin + tensor.size].reshape(*tensor.shape[:-1], -1)
        try:
            values = dequantize(rows, GGMLQuantizationType(tensor.type))
        except NotImplementedError:
            raise BadInput(
                "policy.gguf-type-not-dequantised",
                path=header.path,
                name=tensor.name,
                type=GGMLQuantizationType(tensor.type).name,
            ) from None
        placed = processor.process(
            weights=values, name=tensor.name, tensor_key_mapping=places, parsed_parameters={"tensors": weights}
        )
        if placed.name in places:
            weights[places[placed.name]] = torch.tensor(placed.weights, dtype=torch.float32)
        elif placed.name is not None:
            unmapped.append(tensor.name)
        progress(steps, number, len(header.tensors))
    return weights, unmapped
