"""One import: files read one after the other into the journal of a run, counted, and filtered by Data-Juicer."""

from collections import Counter
from collections.abc import Iterator

import orjson

from stages.importers import data_juicer, dealt
from stages.importers.base import Drop, Importer
from stages.importers.data_juicer import JuicerConfig
from stages.importers.dealt import BATCH, Read
from stages.importers.duplicates import Known, Seen
from stages.importers.files import Source
from stages.importers.reader import FileCount
from stages.importers.rows import ImportedPayload
from stages.importers.sidecars import Sidecars
from stages.rollouts.reading import conversation
from stages.runs import store
from stages.runs.artifact import Out
from stages.runs.records import Row


class ImportSession:
    """One import: reads file after file into the journal, and counts what was kept and what was dropped.

    `rollouts` lists the units in the order of the files, `effective` says of each whether it entered a training batch.
    """

    def __init__(self, out: Out, sidecars: Sidecars) -> None:
        self.out, self.sidecars = out, sidecars
        self.counts: list[FileCount] = []
        self.drops: list[Drop] = []
        self.rollouts: list[str] = []
        self.effective: dict[str, bool] = {}
        self._seen = Seen()
        self._samples: Counter[tuple[str, str | None]] = Counter()
        self._statistics: dict[str, Row] = {}

    def read(self, source: Source, importer: Importer | None) -> None:
        """Write everything that a file holds, in batches, and count it."""
        count = FileCount(source.label, importer.NAME if importer else "unknown", source.sha256)
        self.counts.append(count)
        batch: list[tuple[str, ImportedPayload, bool]] = []
        for unit, payload in self._units(source, importer, count):
            batch.append((unit, payload, False))
            if len(batch) == BATCH:
                self._write(batch)
        self._write(batch)

    def _write(self, batch: list[tuple[str, ImportedPayload, bool]]) -> None:
        self.out.stop_here()
        self.out.write_all([unit for unit in batch if not self.out.finished(unit[0])])
        batch.clear()

    def _units(
        self, source: Source, importer: Importer | None, count: FileCount
    ) -> Iterator[tuple[str, ImportedPayload]]:
        items = dealt.taken_up(source, self.sidecars, count, self.out)
        for item in items or dealt.read(source, importer, self.sidecars, count):
            if isinstance(item, Drop):
                self.drops.append(item)
            elif (unit := item.known.rollout_id) in self.effective:
                self.effective[unit] |= item.known.effective
                self._drop(item.known, f"{unit} was there before", count)
            elif repeats := self._seen.before(item.known):
                self._drop(item.known, repeats, count)
            else:
                self.effective[unit] = item.known.effective
                self.rollouts.append(unit)
                count.rollouts += 1
                yield unit, self._payload(item, count)

    def _drop(self, known: Known, detail: str, count: FileCount) -> None:
        """A rollout that was read before; PRIME-RL writes those of a training batch a second time."""
        count.dropped["duplicate"] += 1
        self.drops.append(Drop(known.file, known.line, "duplicate", detail))

    def _payload(self, item: Read, count: FileCount) -> ImportedPayload:
        """With its number among the rollouts of its task and model."""
        key, payload = (item.known.task_id, item.known.model), item.payload
        for row in (payload["rollout"], *payload["steps"]):
            row["sample_idx"] = self._samples[key]
        self._samples[key] += 1
        count.missing |= set(payload["origin"]["missing"])
        return payload

    def units(self) -> Iterator[ImportedPayload]:
        """The journal's records of all rollouts, one after the other, in the order of the files; each can be kept."""
        for unit in self.out.journal.read(self.rollouts):
            task, rollout, steps, origin = (unit[name] for name in ("task", "rollout", "steps", "origin"))
            payload = ImportedPayload(task=task, rollout=rollout, steps=steps, origin=origin)
            yield _with_statistics(payload, self._statistics.get(rollout["rollout_id"]))

    def filter(self, config: JuicerConfig) -> None:
        """Leave only the rollouts that a Data-Juicer recipe keeps, with its statistics; the others drop by name.

        A rollout without steps has nothing to judge and stays.
        """
        self.out.progress("Data-Juicer", 0, 1)
        origins: dict[str, Row] = {}
        for unit in self.units():
            if unit["steps"]:
                origins[unit["rollout"]["rollout_id"]] = {name: unit["origin"][name] for name in ("file", "line")}
        conversations = (
            (unit["rollout"]["rollout_id"], conversation(unit["steps"])) for unit in self.units() if unit["steps"]
        )
        judged = data_juicer.judge(conversations, config, self.out.scratch("data-juicer"))
        kept = judged.kept
        counts = {count.file: count for count in self.counts}
        for name, origin in origins.items():
            if name not in kept:
                counts[origin["file"]].rollouts -= 1
                counts[origin["file"]].dropped["data_juicer"] += 1
                why = judged.dropped.get(name, "the recipe")
                self.drops.append(Drop(origin["file"], origin["line"], "data_juicer", f"{name}: dropped by {why}"))
        self.rollouts = [name for name in self.rollouts if name in kept or name not in origins]
        self._statistics = kept


def _with_statistics(unit: ImportedPayload, statistics: Row | None) -> ImportedPayload:
    if statistics is None:
        return unit
    extra = {**orjson.loads(unit["origin"]["extra_json"]), "data_juicer": statistics}
    return {**unit, "origin": {**unit["origin"], "extra_json": store.encode(extra).decode()}}
