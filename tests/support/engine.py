"""A small real engine behind vLLM's addresses: token ids in, token ids and log-probs out, adapters through peft.

It computes with the model that it is given, one request at a time. Its faults are asked for by name.
"""

import json
import math
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from support.loopback import Handler, listening

Body = dict[str, Any]


@dataclass
class Engine:
    """faults: `raw` log-probs before temperature; `deaf` says that weights are loaded and keeps its own; `late`
    serves each adapter by the one before it; `noisy` scores are so many thousandths of a nat off, each time
    otherwise; `closed` is not in development mode, in which all weights can be replaced; `apart` cannot read
    others' memory; `sticky` keeps cached prefixes at the first reset; `textual` answers without token ids; `broken`
    answers 500 to so many completions; `narrow` takes 40 tokens; `lonely` answers 500 where a scoring meets another
    request, as vLLM dies of it on a CPU; `spanning` answers wait after so many tokens until all weights have been
    replaced; `likeliest` tells so many tokens at each place of a prompt, 20 without; `mute` leaves out the middle
    of a prompt from the scoring of this number on; `aborting` breaks so many answers off."""

    folder: Path
    faults: dict[str, int] = field(default_factory=dict)
    requests: list[tuple[str, Body]] = field(default_factory=list)
    url: str = ""
    most: int = 0
    """Adapters that were held at once."""

    def __post_init__(self) -> None:
        self.lock, self.here = threading.Condition(), list[str]()
        self.in_memory = list[bool]()
        """Of each time that it was given weights, whether they were in memory."""
        self.paused, self.under_way, self.held, self.replaced = False, 0, 0, 0
        self.base = AutoModelForCausalLM.from_pretrained(self.folder).eval()
        self.adapters: dict[str, Any] = {}
        self.loaded: list[Any] = []
        self.scorings = self.asleep = 0
        """The level at which it sleeps, in which it answers nothing; 0 awake."""

    def answer(self, path: str, body: Body) -> tuple[int, Any]:
        if "lonely" in self.faults and path.endswith("/completions"):
            with self.together(body) as met:
                return (500, {"error": {"message": "EngineDeadError"}}) if met else self.alone(path, body)
        return self.alone(path, body)

    @contextmanager
    def together(self, body: Body) -> Iterator[bool]:
        """Stay for a moment; whether a scoring and another request were here at once."""
        kind = "scoring" if "prompt_logprobs" in body else "sampling"
        self.here.append(kind)
        time.sleep(0.05)
        met = len(self.here) > 1 and "scoring" in self.here
        try:
            yield met
        finally:
            self.here.remove(kind)

    def alone(self, path: str, body: Body) -> tuple[int, Any]:
        with self.lock:
            self.requests.append((path, body))
            if self.asleep and path.startswith("/v1"):
                return 500, {"error": {"message": "EngineDeadError"}}
            name, _, query = path.rpartition("/")[2].partition("?")
            return getattr(self, name)(body | dict(parse_qsl(query)))

    def sleep(self, body: Body) -> tuple[int, Any]:
        self.asleep = int(body["level"])
        if self.asleep == 2:
            with torch.no_grad():
                for parameter in self.base.parameters():
                    parameter.zero_()
        return 200, b""

    def wake_up(self, body: Body) -> tuple[int, Any]:
        self.asleep = 0
        return 200, b""

    def pause(self, body: Body) -> tuple[int, Any]:
        assert body["mode"] == "keep"
        self.paused = True
        return 200, {"status": "paused"}

    def is_paused(self, body: Body) -> tuple[int, Any]:
        return (404, {"detail": "Not Found"}) if "closed" in self.faults else (200, {"is_paused": self.paused})

    def resume(self, body: Body) -> tuple[int, Any]:
        self.paused = False
        self.lock.notify_all()
        return 200, {"status": "resumed"}

    def models(self, body: Body) -> tuple[int, Any]:
        length = 40 if "narrow" in self.faults else 2048
        base = {"id": "base", "parent": None, "max_model_len": length}
        return 200, {"data": [base, *({"id": name, "parent": "base"} for name in self.adapters)]}

    def load_lora_adapter(self, body: Body) -> tuple[int, Any]:
        if not (Path(body["lora_path"]) / "adapter_config.json").is_file():
            return 404, {"error": {"message": f"No adapter found for {body['lora_path']}"}}
        fresh = AutoModelForCausalLM.from_pretrained(self.folder)
        loaded = PeftModel.from_pretrained(fresh, body["lora_path"]).merge_and_unload().eval()
        if body["lora_name"] in self.adapters:
            return 400, {"error": {"message": f"The lora adapter '{body['lora_name']}' has already been loaded."}}
        self.loaded = [*self.loaded, loaded][-2:]
        self.adapters[body["lora_name"]] = (
            self.base if "deaf" in self.faults else self.loaded[0] if "late" in self.faults else loaded
        )
        self.most = max(self.most, len(self.adapters))
        return 200, "Success"

    def unload_lora_adapter(self, body: Body) -> tuple[int, Any]:
        if self.adapters.pop(body["lora_name"], None) is None:
            return 404, {"error": {"message": f"The lora adapter '{body['lora_name']}' cannot be found."}}
        return 200, "Success"

    def collective_rpc(self, body: Body) -> tuple[int, Any]:
        if "closed" in self.faults:
            return 404, {"detail": "Not Found"}
        assert body["method"] == "reload_weights" and self.paused
        files = sorted(Path(body["kwargs"]["weights_path"]).glob("*.safetensors"))
        self.in_memory.append(all(file.is_symlink() for file in files))
        if "apart" in self.faults and self.in_memory[-1]:
            return 500, {"error": {"message": "Cannot find any model weights"}}
        found = {name: tensor for file in files for name, tensor in load_file(file).items()}
        assert found.keys() == dict(self.base.named_parameters()).keys()
        if "deaf" not in self.faults:
            self.base.load_state_dict(found)
        self.replaced += 1
        return 200, {"results": [None]}

    def reset_prefix_cache(self, body: Body) -> tuple[int, Any]:
        held = self.under_way and body.get("reset_running_requests") != "true"
        return 200, {"success": not held and not self.faults.pop("sticky", 0)}

    @torch.no_grad()
    def completions(self, body: Body) -> tuple[int, Any]:
        if self.faults.get("broken", 0) > 0:
            self.faults["broken"] -= 1
            return 500, {"error": {"message": "EngineDeadError"}}
        model = self.base if body["model"] == "base" else self.adapters.get(body["model"])
        if model is None:
            return 404, {"error": {"message": f"The model `{body['model']}` does not exist."}}
        prompt = list(body["prompt"])
        choice: Body = {"prompt_token_ids": prompt, "prompt_logprobs": None}
        if "prompt_logprobs" in body:
            table = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
            if unit := self.faults.get("noisy", 0) / 1000:
                table += unit * (2 * torch.rand(table.shape) - 1)
            if (num := body["prompt_logprobs"]) > (most := self.faults.get("likeliest", 20)):
                message = f"Requested prompt logprobs of {num}, which is greater than max allowed: {most}"
                return 400, {"error": {"message": message}}
            given: list[Body | None] = [
                {str(t): {"logprob": row[t].item()} for t in (own, *row.topk(min(num, len(row))).indices.tolist())}
                for row, own in zip(table, prompt[1:], strict=False)
            ]
            self.scorings += 1
            if self.scorings >= self.faults.get("mute", math.inf):
                given[len(given) // 2] = None
            choice["prompt_logprobs"] = [None, *given]
            return 200, {"choices": [choice]}
        self.under_way += 1
        ids, logprobs = self.sampled(model, prompt, body)
        self.under_way -= 1
        if self.faults.get("aborting", 0) > 0:
            self.faults["aborting"] -= 1
            ids, logprobs, choice["finish_reason"] = ids[:1], logprobs[:1], "abort"
        choice |= {"token_ids": None if "textual" in self.faults else ids, "logprobs": {"token_logprobs": logprobs}}
        return 200, {"choices": [choice], "system_fingerprint": "engine-1"}

    def sampled(self, model: Any, prompt: list[int], body: Body) -> tuple[list[int], list[float]]:
        generator = torch.Generator().manual_seed(body.get("seed", len(self.requests)))
        ids: list[int] = []
        logprobs: list[float] = []
        temperature, replaced = body["temperature"] or 1.0, self.replaced
        while len(ids) < body["max_tokens"] and (not ids or ids[-1] not in body["stop_token_ids"]):
            self.lock.wait(1e-4)  # others are served between two tokens, and may pause the next one
            spans = len(ids) == self.faults.get("spanning")
            self.held += spans
            self.lock.wait_for(lambda: not self.paused and (not spans or self.replaced > replaced))  # noqa: B023
            logits = model(torch.tensor([prompt + ids])).logits[0, -1]
            shaped = (logits / temperature).log_softmax(-1)
            greedy = body["temperature"] == 0
            token = int(shaped.argmax() if greedy else torch.multinomial(shaped.exp(), 1, generator=generator))
            ids.append(token)
            told = logits.log_softmax(-1) if "raw" in self.faults else shaped
            logprobs.append(told[token].item())
        return ids, logprobs


PIPE = """
import asyncio, sys

async def join(reader, writer):
    while data := await reader.read(65536):
        writer.write(data)
    writer.close()

async def both(reader, writer):
    theirs = await asyncio.open_connection("127.0.0.1", {port})
    await asyncio.gather(join(reader, theirs[1]), join(theirs[0], writer), return_exceptions=True)

async def main():
    server = await asyncio.start_server(both, "127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1]))
    await server.serve_forever()

asyncio.run(main())
"""


def interpreter(engine: Engine, path: Path) -> Path:
    """A program in the place of a Python with vLLM: what it starts leads to the engine, in a moment.

    The server is then the run's own, so that requests carry seeds.
    """
    path.write_text(f"#!{sys.executable}\n" + PIPE.format(port=urlsplit(engine.url).port))
    path.chmod(0o755)
    return path


@contextmanager
def running(folder: Path, **faults: int) -> Iterator[Engine]:
    """An engine on a loopback port until the block ends."""
    engine = Engine(folder, faults)

    class Asked(Handler):
        def get(self) -> None:
            self.send(*engine.answer(self.path, {}))

        def post(self) -> None:
            self.send(*engine.answer(self.path, json.loads(self.body())))

    with listening(Asked) as url:
        engine.url = f"{url}/v1"
        yield engine
