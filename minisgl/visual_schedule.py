"""What ran when: one column a step, one row a request, and above them what host and device did.

    host      [form 0][launch][form 1]....wait....[commit 0]         of each step: form, launch, wait, commit
    device            [   step 0    ][    step 1     ]
    -----------------------------------------------------
    p-0       ........[ 120 prompt  ][d][d][d]|                      waiting, prefill chunks, decodes, the end
    p-1       ........[  32 ][  88  ][d][d]

The engine's log tells all of it (`events`): `batch` who is in a step and with how many tokens, `launch`, `results` and
`commit` when.  A log of a scheduler alone has no times worth drawing; its steps are drawn one beside the other.

On a GPU a launch only queues the work, so that the device is taken to be busy from then (or from the end of the step
before) until its results arrive.  On a CPU it is busy during the launch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

from .events import Event
from .visual_svg import cut, document, text
from .visual_theme import both, stroke

LABEL = 96  # width of the names on the left
ROW = 20


@dataclass
class StepSpan:
    """One step.  Times in seconds, 0.0 where the log does not tell.

    work: request -> ("decode" or "prefill", tokens).  on_device: when the device worked on it.
    """

    number: int
    work: dict[str, tuple[str, int]]
    waiting: int
    formed: float = 0.0
    launched: float = 0.0
    queued: float = 0.0  # the end of the launch
    in_queue: bool = False  # whether the launch only queued work
    asked: float = 0.0  # the host begins to wait for results
    arrived: float = 0.0
    committed: float = 0.0
    on_device: tuple[float, float] = (0.0, 0.0)

    @property
    def complete(self) -> bool:
        """Whether the log tells all its times."""
        return self.committed > 0 and self.launched > 0


@dataclass
class Life:
    """When a request came, ended and stepped back, as numbers of steps formed by then, and how it ended."""

    rid: str
    submitted: int | None = None
    ended: int | None = None
    reason: str = ""
    retracted: list[int] = field(default_factory=list)


class Schedule:
    """Steps and requests of a log, in order."""

    def __init__(self, events: Iterable[Event] = ()):
        self.steps: list[StepSpan] = []
        self.lives: dict[str, Life] = {}
        self._results = self._commits = 0  # steps whose results and commits have been seen
        self.feed(events)

    def feed(self, events: Iterable[Event]) -> None:
        """Take in events, in order."""
        for event in events:
            self._take(event)

    def _take(self, event: Event) -> None:
        f, at = event.fields, len(self.steps)
        if event.kind == "batch":
            work = {rid: ("decode", 1) for rid in f["decodes"]}
            work |= {rid: ("prefill", end - start) for rid, start, end in f["extends"]}
            self.steps.append(StepSpan(at, work, f["waiting"], formed=event.time))
        elif event.kind == "launch" and at:
            step = self.steps[-1]  # launched right after it was formed
            step.formed, step.launched, step.queued = f["formed"], f["began"], event.time
            step.on_device = (step.launched, step.queued)
            step.in_queue = f["queued"]
        elif event.kind == "results":
            self._result(event)
        elif event.kind == "commit":
            while self._commits < at and not self.steps[self._commits].arrived:
                self._commits += 1
            if self._commits < at:
                self.steps[self._commits].committed = event.time
                self._commits += 1
        elif event.kind in ("submit", "finish", "retract"):
            life = self.lives.setdefault(f["rid"], Life(f["rid"]))
            if event.kind == "submit":
                life.submitted = at
            elif event.kind == "retract":
                life.retracted.append(at)
            else:
                life.ended, life.reason = at, f["reason"]

    def _result(self, event: Event) -> None:
        while self._results < len(self.steps) and not self.steps[self._results].launched:
            self._results += 1  # its launch failed, or was before the log
        if self._results == len(self.steps):
            return
        step = self.steps[self._results]
        step.asked, step.arrived = event.fields["began"], event.time
        if step.in_queue:  # busy until its results are there
            before = self.steps[self._results - 1].on_device[1] if self._results else 0.0
            step.on_device = (max(step.launched, before), step.arrived)
        self._results += 1

    @property
    def busy(self) -> float:
        """Share of the time in which the device worked, idle times between runs left out; 0.0 without times."""
        axis = TimeAxis([s for s in self.steps if s.complete])
        total = axis.length
        return sum(s.on_device[1] - s.on_device[0] for s in self.steps if s.complete) / total if total else 0.0


class TimeAxis:
    """Seconds to a place between 0 and `length`: long stretches in which nothing runs are cut short."""

    def __init__(self, steps: Sequence[StepSpan]):
        self.pieces: list[tuple[float, float, float]] = []  # (begin, end, place of the begin)
        self.breaks: list[float] = []
        spans = [(step.formed, step.committed) for step in steps]
        usual = median(end - begin for begin, end in spans) if spans else 0.0
        merged: list[list[float]] = []
        for begin, end in sorted(spans):
            if merged and begin - merged[-1][1] < 2 * usual:
                merged[-1][1] = max(merged[-1][1], end)
            else:
                merged.append([begin, end])
        place = 0.0
        for i, (begin, end) in enumerate(merged):
            if i:
                self.breaks.append(place + usual / 2)
                place += usual
            self.pieces.append((begin, end, place))
            place += end - begin
        self.length = place

    def __call__(self, seconds: float) -> float:
        place = 0.0
        for begin, end, at in self.pieces:
            if seconds >= begin:
                place = at + min(seconds, end) - begin
        return place


def schedule_picture(schedule: Schedule, width: int, steps: tuple[int, int], max_requests: int) -> str:
    """The steps [first, last) and the requests in them."""
    shown = schedule.steps[steps[0] : steps[1]]
    timed = bool(shown) and sum(step.complete for step in shown) > len(shown) / 2
    if timed:
        shown = [step for step in shown if step.complete]
    room = width - LABEL - 16
    axis = TimeAxis(shown) if timed else None
    length = axis.length if axis else float(len(shown))

    def x(place: float) -> float:
        return LABEL + room * place / (length or 1.0)

    def span(step: StepSpan, i: int) -> tuple[float, float]:
        if axis:
            return x(axis(step.on_device[0])), x(axis(step.on_device[1]))
        return x(i) + 1, x(i + 1) - 1

    spans = [span(step, i) for i, step in enumerate(shown)]
    names = list(dict.fromkeys(rid for step in shown for rid in step.work))
    rows, hidden = names[:max_requests], len(names) - min(len(names), max_requests)
    title = f"{len(shown)} steps" + (f" of {len(schedule.steps)}" if len(shown) < len(schedule.steps) else "")
    title += f", {len(names)} request{'s' * (len(names) != 1)}"
    if axis:
        title += f", {axis.length * 1e3:,.1f} ms: the device works {_busy(shown, axis):.0%} of the time"
    parts, y = [text(14, 22, title, size=13, extra='font-weight="600"')], 40.0
    if axis:
        parts.append(_lanes(shown, spans, axis, x, y))
        y += 58
    parts += [_request(schedule, rid, shown, spans, y + ROW * k, x(length)) for k, rid in enumerate(rows)]
    y += ROW * len(rows) + 4
    if hidden:
        parts.append(text(14, y + 12, f"and {hidden} more requests", size=10, colour="muted"))
        y += 18
    if axis:
        parts += [text(x(place) - 5, y + 4, "≈", size=12, colour="muted") for place in axis.breaks]
    if axis:
        parts.append(_host_legend(14, y + 24, any(step.on_device[1] > step.queued for step in shown)))
        y += 20
    parts.append(_request_legend(14, y + 24))
    words = "; ".join(map(_words, shown[:40])) or "No step has been formed."
    return document(width, y + 38, title, words, "".join(parts))


def _words(step: StepSpan) -> str:
    work = ", ".join(f"{rid} {kind} {tokens}" for rid, (kind, tokens) in step.work.items())
    return f"step {step.number}: {work}"


def _busy(steps: Sequence[StepSpan], axis: TimeAxis) -> float:
    return sum(s.on_device[1] - s.on_device[0] for s in steps) / axis.length if axis.length else 0.0


# what the host does: colours, place in the lane and height, so that the three are told apart without colour as well
_HOST = {
    "form": (("split-tint", "split"), 0, 7),
    "launch": (("hit-tint", "hit"), 0, 14),
    "commit": (("new-tint", "new"), 7, 7),
}


def _lanes(steps: Sequence[StepSpan], spans: list[tuple[float, float]], axis: TimeAxis, x, y: float) -> str:
    """The host's and the device's lane."""
    parts = [text(14, y + 13, "host", size=11), text(14, y + 37, "device", size=11)]
    host = []
    for step in steps:
        host.append(("form", step.formed, step.launched))
        if step.on_device[1] > step.queued:
            host.append(("launch", step.launched, step.queued))
            host.append(("wait", step.asked, step.arrived))
        host.append(("commit", step.arrived, step.committed))
    for kind, begin, end in host:
        x0, x1 = x(axis(begin)), x(axis(end))
        label = f"{kind}: {(end - begin) * 1e3:.2f} ms"
        if kind == "wait":
            dash = f'{stroke("line")} stroke-width="1.5" stroke-dasharray="2 2"'
            parts.append(f'<path d="M{x0:.1f} {y + 9}H{x1:.1f}" {dash}><title>{label}</title></path>')
        else:
            look, shift, height = _HOST[kind]
            parts.append(_block(x0, x1, y + 2 + shift, height, look, f'data-lane="{kind}"', label))
    for step, (x0, x1) in zip(steps, spans):
        tokens = sum(n for _, n in step.work.values())
        label = f"step {step.number}: {tokens} tokens, {(step.on_device[1] - step.on_device[0]) * 1e3:.2f} ms"
        look = ("hit-tint" if step.number % 2 else "plain-tint", "hit")
        parts.append(_block(x0, x1, y + 26, 16, look, 'data-lane="device"', label, str(step.number)))
    return "".join(parts)


def _block(
    x0: float, x1: float, y: float, height: float, look: tuple[str, str], data: str, title: str, label: str = ""
) -> str:
    """A rectangle with a tooltip, and a label if it fits."""
    block = (
        f'<rect {data} x="{x0:.1f}" y="{y:.1f}" width="{max(x1 - x0, 1):.1f}" height="{height}" rx="2" {both(*look)} '
        f'stroke-width="1.2"><title>{title}</title></rect>'
    )
    if label and x1 - x0 > 7 * len(label) + 3:
        block += text((x0 + x1) / 2, y + height / 2 + 4, label, size=10, extra='text-anchor="middle"')
    return block


def _request(
    schedule: Schedule, rid: str, steps: Sequence[StepSpan], spans: list[tuple[float, float]], y: float, end: float
) -> str:
    """One request's row."""
    life = schedule.lives.get(rid, Life(rid))
    name = rid if len(rid) <= 13 else "…" + rid[-12:]
    parts = [f'<g data-request="{rid_attribute(rid)}">', text(14, y + 13, name, size=10.5)]
    inside = [i for i, step in enumerate(steps) if rid in step.work]
    begin = next((i for i, step in enumerate(steps) if step.number >= (life.submitted or 0)), 0)
    if inside and begin < inside[0]:
        parts.append(
            f'<path d="M{spans[begin][0]:.1f} {y + 9}H{spans[inside[0]][0]:.1f}" {stroke("line")} stroke-width="1.2" '
            'stroke-dasharray="1 4" stroke-linecap="round"><title>waiting</title></path>'
        )
    for i in inside:
        kind, tokens = steps[i].work[rid]
        title = f"{rid_attribute(rid)}, step {steps[i].number}: {kind}, {tokens} token{'s' * (tokens != 1)}"
        data = f'data-work="{kind}"'
        if kind == "prefill":
            parts.append(_block(*spans[i], y + 1, 16, ("new-tint", "new"), data, title, str(tokens)))
        else:
            parts.append(_block(*spans[i], y + 5, 8, ("tree", "hit"), data, title))
    if inside and life.ended is not None and not any(step.number >= life.ended and rid in step.work for step in steps):
        mark = f'{stroke("ink")} stroke-width="2.4"'
        at = min(spans[inside[-1]][1] + 2, end)
        parts.append(f'<path d="M{at:.1f} {y + 1}v16" {mark}><title>{life.reason}</title></path>')
    for number in life.retracted:
        at = next((spans[i][0] for i, step in enumerate(steps) if step.number >= number), None)
        if at is not None:
            parts.append(text(at - 4, y + 13.5, "×", size=13, extra='font-weight="700"'))
    return "".join([*parts, "</g>"])


def rid_attribute(rid: str) -> str:
    """A request's name inside an attribute or a title."""
    return cut(rid, 40).replace("&", "&amp;").replace("<", "&lt;").replace('"', "&quot;")


def _host_legend(x: float, y: float, queued: bool) -> str:
    """What the host's blocks mean.  queued: with launches and waits, which only a device that is queued for has."""
    entries = [("form", "forms a batch (above)"), ("launch", "launches"), ("commit", "takes in results (below)")]
    parts = [text(x, y, "host", size=10, colour="muted")]
    x += 54
    for kind, content in entries:
        if kind != "launch" or queued:
            look, shift, height = _HOST[kind]
            parts.append(_block(x, x + 16, y - 11 + shift, height, look, "", content))
            parts.append(text(x + 22, y, content, size=10, colour="muted"))
            x += 40 + len(content) * 5.4
    if queued:
        parts.append(f'<path d="M{x} {y - 4}h16" {stroke("line")} stroke-width="1.5" stroke-dasharray="2 2"/>')
        parts.append(text(x + 22, y, "waits", size=10, colour="muted"))
    return "".join(parts)


def _request_legend(x: float, y: float) -> str:
    parts = [text(x, y, "requests", size=10, colour="muted")]
    x += 54

    def word(content: str, shift: float) -> None:
        nonlocal x
        parts.append(text(x + shift, y, content, size=10, colour="muted"))
        x += shift + 18 + len(content) * 5.4

    parts.append(_block(x, x + 16, y - 11, 14, ("new-tint", "new"), "", "prefill"))
    word("prefill (tokens)", 22)
    parts.append(_block(x, x + 16, y - 8, 8, ("tree", "hit"), "", "decode"))
    word("decode", 22)
    dots = f'{stroke("line")} stroke-width="1.4" stroke-dasharray="1 4" stroke-linecap="round"'
    parts.append(f'<path d="M{x} {y - 4}h16" {dots}/>')
    word("waiting", 22)
    parts.append(f'<path d="M{x} {y - 11}v14" {stroke("ink")} stroke-width="2.4"/>')
    word("end", 8)
    parts.append(text(x, y + 0.5, "×", size=13, extra='font-weight="700"'))
    word("steps back", 13)
    return "".join(parts)
