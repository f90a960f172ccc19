"""`Runtime`: a model, its engine and its cache, as one object in your process.

    from minisgl import Runtime

    with Runtime() as runtime:                       # the default model, on whatever this machine has
        reply = runtime.generate("The capital of France is", {"max_new_tokens": 8, "temperature": 0})
        print(reply["text"], reply["meta_info"]["cached_tokens"])

Construction reads top to bottom as the architecture does: find the model, choose a dtype, load the weights, size the
KV pool from what memory is left, then tree, scheduler, runner, engine thread.  Requests are checked completely on the
caller's thread before any of them is queued; after that the engine owns them, and the caller holds a `Sink` each.

Blocking and awaitable calls both work inside a running event loop (a notebook has one): the engine has a thread of its
own and nothing here starts, patches or needs a loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import weakref
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from . import forking, sizing
from .checks import check_choice, check_count, check_flag, check_int, check_switch
from .engine import Counters, Engine
from .events import EventLog
from .grammar import BACKENDS
from .loader import load_model, resolve_model
from .output import EngineError, Sink, all_ended
from .policy import POLICIES
from .pool import KVPool, RequestTable, SlotAllocator
from .preparation import Params, Preparer
from .radix import NullCache, RadixTree
from .runner import Runner
from .scheduler import Scheduler
from .tokenizer import BaseTokenizer, Tokenizer
from .whole_cache import WholeCache

Reply = dict[str, Any]


class Runtime:
    """An engine over one model.

    model                 None (the default model), a local folder, a hub id, or a GGUF file
    device                "auto", "cpu", "cuda", "cuda:1"
    dtype                 "auto", "float32", "float16", "bfloat16"; auto: the model's on a GPU, the faster on a CPU
    load_format           "auto", "safetensors", "gguf", or "dummy": random weights from a config.json
    revision              branch, tag or commit of a hub model
    mem_fraction          share of the memory left after the weights that the KV pool may take
    kv_capacity           the same in tokens, instead
    max_running_requests  most sequences in one batch
    max_context           longest sequence (prompt and output), in tokens
    chunk_size            most tokens per step (a step decodes all that runs in any case); -1: unlimited
    schedule_policy       "lpm", "fcfs", "dfs-weight", "lof", "random"
    eviction              "lru", "lfu", "fifo", "mru", "priority"
    radix_cache           for comparison: False, no sharing between requests; "whole", only of whole sequences
    overlap               form the next step while the device runs this one; auto: on a GPU
    cuda_graphs           record decode steps as CUDA graphs; auto: on a GPU, with Triton's attention
    tuned_products        try several tiles for the matrix products of recorded steps; auto: if steps are recorded
    shared_prefix         read a prefix that running requests share once per step; auto: where the backend can (Triton)
    attention_backend     "auto", "triton" (GPU), "torch" (any), "reference" (slow and plain)
    jump_forward          append the tokens that a grammar forces without asking the model for each
    grammar_backend       "fsm" (ours), "llguidance", "xgrammar"; auto: ours, llguidance for what ours does not support
    seed                  for requests that bring no seed, dummy weights and the "random" policy
    events                True or an EventLog: record what tree, pool and scheduler do
    tokenizer             instead of the model's own
    chat_template         a Jinja template instead of the model's own (its text)

    Raises ValueError, naming the parameter, for anything out of range, ModelError for a model that cannot be loaded,
    and RuntimeError in a fork of a process that had a Runtime.  Nothing is left allocated when construction fails.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        device: str = "auto",
        dtype: str = "auto",
        load_format: str = "auto",
        revision: str | None = None,
        mem_fraction: float = 0.85,
        kv_capacity: int | None = None,
        max_running_requests: int | None = None,
        max_context: int | None = None,
        chunk_size: int | None = None,
        schedule_policy: str = "lpm",
        eviction: str = "lru",
        radix_cache: bool | str = True,
        overlap: bool | str = "auto",
        cuda_graphs: bool | str = "auto",
        tuned_products: bool | str = "auto",
        shared_prefix: bool | str = "auto",
        attention_backend: str = "auto",
        jump_forward: bool = True,
        grammar_backend: str = "auto",
        seed: int = 0,
        events: bool | EventLog = False,
        tokenizer: BaseTokenizer | None = None,
        chat_template: str | None = None,
    ):
        forking.check("a new Runtime")
        check_choice("schedule_policy", schedule_policy, POLICIES)
        check_choice("grammar_backend", grammar_backend, BACKENDS)
        check_choice("eviction", eviction, sizing.EVICTIONS)
        check_choice("attention_backend", attention_backend, sizing.ATTENTION_BACKENDS)
        check_choice("dtype", dtype, sizing.DTYPES)
        for name, value in (("kv_capacity", kv_capacity), ("max_running_requests", max_running_requests),
                            ("max_context", max_context)):  # fmt: skip
            check_count(name, value)
        if chunk_size != -1:
            check_count("chunk_size", chunk_size)
        if not isinstance(mem_fraction, (int, float)) or not 0 < mem_fraction <= 1:
            raise ValueError(f"mem_fraction must be a number in (0, 1], got {mem_fraction!r}")
        check_int("seed", seed, 0)
        if seed >= 1 << 63:
            raise ValueError(f"seed must be below 2^63, got {seed}")
        if radix_cache != "whole" and not isinstance(radix_cache, bool):
            raise ValueError(f"radix_cache must be True, False or 'whole', got {radix_cache!r}")
        check_flag("jump_forward", jump_forward)
        if not isinstance(events, EventLog):
            check_flag("events", events)
        if tokenizer is not None and chat_template is not None:
            raise ValueError("chat_template is for the model's own tokenizer: give it to the one in tokenizer=...")
        self.device = sizing.choose_device(device)
        cuda = self.device.type == "cuda"
        overlap = check_switch("overlap", overlap, auto=cuda)
        recordable = cuda and attention_backend in ("auto", "triton")  # the others ask the host for each step's layout
        graphs = check_switch("cuda_graphs", cuda_graphs, auto=recordable)
        if graphs and not recordable:
            raise ValueError("cuda_graphs=True needs a CUDA device and Triton's attention; leave it at 'auto'")
        tuned = check_switch("tuned_products", tuned_products, auto=graphs)
        if tuned and not graphs:
            raise ValueError("tuned_products=True is for recorded steps: it needs cuda_graphs; leave it at 'auto'")

        source = resolve_model(model, load_format, revision)
        config = source.config
        plan = sizing.choose_compute(config, self.device, dtype)
        loaded = load_model(source, dtype=plan.dtype, device=self.device, seed=seed)
        sizing.apply(plan, loaded.model, attention_backend)
        self.name, self.config, self.dtype = loaded.name, config, plan.dtype
        if tokenizer is None and loaded.folder is not None:
            tokenizer = Tokenizer(loaded.folder, chat_template=chat_template)
        stops = loaded.eos_token_ids | set(tokenizer.eos_ids if tokenizer else ())
        self.eos_token_ids = tuple(sorted(i for i in stops if 0 <= i < config.vocab_size))

        capacity = kv_capacity or sizing.kv_capacity(config, plan.dtype, self.device, mem_fraction)
        if max_context is not None and max_context > config.context_length:
            raise ValueError(f"max_context must be at most the model's {config.context_length}, got {max_context}")
        context = min(max_context or config.context_length, capacity)
        if max_running_requests is None:
            max_running_requests = min(sizing.DEFAULT_RUNNING[self.device.type], capacity)
        if chunk_size is None:
            chunk_size = sizing.DEFAULT_CHUNK[self.device.type]
        self.events = events if isinstance(events, EventLog) else (EventLog() if events else None)
        pool = KVPool(config.num_layers, capacity, config.num_kv_heads, config.head_dim, plan.dtype, self.device)
        table = RequestTable(max_running_requests, context)
        if radix_cache:
            tree = WholeCache if radix_cache == "whole" else RadixTree
            self.tree = tree(eviction, self.events)  # pyright: ignore[reportArgumentType]
        else:
            self.tree = NullCache()
        self.scheduler = Scheduler(
            self.tree,
            SlotAllocator(capacity, self.events),
            table,
            max_context=context,
            chunk_size=None if chunk_size == -1 else chunk_size,
            policy=schedule_policy,
            seed=seed,
            events=self.events,
        )
        attention = sizing.make_attention(attention_backend, pool, config)
        can_share = attention.shares_prefixes and not any(config.windows)
        share = check_switch("shared_prefix", shared_prefix, auto=can_share and bool(radix_cache))
        if share and not radix_cache:
            raise ValueError("shared_prefix=True needs the radix cache: without it no prefix is shared")
        if share and not can_share:
            raise ValueError("shared_prefix=True needs attention_backend='triton' and a model without sliding windows")
        recorded = max(max_running_requests, 64)
        sizes = sizing.graph_sizes(recorded) if graphs else []
        shared_sizes = sizing.shared_graph_sizes(recorded) if graphs else []
        # the runner records graphs, on whatever device is current
        with torch.inference_mode(), torch.cuda.device(self.device) if cuda else contextlib.nullcontext():
            if tuned:
                sizing.choose_products(loaded.model, sorted({*sizes, *shared_sizes}))
            runner = Runner(
                loaded.model,
                attention,
                table,
                self.scheduler.rows,
                eos_ids=self.eos_token_ids,
                graph_sizes=sizes,
                shared_sizes=shared_sizes,
                share_prefixes=share,
                pad_rows=plan.rows,
            )
        self._preparer = Preparer(
            self.name, config, tokenizer, self.eos_token_ids, self.scheduler,
            jump_forward=jump_forward, grammar_backend=grammar_backend, seed=seed,
        )  # fmt: skip
        self._engine = Engine(self.scheduler, runner, overlap=overlap)
        self._close = weakref.finalize(self, _stop, self._engine)

    # ---- generating ------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompt: str | Sequence[str] | None = None,
        sampling_params: Params | Sequence[Params] = None,
        *,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        stream: bool = False,
        return_logprob: bool = False,
        logprob_start_len: int = -1,
        top_logprobs_num: int = 0,
        return_text_in_logprobs: bool = False,
        priority: int = 0,
        rid: str | None = None,
    ) -> Any:
        """Generate for one prompt or a list of them.

        prompt or input_ids   text, or token ids; one, or a list
        sampling_params       a dict or SamplingParams for all, or a list with one for each
        stream                yield growing replies instead of returning the last one (one prompt, n=1)
        return_logprob        log-probability of every output token in meta_info["output_token_logprobs"], as
                              (log-probability, id, text or None)
        logprob_start_len     with return_logprob, of the prompt's tokens from this position on as well; -1: none
        top_logprobs_num      and of this many likeliest alternatives at each place
        return_text_in_logprobs  put each token's text there, too
        priority              what it leaves in the cache stays longer, with eviction="priority"
        rid                   a name to abort the request by, or all of them if the call makes several.  One alone
                              has it as its id, which no other that runs may have

        Returns {"text", "output_ids", "meta_info"}; a list of them for a list of prompts or n > 1 (n in a row for
        each prompt); an iterator when streaming, whose items have "delta", the text since the last one.
        Raises ValueError before anything is queued if any prompt or parameter is not right.  KeyboardInterrupt ends
        the requests and is raised on.
        """
        check_flag("stream", stream)
        on_chunk = chunks = None
        if stream:
            chunks = queue.SimpleQueue()
            on_chunk = chunks.put
        sinks, single = self.prepare(
            prompt, sampling_params, input_ids=input_ids, on_chunk=on_chunk, return_logprob=return_logprob,
            logprob_start_len=logprob_start_len, top_logprobs_num=top_logprobs_num,
            return_text_in_logprobs=return_text_in_logprobs, priority=priority, rid=rid,
        )  # fmt: skip
        if chunks is not None:
            replies = self._stream(sinks[0], chunks)
            next(replies)  # into its try: from there on, closing or dropping it ends the request
            return replies
        try:
            self._engine.submit([sink.request for sink in sinks])
            replies = [sink.result() for sink in sinks]
        except BaseException:
            self._engine.abort([sink.request for sink in sinks])
            raise
        return replies[0] if single else replies

    async def async_generate(
        self,
        prompt: str | Sequence[str] | None = None,
        sampling_params: Params | Sequence[Params] = None,
        *,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        stream: bool = False,
        return_logprob: bool = False,
        logprob_start_len: int = -1,
        top_logprobs_num: int = 0,
        return_text_in_logprobs: bool = False,
        priority: int = 0,
        rid: str | None = None,
    ) -> Any:
        """`generate` for coroutines: awaits the reply, or with stream=True returns an async iterator.

        Cancelling the task ends the requests.
        """
        loop = asyncio.get_running_loop()
        check_flag("stream", stream)
        on_chunk = chunks = None
        if stream:
            chunks = asyncio.Queue()
            on_chunk = partial(_put_in_loop, loop, chunks)
        # off the loop: tokenising a long prompt or compiling a grammar takes a while
        sinks, single = await asyncio.to_thread(
            self.prepare, prompt, sampling_params, input_ids=input_ids, on_chunk=on_chunk,
            return_logprob=return_logprob, logprob_start_len=logprob_start_len, top_logprobs_num=top_logprobs_num,
            return_text_in_logprobs=return_text_in_logprobs, priority=priority, rid=rid,
        )  # fmt: skip
        if chunks is not None:
            stream_ = self._astream(sinks[0], chunks)
            await anext(stream_)  # as in `generate`
            return stream_
        try:
            self._engine.submit([sink.request for sink in sinks])
            await all_ended(sinks)
        except BaseException:
            self._engine.abort([sink.request for sink in sinks])
            raise
        replies = [sink.result() for sink in sinks]
        return replies[0] if single else replies

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: Params = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Any:
        """The model's answer to a conversation: [{"role": "user", "content": "..."}, ...] through its chat template.

        `options` as in `generate`.  Raises ChatTemplateError (a ValueError) if the model has no template.
        """
        ids = self.tokenizer.chat_ids(messages, **(chat_template_kwargs or {}))
        return self.generate(input_ids=ids.tolist(), sampling_params=sampling_params, **options)

    def abort(self, rid: str) -> None:
        """End what was submitted as `rid`; its caller gets what there is, with finish_reason "abort"."""
        self._engine.abort_named(rid)

    @property
    def engine(self) -> Engine:
        """The engine behind the calls above, for those who prepare and submit requests themselves."""
        return self._engine

    # ---- looking and managing ---------------------------------------------------------------------------------------

    @property
    def tokenizer(self) -> BaseTokenizer:
        """The model's tokenizer; ValueError if it came without one (use input_ids then)."""
        return self._preparer.tokenizer

    def flush_cache(self) -> int:
        """Forget cached prefixes that no running request uses; returns how many tokens that were."""
        return self._engine.call(self.scheduler.flush, writes=True)

    def reset_stats(self) -> None:
        """Start the totals of `stats` anew."""

        def reset() -> None:
            self._engine.counters = Counters()
            self._engine.runner.mask_clock.reset()
            self._engine.runner.graph_replays = self._engine.runner.shared_steps = 0

        self._engine.call(reset)

    def stats(self) -> dict[str, Any]:
        """Queue, memory and totals now.  Lengths in tokens, times in seconds."""
        return self._engine.call(self._stats)

    def _stats(self) -> dict[str, Any]:
        s, c = self.scheduler, self._engine.counters
        return {
            "waiting": len(s.waiting),
            "running": len(s.running),
            "kv_capacity": s.allocator.capacity,
            "kv_free": s.allocator.available,
            "kv_evictable": s.tree.evictable,
            "kv_locked": s.tree.locked,
            "kv_held": s.held(),
            "hit_rate": c.cached_tokens / c.prompt_tokens if c.prompt_tokens else 0.0,
            "retractions": s.total_retractions,
            "requests": c.requests,
            "prompt_tokens": c.prompt_tokens,
            "cached_tokens": c.cached_tokens,
            "output_tokens": c.output_tokens,
            "steps": c.steps,
            "graph_replays": self._engine.runner.graph_replays,
            "shared_prefix_steps": self._engine.runner.shared_steps,
            "busy_time": c.busy_time,
            "mask_time": self._engine.runner.mask_clock.seconds,
            "mask_wait": self._engine.runner.mask_clock.waited,
            "host_time_share": c.host_time / c.busy_time if c.busy_time else 0.0,
            "output_tokens_per_s": c.output_tokens / c.busy_time if c.busy_time else 0.0,
        }

    def shutdown(self) -> None:
        """End all requests and free the memory; may be called again.  The object is of no use afterwards."""
        self._close()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()

    def __repr__(self) -> str:
        if not self._engine.alive:
            return f"Runtime({self.name}, shut down)"
        s = self.scheduler
        return (
            f"Runtime({self.name}, {self.device}, {str(self.dtype).removeprefix('torch.')}, "
            f"KV {s.allocator.capacity - s.allocator.available:,} of {s.allocator.capacity:,} tokens in use, "
            f"context {s.max_context:,})"
        )

    # ---- requests --------------------------------------------------------------------------------------------------

    @property
    def prepare(self):  # no type here: it is the one in `Preparer.prepare`
        """`Preparer.prepare`: what `generate` does before it queues anything, for those who submit themselves.

            sinks, _ = runtime.prepare(["one", "two"], {"max_new_tokens": 8})
            runtime.engine.submit([sink.request for sink in sinks])
        """
        return self._preparer.prepare

    def _stream(self, sink: Sink, chunks: queue.SimpleQueue[Any]) -> Iterator[Reply]:
        """Submits and yields an empty reply, then the chunks."""
        try:
            self._engine.submit([sink.request])
            yield {}
            while True:
                if chunks.empty():
                    sink.ended.check()
                item = chunks.get()
                if item is None:
                    return
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            if not sink.ended.done():
                self._engine.abort([sink.request])

    async def _astream(self, sink: Sink, chunks: asyncio.Queue[Any]) -> AsyncIterator[Reply]:
        try:
            self._engine.submit([sink.request])
            yield {}
            while (item := await chunks.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            if not sink.ended.done():
                self._engine.abort([sink.request])


def _put_in_loop(loop: asyncio.AbstractEventLoop, chunks: asyncio.Queue[Any], item: Any) -> None:
    with contextlib.suppress(RuntimeError):  # the loop was closed: nobody reads any more
        loop.call_soon_threadsafe(chunks.put_nowait, item)


def _stop(engine: Engine) -> None:
    engine.stop()
    runner, engine.runner = engine.runner, None  # type: ignore[assignment]
    runner.close()


__all__ = ["EngineError", "Runtime"]
