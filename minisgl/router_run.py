"""`python -m minisgl route`: the router's command line, and the router in a thread for programs.

    with RouterThread(RouterOptions(CacheAware(), ["http://127.0.0.1:30001", "http://127.0.0.1:30002"])) as router:
        backend = RuntimeEndpoint(router.url)
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable

from .router_policy import POLICIES, CacheAware, Policy

LOOPBACK = ("127.0.0.1", "localhost", "::1")
FILES = 1 << 16  # that the router may have open, if the system lets it
GRACE = 30  # seconds that requests in flight get to end after SIGTERM


def main(argv: list[str]) -> int:
    """Serve until SIGINT or SIGTERM; returns the exit status."""
    args = parser().parse_args(argv)
    try:
        from .router import Router, RouterOptions
    except ImportError as error:
        print(f"minisgl: the router needs {error.name}: pip install 'minisgl[server]'", file=sys.stderr)
        return 2
    key = args.api_key or os.environ.get("MINISGL_API_KEY") or None
    local = args.host in LOOPBACK
    if not local and key is None:
        print(f"minisgl: on {args.host} without --api-key: anybody who reaches it may use it", file=sys.stderr)
    try:
        if not 0 <= args.port < 1 << 16:
            raise ValueError(f"--port must be from 0 to 65535, got {args.port}")
        options = RouterOptions(
            make_policy(args),
            args.workers,
            api_key=key,
            open_admin=local,
            retries=args.retries,
            max_body=args.max_body_mb << 20,
            eviction_interval=args.eviction_interval,
            health_interval=args.health_interval,
            health_timeout=args.health_timeout,
            connect_timeout=args.connect_timeout,
            stream_timeout=args.stream_timeout,
        )
        router = Router(options)
    except ValueError as error:
        print(f"minisgl: {error}", file=sys.stderr)
        return 2

    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s: %(message)s")
    logging.getLogger("minisgl").setLevel(logging.INFO)

    _raise_file_limit()

    def ready(url: str) -> None:
        up = len(router.workers.healthy())
        workers = f"{up} of {len(router.workers)} workers healthy"
        print(f"minisgl: router ready on {url} ({args.policy}, {workers})", flush=True)

    server = make_server(router.app, args.host, args.port, ready)
    server.run()
    return 0 if server.started else 1


def _raise_file_limit() -> None:
    """A request takes two sockets, and many systems begin with a limit of 1,024 files."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="minisgl route",
        description="One address for many workers, each request to the one whose cache has its prefix.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    p.add_argument("--workers", nargs="*", default=[], metavar="URL", help="more can join by POST /add_worker?url=...")
    p.add_argument("--policy", choices=list(POLICIES), default="cache_aware")
    p.add_argument("--host", default="127.0.0.1")
    p.add_argument("--port", type=int, default=30000, help="0: a free one")
    p.add_argument("--api-key", help="the workers' key: sent with probes, asked of everybody but for health checks "
                   "(or MINISGL_API_KEY)")  # fmt: skip
    p.add_argument("--balance-abs-threshold", type=int, default=32, help="cache_aware: requests in flight by which "
                   "workers may differ")  # fmt: skip
    p.add_argument("--balance-rel-threshold", type=float, default=1.5, help="cache_aware: ... or the factor")
    p.add_argument("--cache-threshold", type=float, default=0.3, help="cache_aware: share of a prompt that must match")
    p.add_argument("--max-tree-chars", type=int, default=1 << 26, help="cache_aware: bound on the trees together")
    p.add_argument("--eviction-interval", type=float, default=1.0, help="seconds between the trees' upkeep")
    p.add_argument("--health-interval", type=float, default=2.0, help="seconds between probes of a worker")
    p.add_argument("--health-timeout", type=float, default=5.0, help="seconds that a probe may take")
    p.add_argument("--connect-timeout", type=float, default=5.0, help="seconds to reach a worker")
    p.add_argument("--stream-timeout", type=float, default=600.0, help="seconds for which a worker may be silent in "
                   "the middle of an answer")  # fmt: skip
    p.add_argument("--retries", type=int, default=3, help="more workers that a request is tried on")
    p.add_argument("--max-body-mb", type=int, default=64, help="MiB of a request")
    return p


def make_policy(args: argparse.Namespace) -> Policy:
    """The policy of --policy; ValueError for a threshold that is out of range."""
    if args.policy != "cache_aware":
        return POLICIES[args.policy]()
    return CacheAware(
        balance_abs_threshold=args.balance_abs_threshold,
        balance_rel_threshold=args.balance_rel_threshold,
        cache_threshold=args.cache_threshold,
        max_tree_chars=args.max_tree_chars,
    )


def make_server(app, host: str, port: int, ready: Callable[[str], None]):
    """A uvicorn server that calls `ready` with its address once it takes requests."""
    import uvicorn

    from .server_connection import Connection, HttpServer

    class Server(HttpServer):
        async def startup(self, sockets=None) -> None:
            await super().startup(sockets)
            if self.started:
                bound = self.servers[0].sockets[0].getsockname()
                name = f"[{bound[0]}]" if ":" in bound[0] else bound[0]
                ready(f"http://{name}:{bound[1]}")

    # the workers' answers bring their own Date and Server
    config = uvicorn.Config(
        app, host, port, http=Connection, log_config=None, access_log=False, server_header=False, date_header=False,
        timeout_graceful_shutdown=GRACE, lifespan="on", ws="none",
    )  # fmt: skip
    return Server(config)


class RouterThread:
    """A router on a thread of its own.  `url` once entered; leaving ends it, after the requests in flight."""

    def __init__(self, options, *, host: str = "127.0.0.1", port: int = 0):
        from .router import Router

        self.router = Router(options)
        self.url = ""
        self._server = make_server(self.router.app, host, port, lambda url: setattr(self, "url", url))
        self._thread = threading.Thread(target=self._server.run, name="minisgl-router", daemon=True)

    def add_worker(self, url: str) -> None:
        """Begin to watch and use `url`.  From any thread, as `remove_worker`."""
        self._call(lambda: self.router.workers.add(url))

    def remove_worker(self, url: str) -> None:
        """Send nothing more to `url`."""
        self._call(lambda: self.router.workers.remove(url))

    def _call(self, function: Callable[[], object]) -> None:
        with contextlib.suppress(RuntimeError):  # the router has ended, and its loop with it
            self.router.loop.call_soon_threadsafe(function)

    def __enter__(self) -> RouterThread:
        self._thread.start()
        while not self.url:
            if not self._thread.is_alive():
                raise RuntimeError("the router did not start: is its port taken?")
            time.sleep(0.01)
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.should_exit = True
        self._thread.join()
