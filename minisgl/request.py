"""A request at every stage of its life, and the arrays that hold what changes on every step.

A request is three lengths (the idea is mini-sglang's) over one sequence of tokens:

        0            cached          computed             known        maximum
        |-- in tree ----|-- computed here --|-- not yet computed --|- - - - - -|
        |<------------------ kv_len ------->|                      |
        |<-------------------- num_tokens (+ in_flight) ---------->|           |
        |<------------------------------- max_len --------------------------->|

`kv_len`      tokens whose K and V are stored, or are being stored by a step already launched;
`num_tokens`  tokens whose ids the host knows;  `in_flight`: sampled by a launched step, id not on the host yet;
`max_len`     where generation stops by length.

One rule covers everything: a step computes tokens [kv_len, num_tokens + in_flight).  One missing token is a decode,
more are an extend (a prompt, a resumed request, or jump-forward's forced tokens), and a request samples in the step
that reaches the end.

While a request runs, these numbers live in `Rows`, one array per quantity indexed by the request's table row, so that
a decode step of 256 requests is a dozen numpy operations and no Python loop.
"""

from __future__ import annotations

import enum
import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from .sampling_params import SamplingParams

if TYPE_CHECKING:
    from .constraint import Guide
    from .radix import Node

MAX_STOP_IDS = 16  # stop ids per request that are compared as one array; more are refused at submission
_order = itertools.count()


class Status(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class Request:
    """One sequence to generate.  `tokens` holds prompt and output; it is read back from `Rows` when a row is left.

    Shapes: prompt (prompt_len,) int32.  Units: tokens.
    """

    rid: str
    prompt: np.ndarray
    params: SamplingParams
    max_len: int
    stop_ids: tuple[int, ...] = ()
    seed: int = 0
    watch: bool = False  # the runtime wants to see every token (streaming, stop strings, log-probabilities, grammar)
    return_logprob: bool = False
    logprob_start: int | None = None  # first prompt position whose log-probability is wanted; None: none
    top_logprobs: int = 0
    priority: int = 0
    group: str | None = None  # the id that the caller gave to the several requests of one call
    guide: Guide | None = None  # leads its output through a grammar

    # life
    order: int = field(default_factory=lambda: next(_order))
    status: Status = Status.WAITING
    row: int = 0
    tokens: np.ndarray = field(init=False)
    node: Node | None = None  # deepest tree node this request locks
    tree_len: int = 0  # its first tree_len slots belong to the tree
    passed_over: int = 0  # batches that admitted somebody younger first (the age bound)
    retractions: int = 0
    cached_tokens: int | None = None  # prompt tokens found in the tree at first admission
    forced_tokens: int = 0  # appended by jump-forward
    finish_reason: dict[str, Any] | None = None
    submitted: float = 0.0  # time.perf_counter() of submission, first token and end
    first_token: float = 0.0
    ended: float = 0.0
    sink: Any = None  # where tokens and the end are delivered (`output.Sink`)

    def __post_init__(self) -> None:
        self.tokens = self.prompt

    @property
    def prompt_len(self) -> int:
        return len(self.prompt)

    @property
    def output(self) -> np.ndarray:
        """Output token ids so far, (n,) int32 (valid when the request holds no row)."""
        return self.tokens[len(self.prompt) :]

    @property
    def reusable(self) -> int:
        """How many leading tokens may come from the tree.

        Never the last one: its logits are needed (invariant 5).  And none whose successor's log-probability is
        wanted, since that needs the logits of the position before it.
        """
        limit = len(self.tokens) - 1
        if self.logprob_start is not None and self.logprob_start < self.prompt_len:
            limit = min(limit, max(self.logprob_start - 1, 0))
        return limit


class Rows:
    """Per-step state of the running requests, as arrays indexed by table row (row 0 is the dummy).

    `ids` is (rows, max_context) int32; np.zeros commits its pages only where it is written.
    `generation` is bumped when a row changes hands, so that a result that arrives late for the previous holder is
    recognised and dropped.
    """

    def __init__(self, max_requests: int, max_context: int):
        n = max_requests + 1
        self.ids = np.zeros((n, max_context), np.int32)
        self.kv_len = np.zeros(n, np.int64)
        self.num_tokens = np.zeros(n, np.int64)
        self.in_flight = np.zeros(n, np.int64)
        self.max_len = np.zeros(n, np.int64)
        self.prompt_len = np.zeros(n, np.int64)
        self.min_len = np.zeros(n, np.int64)  # stop ids count only once num_tokens exceeds this
        self.stop_ids = np.full((n, MAX_STOP_IDS), -1, np.int32)
        self.active = np.zeros(n, bool)
        self.started = np.zeros(n, bool)  # has had its first token
        self.watch = np.zeros(n, bool)
        self.generation = np.zeros(n, np.int64)
        self.request: list[Request | None] = [None] * n

    def occupy(self, row: int, request: Request) -> None:
        """Copy a request's state into its row."""
        tokens = request.tokens
        self.ids[row, : len(tokens)] = tokens
        self.kv_len[row] = 0
        self.num_tokens[row] = len(tokens)
        self.in_flight[row] = 0
        self.max_len[row] = request.max_len
        self.prompt_len[row] = request.prompt_len
        self.min_len[row] = request.prompt_len + request.params.min_new_tokens
        self.stop_ids[row] = -1
        self.stop_ids[row, : len(request.stop_ids)] = request.stop_ids
        self.active[row] = True
        self.started[row] = request.first_token > 0
        self.watch[row] = request.watch
        self.request[row] = request
        request.row = row

    def vacate(self, row: int) -> None:
        """Copy the tokens back to the request and mark the row as nobody's."""
        request = self.request[row]
        assert request is not None
        request.tokens = self.ids[row, : self.num_tokens[row]].copy()
        request.row = 0
        self.active[row] = False
        self.watch[row] = False
        self.in_flight[row] = 0
        self.generation[row] += 1
        self.request[row] = None
