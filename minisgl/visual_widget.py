"""The player in a notebook: an anywidget model, and the thread that feeds it while the engine runs.

    engine thread  -> EventLog            never waits for anybody
    this thread    reads the log a few times a second, sends the new steps to the browser
    main thread    busy in the cell that runs your program; Ctrl-C reaches it as always

A thread and not a task of the kernel's event loop, because that loop stands still while a cell runs, which is when
there is something to see.  It lives only while the view is shown somewhere, the view is alive and more may come; it
holds no reference to the view.  Comms may be written from any thread (ipykernel hands messages to its own).
"""

from __future__ import annotations

import contextvars
import functools
import sys
import threading
import weakref
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from .visual_data import dumps, encode_history
from .visual_page import asset, stylesheet

if TYPE_CHECKING:
    from .visual import RadixView

INTERVAL = 0.15  # seconds between two looks at the log


def in_notebook() -> bool:
    """Whether there is a Jupyter kernel to open a widget in, and anywidget to do it."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None and find_spec("anywidget") is not None


@functools.cache
def _widget_class() -> type:
    try:
        import anywidget
        import traitlets
    except ImportError:
        raise ImportError("the widget needs anywidget: pip install 'minisgl[notebook]'") from None

    class RadixWidget(anywidget.AnyWidget):
        """The model behind the player; see `assets/radix_view.js`."""

        _esm = asset("radix_view.js")
        _css = stylesheet()
        data = traitlets.Unicode().tag(sync=True)
        position = traitlets.Int(-1).tag(sync=True)
        playing = traitlets.Bool(False).tag(sync=True)

    return RadixWidget


class Player:
    """Keeps the widget of a view up to date."""

    def __init__(self, view: RadixView):
        make = _widget_class()
        self._view = weakref.ref(view)
        self._send_lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._open = 0  # places where it is shown
        self._encode(view)
        self.widget = make(data=self._data, position=-1 if view.following else view.first_shown())
        self.widget.observe(self._moved, names="position")
        self.widget.on_msg(self._on_message)
        weakref.finalize(view, self.close)

    # ---- from Python to the browser ------------------------------------------------------------------------------

    def _encode(self, view: RadixView) -> None:
        self._history = view.history
        data, self._encoder = encode_history(self._history, view.decode, max_nodes=view.max_nodes, live=view.live)
        self._steps: list[dict[str, Any]] = list(data["steps"])
        self._data = dumps(data)

    def push(self) -> bool:
        """Send what is new.  Returns whether more may come."""
        view = self._view()
        if view is None:
            return False
        with self._send_lock:
            live = view.live  # asked first: what came before the end is sent below
            history = view.history
            if history is not self._history:
                self._encode(view)
                self.widget.data = self._data
                self.widget.send({"type": "reset", "data": self._data})
                return live
            new = [self._encoder.step(step) for step in history.steps[len(self._steps) + 1 :]]
            if new or not live:
                start = len(self._steps) + 1
                self._steps += new
                self.widget.send({"type": "append", "from": start, "steps": new, "live": live})
        return live

    def move(self, position: int, playing: bool | None = None) -> None:
        """Make every place where it is shown go to a position, and play or pause."""
        view = self._view()
        self.push()
        self.widget.unobserve(self._moved, names="position")
        try:
            self.widget.position = -1 if view is not None and view.following else position
        finally:
            self.widget.observe(self._moved, names="position")
        if playing is not None:
            self.widget.playing = playing
        self.widget.send({"type": "goto", "position": position, "playing": playing})

    def show(self) -> dict[str, Any]:
        """The mime bundle's entry; begins to follow."""
        self.follow()
        return {"version_major": 2, "version_minor": 0, "model_id": self.widget.model_id}

    def follow(self) -> None:
        """Start the thread, if there is anything to follow and none runs."""
        view = self._view()
        if view is None or not view.live or (self._thread is not None and self._thread.is_alive()):
            return
        self._stop = threading.Event()
        context = contextvars.copy_context()  # the cell that its messages belong to
        self._thread = threading.Thread(
            target=context.run, args=(_follow, weakref.ref(self), self._stop), name="minisgl-view", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop the thread and close the widget; may be called again."""
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=2)
        self.widget.close()

    # ---- from the browser to Python ------------------------------------------------------------------------------

    def _moved(self, change: Any) -> None:
        view = self._view()
        if view is not None:
            view.moved(change["new"])

    def _on_message(self, _: Any, content: dict[str, Any], buffers: Any) -> None:
        kind = content.get("type")
        if kind == "open":
            self._open += 1
            self.follow()
        elif kind == "closed":
            self._open -= 1
            if self._open <= 0:
                self._stop.set()
        elif kind == "have":
            count = int(content["count"])
            with self._send_lock:
                missing = self._steps[count - 1 :]
                view = self._view()
                if missing:
                    live = view is not None and view.live
                    self.widget.send({"type": "append", "from": count, "steps": missing, "live": live})


def _follow(player: weakref.ref[Player], stop: threading.Event) -> None:
    """The thread: until it is stopped, nothing more may come, or nobody looks."""
    while not stop.wait(INTERVAL):
        alive = player()
        if alive is None or not alive.push():
            return
        del alive  # not held while waiting
