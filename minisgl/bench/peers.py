"""Other engines on the same requests (`--compare`), each in a process of its own that is gone before ours starts.

    ours                               the peer's process: python -m minisgl.bench.peer_process SPEC RESULT
      write SPEC (model, workloads) ---> make a Player, play the same rounds (`drive`), write RESULT
      read RESULT <--------------------- exit: its memory, the GPU's too, is free again

So both engines play rounds that one generator makes from one seed, on one machine, in one run; a Player is all that
differs. Only the peers that are installed can be asked; the others' error is the command that installs them.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from .drive import Played, Player, play
from .twins import TWINS, Ask, Rounds
from .workloads import BenchError


@dataclass(frozen=True)
class Peer:
    """module: what must be importable.  player: "module:class" within this package, made with the spec."""

    name: str
    module: str
    pip: str
    player: str


PEERS = {
    peer.name: peer
    for peer in (
        Peer("hf", "transformers", "transformers", "peer_hf:HuggingFacePlayer"),
        Peer("llamacpp", "llama_cpp", "llama-cpp-python", "peer_llamacpp:LlamaCppPlayer"),
        Peer("vllm", "vllm", "vllm", "peer_vllm:VllmPlayer"),
        Peer("sglang", "sglang", "sglang", "peer_sglang:SglangPlayer"),
        Peer("guidance", "guidance", "guidance", "peer_guidance:GuidancePlayer"),
    )
}


@dataclass(frozen=True)
class Job:
    """Rounds to play: a twin by name, or rounds as they were recorded."""

    name: str
    scale: float = 1.0
    seed: int | None = None
    recorded: Sequence[Sequence[Ask]] | None = None

    def rounds(self) -> Rounds:
        return TWINS[self.name].rounds(self.scale, self.seed) if self.recorded is None else _replay(self.recorded)

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        recorded = None
        if self.recorded is not None:
            recorded = [[_plain_ask(ask) for ask in asks] for asks in self.recorded]
        return {"name": self.name, "scale": self.scale, "seed": self.seed, "recorded": recorded}

    @classmethod
    def of(cls, plain: dict[str, Any]) -> Job:
        if plain["recorded"] is not None:
            plain = plain | {"recorded": [[_ask(entry) for entry in asks] for asks in plain["recorded"]]}
        return cls(**plain)


def _replay(recorded: Sequence[Sequence[Ask]]) -> Rounds:
    for asks in recorded:
        yield list(asks)


def _plain_ask(ask: Ask) -> dict[str, Any]:
    prompt = ask.prompt if isinstance(ask.prompt, str) else ask.prompt.tolist()
    return asdict(ask) | {"prompt": prompt}


def _ask(entry: dict[str, Any]) -> Ask:
    fields = dict(entry)
    if not isinstance(entry["prompt"], str):
        fields["prompt"] = np.array(entry["prompt"], np.int32)
    return Ask(**fields)


@dataclass(frozen=True)
class Outcome:
    """What a peer's process reported.  start: seconds from its beginning to the first answer; runs by job name."""

    version: str
    start: float
    runs: dict[str, list[Played]]


def require(name: str) -> None:
    """Raises BenchError, with the pip command, if the peer is not installed."""
    peer = PEERS[name]
    if importlib.util.find_spec(peer.module) is None:
        raise BenchError(f"--compare {name}: {peer.module} is not installed: pip install {peer.pip}")


def run_peer(name: str, jobs: Sequence[Job], reps: int, model: dict[str, Any]) -> Outcome:
    """Play `jobs` `reps` times each on peer `name`, in a process of its own.

    model: folder, gguf (or None), load_format, dtype, device, max_context, has_tokenizer.  Raises BenchError, with the
    reason, if it fails.
    """
    require(name)
    with tempfile.TemporaryDirectory(prefix="minisgl-bench-") as scratch:
        spec, result = Path(scratch) / "spec.json", Path(scratch) / "result.json"
        spec.write_text(json.dumps({"peer": name, "reps": reps, "model": model, "jobs": [j.plain() for j in jobs]}))
        root = str(Path(__file__).parents[2])
        paths = [path for path in (os.environ.get("PYTHONPATH"), root) if path]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        command = [sys.executable, "-m", "minisgl.bench.peer_process", str(spec), str(result)]
        ended = subprocess.run(command, env=environment, stdout=2)  # its prints are progress to us
        if not result.exists():
            raise BenchError(f"--compare {name}: its process ended with status {ended.returncode} (see above)")
        found = json.loads(result.read_text())
    if "error" in found:
        raise BenchError(f"--compare {name}: {found['error']}")
    runs = {job: [Played(**run) for run in runs] for job, runs in found["runs"].items()}
    return Outcome(found["version"], found["start"], runs)


def warm_up(player: Player, job: Job) -> None:
    """A twentieth of the workload with another seed, or the first requests of a recorded one: compiled kernels and
    first-touched memory are no part of the figures."""
    if job.recorded is not None:
        asks = [Ask(ask.prompt, min(ask.max_new_tokens, 8)) for ask in job.recorded[0][:8]]
        play(player, _replay([asks]))
    else:
        play(player, Job(job.name, job.scale * 0.05, (job.seed or 0) + 1000).rounds())
    player.flush()


def measure(player: Player, job: Job, reps: int, label: str) -> list[Played]:
    """`reps` repetitions, each on an empty cache, after a warm-up."""
    warm_up(player, job)
    runs = []
    for rep in range(reps):
        player.flush()
        with tqdm(desc=f"{label}: {job.name} {rep + 1}/{reps}", unit="req") as bar:
            runs.append(play(player, job.rounds(), bar.update))
    player.flush()
    return runs
