"""Pictures of a live engine: the radix tree growing, being hit, split and evicted while your program runs.

    from minisgl import Runtime
    from minisgl.visual import RadixView, ScheduleView, GrammarView, figure4

    runtime = Runtime(events=True)
    view = RadixView(runtime)          # in a notebook: shows itself, and follows the engine
    runtime.generate(["The capital of France is", "The capital of Peru is"])
    view.goto(3); view.play()          # or with its buttons, its slider and the arrow keys
    view.save("tree.html")             # the same player in one file that needs no network

    figure4()                          # the paper's story of RadixAttention, played by the real tree

Every view has three forms: a widget where there is a notebook to show it (`pip install 'minisgl[notebook]'`), a static
SVG everywhere (`svg()`, and in the mime bundle, so that saved notebooks and exports show it), and a page of its own
(`save`).

    events -> visual_source, visual_history (steps) -> visual_layout, visual_svg, visual_picture    static
                                                    -> visual_data -> assets/radix_view.js          the player,
                                                                      in visual_widget or visual_page

The views only read: the log of events and, if the log does not go back to the beginning, a snapshot of the tree.
A notebook that is committed should keep the SVG and not the widget, whose model is gone with the kernel: drop the key
`application/vnd.jupyter.widget-view+json` from its outputs (`static_outputs` does it).
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .events import Event, EventLog
from .visual_data import encode_history
from .visual_history import TreeHistory
from .visual_page import picture_page, player_page
from .visual_picture import radix_picture, story_sheet
from .visual_schedule import Schedule, schedule_picture
from .visual_source import LogReader, RuntimeReader, is_runtime
from .visual_state import Step
from .visual_svg import Text

if TYPE_CHECKING:
    from .fsm import Grammar
    from .runtime import Runtime
    from .visual_grammar import Moment
    from .visual_widget import Player

__all__ = ["GrammarView", "RadixView", "ScheduleView", "TreeHistory", "figure4", "static_outputs"]

MOST_COLUMNS = 200  # steps that a timeline shows unless it is told which
MOST_FRAMES = 120  # pictures in a grammar's page
WIDGET = "application/vnd.jupyter.widget-view+json"


class View(ABC):
    """What all views share: a static picture, a mime bundle, a page."""

    title = ""

    @abstractmethod
    def svg(self) -> str:
        """The picture as SVG."""

    def html(self) -> str:
        """A whole page that shows the view and needs no network."""
        return picture_page(self.title, self.svg())

    def save(self, path: str | Path) -> None:
        """Write the view to a file: a page for .html, the static picture for .svg.  ValueError for other names."""
        suffix = Path(path).suffix.lower()
        if suffix not in (".html", ".htm", ".svg"):
            raise ValueError(f"path must end in .html or .svg, got {str(path)!r}")
        Path(path).write_text(self.svg() if suffix == ".svg" else self.html(), encoding="utf-8")

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        """The forms that a notebook may choose from."""
        return {"text/plain": repr(self), "image/svg+xml": self.svg()}


class RadixView(View):
    """The radix tree and the KV pool, step by step.

    source      a Runtime made with events=True (live: the view follows it), an EventLog, a list of events, or a
                TreeHistory (replay)
    tokenizer   turns token ids into text: anything with `decode(ids)`, or a function; default: the Runtime's own
    max_nodes   most nodes in the picture; the rest is folded into stubs
    width       of the static picture, in pixels
    detail      True: every event is a step; False: bookkeeping is part of the step that it belongs to

    `step` is the position shown: 0 before anything happened, i after step i; a live view follows the newest until
    somebody moves it.  Raises TypeError for another source, ValueError for a Runtime without events and for sizes out
    of range.  `close()`, or leaving a `with` block, ends the following; so does dropping the view.
    """

    title = "Radix tree"

    def __init__(
        self,
        source: Runtime | EventLog | Iterable[Event] | TreeHistory,
        *,
        tokenizer: Any = None,
        max_nodes: int = 300,
        width: int = 900,
        detail: bool = False,
    ):
        _check_least(max_nodes=(max_nodes, 1), width=(width, 320))
        self.max_nodes, self.width = max_nodes, width
        self._lock = threading.RLock()  # the history is fed by whoever looks, and by the widget's thread
        self._reader: LogReader | None = None
        self._history = TreeHistory(detail=detail)
        if isinstance(source, TreeHistory):
            source.close()
            self._history = source
        elif isinstance(source, EventLog):
            self._reader = LogReader(source, detail)
        elif is_runtime(source):
            self._reader = RuntimeReader(source, detail)  # pyright: ignore[reportArgumentType]
            tokenizer = tokenizer if tokenizer is not None else getattr(source, "_tokenizer", None)
        else:
            self._history.feed(_events(source))
            self._history.close()
        self.decode = _decoder(tokenizer)
        self._position: int | None = None  # None: the newest
        self._player: Player | None = None
        if self._reader is None:
            self._position = len(self._history) - 1

    # ---- where it is ---------------------------------------------------------------------------------------------

    @property
    def history(self) -> TreeHistory:
        """The steps and states so far, what has happened since the last look included."""
        with self._lock:
            if self._reader is not None:
                while self._reader.poll():
                    pass
                self._history = self._reader.history
            return self._history

    @property
    def live(self) -> bool:
        """Whether more may come."""
        return self._reader is not None and not self._reader.ended

    @property
    def steps(self) -> list[Step]:
        """All positions: `steps[0]` is the state before anything happened, `steps[i].title` tells step i."""
        return list(self.history.steps)

    @property
    def step(self) -> int:
        """The position shown."""
        last = len(self.history) - 1
        return last if self._position is None else min(self._position, last)

    def goto(self, position: int) -> RadixView:
        """Show a position, from 0 to `len(steps) - 1`; negative ones count from the end.  IndexError out of range."""
        count = len(self.history)
        if not -count <= position < count:
            raise IndexError(f"position must be from 0 to {count - 1}, got {position}")
        self._position = position % count
        self._tell()
        return self

    def goto_request(self, rid: str) -> RadixView:
        """Show the next step that is about a request: the first one after the present position, or the very first.

        Raises KeyError, naming the requests that there are, when no step is about it.
        """
        history = self.history
        try:
            return self.goto(history.find(rid, self.step))
        except KeyError:
            try:
                return self.goto(history.find(rid))
            except KeyError:
                known = ", ".join(history.requests()[:8]) or "none"
                raise KeyError(f"no step is about request {rid!r}; there are: {known}") from None

    def play(self) -> RadixView:
        """Let the widget run from here (from the beginning, if it stands at the end)."""
        if self.step == len(self._history) - 1:
            self._position = 0
        self._tell(playing=True)
        return self

    def pause(self) -> RadixView:
        """Stop the widget where it is."""
        self._tell(playing=False)
        return self

    @property
    def following(self) -> bool:
        """Whether it shows the newest step, whatever comes."""
        return self._position is None

    def moved(self, position: int) -> None:
        """The widget was moved by hand; -1: it follows."""
        self._position = None if position < 0 else position

    def follow(self) -> RadixView:
        """Show the newest step, and go on with what comes."""
        self._position = None
        self._tell()
        return self

    def _tell(self, **changes: Any) -> None:
        if self._player is not None:
            self._player.move(self.step, **changes)

    # ---- how it is shown -----------------------------------------------------------------------------------------

    def svg(self, step: int | None = None) -> str:
        """The static picture of a position (default: the one shown; of a story, all its states on a sheet).

        Raises IndexError for a position out of range.
        """
        history = self.history
        with self._lock:
            if step is None and history.manual:
                return story_sheet(history, max(self.width, 1080), self.decode)
            at = self.step if step is None else step
            count = len(history)
            if not -count <= at < count:
                raise IndexError(f"step must be from 0 to {count - 1}, got {at}")
            return radix_picture(history, at % count, self.width, self.decode, self.max_nodes)

    def html(self) -> str:
        """A page with the animated player, at the position shown; needs no network."""
        history = self.history
        with self._lock:
            data, _ = encode_history(history, self.decode, max_nodes=self.max_nodes, at=self.first_shown())
        return player_page(self.title, "radix_view.js", data, self.svg())

    def first_shown(self) -> int:
        """Where a player begins: at the position shown, but a story at its beginning."""
        return 0 if self._history.manual and self._position == len(self._history) - 1 else self.step

    @property
    def widget(self) -> Any:
        """The player as a Jupyter widget (made on first use).  ImportError if anywidget is not installed."""
        if self._player is None:
            from .visual_widget import Player

            self._player = Player(self)
        return self._player.widget

    def close(self) -> None:
        """End the widget and stop following; what was seen stays in `steps`."""
        with self._lock:
            self._history = self.history
            self._reader = None
        if self._player is not None:
            self._player.close()
            self._player = None

    def __enter__(self) -> RadixView:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        history = self.history
        step = history.steps[self.step]
        where = f"step {self.step} of {len(history) - 1}" if len(history) > 1 else "no steps yet"
        tokens = f"{step.stored} tokens in the tree"
        return f"RadixView({where}: {step.title}; {tokens}{', live' if self.live else ''})"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        bundle = super()._repr_mimebundle_()
        from .visual_widget import in_notebook

        if in_notebook():
            self.widget  # noqa: B018  (makes it)
            assert self._player is not None
            bundle[WIDGET] = self._player.show()
        return bundle


class ScheduleView(View):
    """A timeline of steps: who is in which batch, with a prompt's chunk or a decode; what host and device did.

    source        a Runtime made with events=True, an EventLog, or a list of events
    steps         (first, last + 1) of the steps to show; negative ones count from the end
    max_requests  most rows
    width         in pixels

    Looks at the log whenever it is shown.  `schedule` has the figures behind the picture: steps with their times and
    requests.  Raises TypeError for another source, ValueError for a Runtime without events and a range without steps.
    """

    title = "Schedule"

    def __init__(
        self,
        source: Runtime | EventLog | Iterable[Event],
        *,
        steps: tuple[int, int] | None = None,
        max_requests: int = 40,
        width: int = 900,
    ):
        _check_least(max_requests=(max_requests, 1), width=(width, 320))
        log: Any = getattr(source, "events") if is_runtime(source) else source  # noqa: B009
        if log is None:
            raise ValueError("source records no events: make it with Runtime(events=True)")
        self._log: EventLog | None = log if isinstance(log, EventLog) else None
        self._cursor = 0
        self._schedule = Schedule([] if self._log is not None else _events(log))
        self.max_requests, self.width = max_requests, width
        self.range = steps
        self._span()  # to refuse a bad range now

    @property
    def schedule(self) -> Schedule:
        """Steps and requests so far."""
        if self._log is not None:
            events = self._log.since(self._cursor)
            self._schedule.feed(events)
            if events:
                self._cursor = events[-1].seq + 1
        return self._schedule

    def _span(self) -> tuple[int, int]:
        count = len(self.schedule.steps)
        if self.range is None:
            return max(count - MOST_COLUMNS, 0), count
        first, last = (n + count if n < 0 else n for n in self.range)
        if not 0 <= first < min(last, count):
            raise ValueError(f"steps must be (first, last + 1) of {count} steps, got {self.range}")
        return first, min(last, count)

    def svg(self) -> str:
        """The timeline as SVG."""
        return schedule_picture(self.schedule, self.width, self._span(), self.max_requests)

    def __repr__(self) -> str:
        schedule = self.schedule
        busy = f", device busy {schedule.busy:.0%}" if any(step.complete for step in schedule.steps) else ""
        return f"ScheduleView({len(schedule.steps)} steps, {len(schedule.lives)} requests{busy})"


class GrammarView(View):
    """A grammar after a text: the automaton, byte by byte and compressed, the legal tokens, what is forced.

    grammar     a Grammar, or a regex
    tokenizer   for the mask: a Runtime's `tokenizer`; None: no mask is shown
    text        what has been generated so far; where the grammar does not go along, the picture says so
    max_states  most states of the automaton that are drawn
    width       in pixels

    Raises GrammarError for a regex that cannot be, or one that the tokenizer cannot spell.  `moment` has the figures
    behind the picture.  The page that `save` writes steps through the text.
    """

    title = "Grammar"

    def __init__(
        self, grammar: Grammar | str, tokenizer: Any = None, text: str = "", *, max_states: int = 40, width: int = 900
    ):
        from .fsm import Grammar

        _check_least(max_states=(max_states, 1), width=(width, 320))
        self.grammar = Grammar.from_regex(grammar) if isinstance(grammar, str) else grammar
        self.tokens = None if tokenizer is None else self.grammar.compile(tokenizer)
        self.text, self.max_states, self.width = text, max_states, width

    @property
    def moment(self) -> Moment:
        """State, forced bytes and legal tokens after the text."""
        from .visual_grammar import moment

        return moment(self.grammar, self.tokens, self.text)

    def after(self, text: str) -> GrammarView:
        """The view of the same grammar after another text."""
        other = GrammarView(self.grammar, None, text, max_states=self.max_states, width=self.width)
        other.tokens = self.tokens
        return other

    def svg(self) -> str:
        """The picture after the text."""
        from .visual_grammar import grammar_picture

        return grammar_picture(self.grammar, self.tokens, self.moment, self.width, self.max_states)

    def html(self) -> str:
        """A page that goes through the text, character by character (through the last of a long one)."""
        ends = range(max(len(self.text) + 1 - MOST_FRAMES, 0), len(self.text) + 1)
        frames = [{"title": f"after {self.text[:end]!r}", "svg": self.after(self.text[:end]).svg()} for end in ends]
        return player_page(self.title, "frames.js", {"frames": frames}, self.svg())

    def __repr__(self) -> str:
        at = self.moment
        legal = "" if at.legal is None else f", {len(at.legal):,} of {at.vocab_size:,} tokens legal"
        wrong = f", {at.wrong!r} not allowed" if at.wrong else ""
        return f"GrammarView(after {self.text!r}: state {at.state}, {len(at.forced)} bytes forced{legal}{wrong})"


def figure4() -> RadixView:
    """The SGLang paper's figure of RadixAttention: nine states of two chats, few-shot queries and samples under LRU.

    The states are positions 0 to 8; see `visual_story` for what is driven, and how.
    """
    from .visual_story import paper_figure

    history, words = paper_figure()
    view = RadixView(history, tokenizer=words)
    view.title = "RadixAttention in nine states"
    return view


def static_outputs(notebook: dict[str, Any]) -> int:
    """Drop the widgets from a notebook's outputs (its JSON, in place) where a static form is there to be shown.

    Returns how many were dropped.  For notebooks that are committed: a widget's model ends with its kernel.
    """
    count = 0
    for cell in notebook["cells"]:
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if WIDGET in data and len(data) > 1:
                del data[WIDGET]
                count += 1
    notebook.get("metadata", {}).pop("widgets", None)
    return count


def _decoder(tokenizer: Any) -> Text | None:
    if tokenizer is None:
        return None
    decode: Callable[[Sequence[int]], str] = getattr(tokenizer, "decode", tokenizer)
    if not callable(decode):
        raise TypeError(f"tokenizer must have a decode method or be a function, got {type(tokenizer).__name__}")
    return lambda ids: decode(list(ids))


def _events(source: Any) -> list[Event]:
    events = list(source) if isinstance(source, Iterable) else [source]
    for event in events:
        if not isinstance(event, Event):
            kinds = "a Runtime, an EventLog, events or a TreeHistory"
            raise TypeError(f"source must be {kinds}, got {type(source).__name__}")
    return events


def _check_least(**limits: tuple[int, int]) -> None:
    for name, (value, least) in limits.items():
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
