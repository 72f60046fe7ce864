"""Measures the time saved by KV from a store, and the cost of moving KV for running decodes.

    python -m tools.benchmarks.kv_reuse [--model demo] [--plot docs/images/kv-reuse.png] [--only missing,restart,...]

Reports the time to first token for prompts whose KV is partly missing from the store, after a restart, and for a
handover between engines. Also reports step times of decodes while KV is loaded and saved. Prompts are random tokens, so
they share no prefix. The engines are stepped in this process. All other parts equal a server's. Times to first token
are medians of ``--repeats`` measurements in one run. The time after a restart is measured once.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from typing import Any
from unittest import mock

import numpy as np

from metal_engine.kv_transfer.stores.choice import open_store
from metal_engine.loading.build import build_engine
from metal_engine.request import RequestOptions, RequestStatus
from metal_engine.sampling_params import SamplingParams
from metal_engine.settings.args import EngineArgs

NUM_PROMPTS, PROMPT_TOKENS, HANDOVER_TOKENS = 8, 500, 2000


class Screen:
    """Wrapper of a KV store that can hide blocks and delay writes.

    Attributes:
        inner: the other store.
        hidden: hashes of blocks that ``get`` does not return. ``contains`` still reports them.
        may_write: event that ``put`` waits for; set at first.
    """

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.hidden: set[bytes] = set()
        self.may_write = threading.Event()
        self.may_write.set()

    def contains(self, hashes: Sequence[bytes]) -> list[bool]:
        return self.inner.contains(hashes)

    def get(self, hashes: Sequence[bytes]) -> list[bytes]:
        seen = next((i for i, h in enumerate(hashes) if h in self.hidden), len(hashes))
        return self.inner.get(hashes[:seen])

    def put(self, blocks: Sequence[tuple[bytes, bytes]]) -> None:
        self.may_write.wait()
        self.inner.put(blocks)

    def discard(self, block_hash: bytes) -> None:
        self.inner.discard(block_hash)

    def close(self) -> None:
        self.inner.close()


class Engine:
    """Engine whose KV store is wrapped in a :class:`Screen`."""

    def __init__(self, model: str, directory: str, role: str, **settings: Any) -> None:
        extra = {"path": directory, "max_save_bytes": "2GiB"}
        transfer = {"kv_connector": "disk", "kv_role": role, "kv_connector_extra_config": extra}
        started = time.perf_counter()
        with mock.patch("metal_engine.kv_transfer.connect.open_store", lambda *args: Screen(open_store(*args))):
            engine = build_engine(EngineArgs(model=model, kv_transfer_config=json.dumps(transfer), **settings))
        self.core, self.preparer, self.close = engine.core, engine.preparer, engine.close
        self.start_seconds = time.perf_counter() - started
        runner: Any = self.core.runner
        self.transfer = runner.kv_connector._transfer
        self.store: Screen = self.transfer._store
        self._ids = iter(range(1 << 30))

    def add(self, prompt: list[int], max_tokens: int = 1, options: RequestOptions | None = None) -> str:
        request_id = str(next(self._ids))
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        self.core.add_request(request_id, self.preparer.prepare(prompt, params), options=options)
        return request_id

    def hashes_of(self, prompt: list[int]) -> list[bytes]:
        """Return the hashes of the prompt's full blocks."""
        request_id = self.add(prompt)
        hashes = list(next(reversed(self.core.scheduler.requests.values())).block_hashes)
        self.core.end_request(request_id, RequestStatus.FINISHED_ABORTED)
        return hashes

    def first_token_seconds(self, prompts: Sequence[list[int]]) -> list[float]:
        """Empty the prefix cache. Return the seconds to first token of prompts that arrive together, in their order."""
        self.core.scheduler.prefix_cache.forget()
        started = time.perf_counter()
        ids = [self.add(prompt) for prompt in prompts]
        seconds: dict[str, float] = {}
        while self.core.has_requests:
            for output in self.core.step():
                assert output.error is None, output.error
                seconds[output.request_id] = time.perf_counter() - started
        return [seconds[request_id] for request_id in ids]

    def drain(self) -> None:
        while self.core.has_requests:
            self.core.step()
        self.transfer.flush(600)


def make_prompts(number: int, length: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(1000, 20000) for _ in range(length)] for _ in range(number)]


def measure_missing(engine: Engine, prompts: list[list[int]], repeats: int) -> dict[str, list[Any]]:
    """Return the times to first token of a batch of prompts if a part of their KV is missing from the store.

    Returns:
        ``requests``: results if the KV of some whole prompts is missing. ``share``: results if a share of each prompt's
        KV is missing. A result is a tuple (number of missing prompts or missing share, number of tokens computed for
        the batch, mean time to first token, largest time to first token). Times are in seconds, and are medians over
        the repeats.
    """
    hashes = [engine.hashes_of(prompt) for prompt in prompts]
    rows: dict[str, list[Any]] = {"requests": [], "share": []}
    for key, cases in (("requests", (0, 2, 4, 6, 8)), ("share", (0.0, 0.25, 0.5, 0.75, 1.0))):
        for case in cases:
            if key == "requests":
                hidden = {h for chain in hashes[: int(case)] for h in chain}
            else:
                hidden = {h for chain in hashes for h in chain[round(len(chain) * (1 - case)) :]}
            engine.store.hidden = hidden
            before = engine.transfer.stats.as_dict()
            runs = [engine.first_token_seconds(prompts) for _ in range(repeats)]
            after = engine.transfer.stats.as_dict()
            computed = (after["prompt_tokens_computed"] - before["prompt_tokens_computed"]) // repeats
            means, lasts = [statistics.mean(run) for run in runs], [max(run) for run in runs]
            rows[key].append((case, computed, statistics.median(means), statistics.median(lasts)))
    engine.store.hidden = set()
    return rows


def print_missing(rows: dict[str, list[Any]]) -> None:
    for key, title in (("requests", "prompts missing, of 8"), ("share", "missing of each prompt")):
        everything = rows[key][-1]
        print(f"\n| {title} | tokens computed | TTFT mean, s | last, s | against computing everything |")
        print("| --- | --- | --- | --- | --- |")
        for case, computed, mean, last in rows[key]:
            shown = f"{case:.0%}" if key == "share" else case
            print(f"| {shown} | {computed} | {mean:.2f} | {last:.2f} | {mean / everything[2]:.2f} |")


def plot_missing(rows: dict[str, list[Any]], path: str) -> None:
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), sharey=True)
    titles = {"requests": "prompts missing, of 8", "share": "share of each prompt missing"}
    for axis, (key, title) in zip(axes, titles.items(), strict=True):
        x = [row[0] for row in rows[key]]
        axis.plot(x, [row[2] for row in rows[key]], "o-", label="only what is missing is computed")
        all_again = [rows[key][0][2], *[rows[key][-1][2]] * 4]
        axis.plot(x, all_again, "s--", color="gray", label="everything, when any is missing")
        axis.set_xlabel(title)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("mean TTFT, s")
    axes[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def measure_restart(model: str, directory: str, prompts: list[list[int]]) -> None:
    print("\n| after a restart | TTFT of one prompt, s | of the batch, mean, s |")
    print("| --- | --- | --- |")
    for name, where in (("with the store", directory), ("without", directory + "/empty")):
        engine = Engine(model, where, "kv_consumer")
        one = engine.first_token_seconds(prompts[:1])[0]
        batch = engine.first_token_seconds(prompts)
        print(f"| {name} | {one:.2f} | {statistics.mean(batch):.2f} |")
        engine.close()


def measure_handover(producer: Engine, consumer: Engine, repeats: int) -> None:
    """Print the time from the end of the producer's last step to the consumer's first token.

    Measured if the consumer loads the KV chunk by chunk during the prefill, and if it loads all KV after the prefill.
    """
    print(f"\n| hand-over of {HANDOVER_TOKENS} tokens | s |\n| --- | --- |")
    for name in ("chunk by chunk", "whole, after the prefill"):
        seconds = []
        for i in range(repeats):
            (prompt,) = make_prompts(1, HANDOVER_TOKENS, seed=1000 + i + 100 * (name[0] == "w"))
            if name[0] == "w":
                producer.store.may_write.clear()
            producer.add(prompt, options=RequestOptions(do_remote_decode=True))
            if name[0] == "c":
                consumer.add(prompt, options=RequestOptions(do_remote_prefill=True))
            while True:
                producer.core.step()
                started = time.perf_counter()
                if not producer.core.has_requests:
                    break
                if consumer.core.has_requests:
                    consumer.core.step()
            producer.store.may_write.set()
            if name[0] == "w":
                consumer.add(prompt, options=RequestOptions(do_remote_prefill=True))
            while consumer.core.has_requests:
                consumer.core.step()
            seconds.append(time.perf_counter() - started)
            producer.drain()
        print(f"| {name} | {statistics.median(seconds):.2f} |")
    print(f"\nA chunk has {producer.core.config.scheduler.max_num_batched_tokens} tokens.")


WINDOW = 60  # steps


def measure_decoding(engine: Engine, prompts: list[list[int]], repeats: int) -> None:
    """Print step times of four decoding requests while eight prompts' KV is loaded, and while KV is saved.

    Both cases are compared with the same steps without the transfer. Without loads, the eight requests find their KV in
    the local cache, so they join the batch in the same way. Without saves, nothing else changes. Windows of steps with
    and without the transfer alternate.
    """
    num_blocks = (512 << 20) // engine.transfer.layout.nbytes
    data = np.random.default_rng(0).integers(0, 256, (num_blocks, engine.transfer.layout.nbytes), np.uint8)
    windows: dict[str, list[list[float]]] = {name: [] for name in ("found", "loaded", "alone", "saving")}

    def window() -> list[float]:
        times = []
        for _ in range(WINDOW):
            started = time.perf_counter()
            engine.core.step()
            times.append(time.perf_counter() - started)
        return times

    def arrive() -> None:
        for prompt in prompts:
            engine.add(prompt)

    def found() -> None:
        arrive()
        while len(engine.core.scheduler.requests) > 4:  # the eight prompts have finished
            engine.core.step()
        arrive()
        windows["found"].append(window())

    def load() -> None:
        engine.core.scheduler.prefix_cache.forget()
        arrive()
        windows["loaded"].append(window())

    def alone() -> None:
        windows["alone"].append(window())

    def save(number: int) -> None:
        hashes = [bytes([number]) + i.to_bytes(31, "big") for i in range(num_blocks)]
        engine.transfer.save(hashes, data)
        windows["saving"].append(window())
        engine.transfer.flush(600)

    for repeat in range(2 * repeats):
        decoding = [engine.add(prompt, max_tokens=6 * WINDOW) for prompt in make_prompts(4, 20, seed=5)]
        for _ in range(5):
            engine.core.step()
        # Contexts grow from window to window, so compared windows alternate in order.
        parts = [[load, found], [alone, lambda number=repeat: save(number)]]
        for first, second in parts:
            for part in (first, second) if repeat % 2 else (second, first):
                part()
                assert len(engine.core.scheduler.requests) == 4, "a window is too short"
        for request_id in decoding:
            engine.core.end_request(request_id, RequestStatus.FINISHED_ABORTED)
        assert not engine.core.scheduler.requests
    num_loaded = sum(len(prompt) // engine.core.config.cache.block_size for prompt in prompts)
    loaded = num_loaded * engine.transfer.layout.nbytes >> 20
    print(
        f"\n| four requests decode for {WINDOW} steps | seconds | against without | longest step, ms |"
        "\n| --- | --- | --- | --- |"
    )
    rows = {
        "eight prompts of 500 tokens join, KV in the local cache": ("found", "found"),
        f"eight join, KV loaded ({loaded} MiB)": ("loaded", "found"),
        "nobody joins": ("alone", "alone"),
        "nobody joins, 512 MiB are saved": ("saving", "alone"),
    }
    for title, (name, base) in rows.items():
        total = statistics.mean(map(sum, windows[name]))
        longest = statistics.median(map(max, windows[name]))
        ratio = total / statistics.mean(map(sum, windows[base]))
        print(f"| {title} | {total:.2f} | {ratio:.2f} | {longest * 1e3:.0f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--plot", help="PNG file for the plot")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", default="missing,restart,handover,decoding")
    args = parser.parse_args()
    only = set(args.only.split(","))
    prompts = make_prompts(NUM_PROMPTS, PROMPT_TOKENS, seed=0)
    with tempfile.TemporaryDirectory() as directory:
        producer = Engine(args.model, directory, "kv_producer")
        producer.first_token_seconds(prompts)
        producer.drain()
        config = producer.core.config
        print(
            f"{config.model.name} on {config.device.name}, {config.device.compute}; "
            f"{config.scheduler.max_num_batched_tokens} tokens a step, blocks of {config.cache.block_size} tokens, "
            f"{producer.transfer.layout.nbytes} bytes each"
        )
        consumer = Engine(args.model, directory, "kv_consumer")
        consumer.first_token_seconds(make_prompts(1, 100, seed=9))
        if "missing" in only:
            rows = measure_missing(consumer, prompts, args.repeats)
            print_missing(rows)
            if args.plot:
                plot_missing(rows, args.plot)
        if "handover" in only:
            measure_handover(producer, consumer, args.repeats)
        if "decoding" in only:
            measure_decoding(consumer, prompts, args.repeats)
        producer.close()
        consumer.close()
        if "restart" in only:
            measure_restart(args.model, directory, prompts)


if __name__ == "__main__":
    main()
