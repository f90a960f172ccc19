"""Many workers on Ray: `python -m minisgl serve --workers 2 --engine ray`, or in a program

    with Cluster(2, model=...) as cluster:
        set_default_backend(RuntimeEndpoint(cluster.url))

               ┌───────────────────────── driver ─────────────────────────┐
    client ──▶ │ router (cache-aware)            supervisor of each actor │
               └────┬─────────────┬───────────────────────▲───────────────┘
               HTTP │             │                       │ url(), stay()
               ┌────▼─────┐  ┌────▼─────┐                 │
               │ Runtime  │  │ Runtime  │  Ray actors, max_restarts=-1
               │ + Server │  │ + Server │ ────────────────┘
               └──────────┘  └──────────┘

What Ray is good at is Ray's: where an actor runs, with which GPU or how many CPU cores, that it is started again when
its process or its machine dies.  What the server and the router do already they do here, too: the wire, streaming,
the choice of a worker, requests that have not begun tried elsewhere.  Between them remains one question, at which
address an actor is now.  `url()` answers it; Ray holds the call back until the actor is there, however often it has to
be started.  `stay()` never returns: when it fails, the process has died, and the question is to be asked anew.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import signal
import threading
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .router_policy import CacheAware, Policy
from .router_run import LOOPBACK, RouterThread

FOREVER = -1  # Ray's word for as often as needed


class _Worker:
    """The actor: a Runtime and its server."""

    def __init__(self, model: str | None, options: Mapping[str, Any], host: str, server: Mapping[str, Any]):
        from .runtime import Runtime
        from .server import Server

        self._runtime = Runtime(model, **options)
        if host == "":
            import ray

            host = ray.util.get_node_ip_address()
        self._server = Server(self._runtime, host, 0, **server)

    def url(self) -> str:
        return self._server.url

    def pid(self) -> int:
        return os.getpid()

    def stay(self) -> None:
        threading.Event().wait()


class Cluster:
    """`workers` engines on Ray behind one cache-aware router; `url` is where it answers.

    workers           how many actors
    model, options    what Runtime is given
    policy            the router's; default CacheAware()
    host, port        of the router; port 0: a free one
    api_key           that clients must send.  Needed when Ray has several machines: workers are then reached over the
                      network, on one machine over loopback only
    server            more keywords for each worker's Server (model_names, limits)
    address           of a running Ray cluster, if this process is not connected to one; None: the one that it is
                      connected to, or a new local one
    cpus, gpus        for each worker; default: one GPU if Ray has any, and an even share of this cluster's cores
    start_timeout     seconds in which the first worker must be there

    Leaving the context ends the actors, and Ray if it was started here.  ImportError without Ray; ValueError for what
    does not fit; whatever a worker's construction raises (a model that is not there) is raised here, too.
    """

    def __init__(
        self,
        workers: int,
        model: str | Path | None = None,
        options: Mapping[str, Any] | None = None,
        *,
        policy: Policy | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        api_key: str | None = None,
        server: Mapping[str, Any] | None = None,
        address: str | None = None,
        cpus: float | None = None,
        gpus: float | None = None,
        start_timeout: float = 600.0,
    ):
        if not isinstance(workers, int) or isinstance(workers, bool) or workers < 1:
            raise ValueError(f"workers must be an integer of at least 1, got {workers!r}")
        if importlib.util.find_spec("ray") is None:
            raise ImportError("a cluster needs Ray: pip install 'minisgl[ray,server]'")
        from .router import RouterOptions

        ray: Any = importlib.import_module("ray")
        self._ray = ray
        self._closing = threading.Event()
        self._started_ray = not ray.is_initialized()
        if address is not None and not self._started_ray:
            raise ValueError(f"address={address!r}: this process is connected to Ray already, leave it out to use that")
        if self._started_ray:
            ray.init(address, include_dashboard=False, log_to_driver=False, logging_level="warning")
        try:
            several = len([node for node in ray.nodes() if node["Alive"]]) > 1
            if several and api_key is None:
                raise ValueError("api_key is needed: on Ray's several machines workers are open to the network")
            share = _resources(ray.cluster_resources(), workers, cpus, gpus)
            actor = ray.remote(max_restarts=FOREVER, max_task_retries=FOREVER, max_concurrency=4)(_Worker)
            started = actor.options(runtime_env={"env_vars": _threads(share["num_cpus"])}, **share)
            keywords = {**(server or {}), "api_key": api_key}
            model = str(Path(model).resolve()) if model is not None and Path(model).exists() else model
            where = "" if several else "127.0.0.1"
            self.actors = [started.remote(model, dict(options or {}), where, keywords) for _ in range(workers)]
            self._await_first(start_timeout)
            routing = RouterOptions(policy or CacheAware(), api_key=api_key, open_admin=host in LOOPBACK)
            self._router = RouterThread(routing, host=host, port=port)
            self._router.__enter__()
        except BaseException:
            self._end_actors()
            raise
        self.url = self._router.url
        if api_key is None and host not in LOOPBACK:
            warnings.warn(f"serving on {host} without an API key: anybody who can reach it may use it", stacklevel=2)
        for actor in self.actors:
            threading.Thread(target=self._supervise, args=(actor,), name="minisgl-cluster", daemon=True).start()

    @property
    def workers(self) -> dict[str, bool]:
        """URL of each worker -> whether it is healthy."""
        return {worker.url: worker.healthy for worker in self._router.router.workers}

    def _await_first(self, timeout: float) -> None:
        """A construction that fails fails for all of them: say so instead of starting again for ever."""
        calls = [actor.url.remote() for actor in self.actors]
        ready, _ = self._ray.wait(calls, num_returns=1, timeout=timeout)
        if not ready:
            raise TimeoutError(f"no worker was there after {timeout:g} s: has Ray the resources for one?")
        try:
            self._ray.get(ready[0])
        except self._ray.exceptions.RayActorError as error:
            cause = str(error).strip().splitlines()
            raise ValueError(f"a worker did not start: {cause[-1] if cause else error!r}") from None

    def _supervise(self, actor: Any) -> None:
        """The router knows the actor's address as long as there is a process behind it."""
        errors = self._ray.exceptions
        while not self._closing.is_set():
            url = None
            try:
                url = self._ray.get(actor.url.remote())
                self._router.add_worker(url)
                self._ray.get(actor.stay.options(max_task_retries=0).remote())
            except errors.ActorUnavailableError:
                pass  # Ray starts it again
            except errors.RayError:
                if self._closing.wait(1.0):
                    return
            finally:
                if url is not None:
                    self._router.remove_worker(url)

    def close(self) -> None:
        """End the router after the requests in flight, then the actors."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._router.__exit__()
        self._end_actors()

    def _end_actors(self) -> None:
        self._closing.set()
        for actor in getattr(self, "actors", ()):
            with contextlib.suppress(Exception):  # it may be gone already
                self._ray.kill(actor)
        if self._started_ray:
            self._ray.shutdown()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Cluster({self.url}, {len(self.actors)} workers)"


def serve_cluster(workers: int, model: str | None, options: Mapping[str, Any], **keywords: Any) -> int:
    """`serve --engine ray`: a Cluster until SIGINT or SIGTERM; returns the exit status."""
    stop = threading.Event()
    try:
        cluster = Cluster(workers, model, options, **keywords)
    except ImportError as error:
        raise ValueError(str(error)) from error
    with cluster:
        # after Ray's start, which puts a handler for SIGTERM in place that ends the process at once
        before = {n: signal.signal(n, lambda *_: stop.set()) for n in (signal.SIGINT, signal.SIGTERM)}
        try:
            print(f"minisgl: ready on {cluster.url} ({workers} workers on Ray)", flush=True)
            while not stop.wait(1.0):
                pass
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
    return 0


def _resources(total: Mapping[str, float], workers: int, cpus: float | None, gpus: float | None) -> dict[str, float]:
    """What each actor asks Ray for: a GPU if there are any, and an even share of the cores."""
    if gpus is None:
        gpus = 1.0 if total.get("GPU", 0) else 0.0
    if cpus is None:
        share = total.get("CPU", 1.0) / workers
        cpus = float(int(share)) if share >= 1 else share
    needs = {"GPU": gpus * workers, "CPU": cpus * workers}
    for name, need in needs.items():
        if need > total.get(name, 0.0):
            raise ValueError(f"{workers} workers need {need:g} {name}s, Ray has {total.get(name, 0.0):g}")
    return {"num_cpus": cpus, "num_gpus": gpus}


def _threads(cpus: float) -> dict[str, str]:
    """As many threads as the actor has cores, so that workers do not fight over them."""
    return {"OMP_NUM_THREADS": str(max(int(cpus), 1))}
