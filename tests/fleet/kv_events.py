#!/usr/bin/env python3
"""Cache events over ZeroMQ as a router reads them, with the libraries that routers use: kv_events.py KVASIR
Each message decodes into vLLM's form; numbers rise by one; a prefix's pages chain and have its tokens; what a late
subscriber missed is replayed; one that stalls costs the server nothing."""
import collections
import ctypes.util
import os
import sys
import tempfile
import time

from kvasir_server import DUMMY, FLEET, serving, skip

try:
    import msgspec
    import zmq
except ImportError as missing:
    python = os.path.join(FLEET, "python", "bin", "python3")
    if os.path.exists(python) and sys.executable != python and "VIRTUAL_ENV" not in os.environ:
        os.execve(python, [python, *sys.argv], {**os.environ, "VIRTUAL_ENV": os.path.join(FLEET, "python")})
    skip(f"{missing} (tools/fleet.sh installs it)")

TOPIC, PAGE = "kv@127.0.0.1@m", 16


# The form of vllm.distributed.kv_events, unknown fields refused.
class BlockStored(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class BlockRemoved(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    pass


class Batch(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


decode = msgspec.msgpack.Decoder(Batch).decode


class Reader:
    def __init__(self, context, address):
        self.socket = context.socket(zmq.SUB)
        self.socket.setsockopt_string(zmq.SUBSCRIBE, "kv@")
        self.socket.setsockopt(zmq.RCVTIMEO, 20000)
        self.socket.connect(address)

    def one(self):
        topic, number, payload = self.socket.recv_multipart()
        assert topic == TOPIC.encode() and len(number) == 8, (topic, number)
        return int.from_bytes(number, "big"), decode(payload)


def replayed(context, address, first):
    dealer = context.socket(zmq.DEALER)  # REQ takes one reply; readers of many use a DEALER with REQ's empty frame
    dealer.setsockopt(zmq.RCVTIMEO, 20000)
    dealer.connect(address)
    dealer.send_multipart((b"", first.to_bytes(8, "big")))
    out = []
    while True:
        empty, topic, number, payload = dealer.recv_multipart()
        assert empty == b""
        if int.from_bytes(number, "big", signed=True) == -1:
            assert payload == b""
            dealer.close()
            return out
        assert topic == TOPIC.encode()
        out.append((int.from_bytes(number, "big"), decode(payload)))


def fill(server, count, start=0):
    for n in range(start, start + count):
        server.post("/v1/completions", {"prompt": f"Number {n}: " + "abcdefgh" * 12, "max_tokens": 2, "temperature": 0, "ignore_eos": True})


def chained(messages):
    """Pages by hash; each but the first has a parent that was stored before it."""
    pages, kinds = {}, collections.Counter()
    for number, batch in messages:
        assert len(batch.events) == 1 and batch.data_parallel_rank == 0 and batch.ts > 1.7e9, batch
        event = batch.events[0]
        kinds[type(event).__name__] += 1
        if isinstance(event, BlockStored):
            assert event.block_size == PAGE and len(event.token_ids) == PAGE and event.medium == "GPU", event
            assert event.parent_block_hash is None or event.parent_block_hash in pages, f"{number}: a page without its parent"
            pages[event.block_hashes[0]] = event.token_ids
        elif isinstance(event, BlockRemoved):
            assert pages.pop(event.block_hashes[0], None), f"{number}: removed and never stored"
        else:
            pages.clear()
    return pages, kinds


def main():
    kvasir = sys.argv[1]
    if not ctypes.util.find_library("zmq"):
        skip("no libzmq5 (tools/fleet.sh installs it)")
    context = zmq.Context()
    with tempfile.TemporaryDirectory() as folder:
        events, replay = f"ipc://{folder}/events", f"ipc://{folder}/replay"
        with serving(kvasir, "--kv-memory", "64KiB", "--threads", "1", "--kv-events", events, "--kv-events-replay", replay,
                     "--kv-events-topic", TOPIC, model=DUMMY) as server:
            fill(server, 2)  # before anybody listens
            while not replayed(context, replay, 1):  # told by a thread of its own, which a busy machine may keep from it
                time.sleep(0.02)
            reader, stalled = Reader(context, events), Reader(context, events)
            stalled.socket.setsockopt(zmq.RCVHWM, 1)
            heard, n = [], 2
            while len(heard) < 60:  # a subscription takes effect some time after it is made
                fill(server, 1, n)
                n += 1
                while reader.socket.poll(50):
                    heard.append(reader.one())
                assert n < 400, f"{len(heard)} events of {n} requests"
            numbers = [number for number, _ in heard]
            assert numbers == list(range(numbers[0], numbers[0] + len(numbers))), "numbers that do not rise by one"
            assert numbers[0] > 1, "the first were not to be heard"
            missed = replayed(context, replay, 1)
            assert [number for number, _ in missed[: numbers[0]]] == list(range(1, numbers[0] + 1)), "not all of it is replayed"
            by_number = dict(missed)
            assert all(by_number[number].events == batch.events for number, batch in heard), "replayed otherwise than it was sent"
            some = replayed(context, replay, numbers[-1])
            assert [number for number, _ in some][0] == numbers[-1]
            pages, kinds = chained(missed)
            assert kinds["BlockStored"] > 20 and kinds["BlockRemoved"] > 0, f"the cache was to be too small: {kinds}"
            # Nothing is told of that the server has not; it has more, as a page that is not full is nobody's prefix.
            cached = int(next(line.split()[1] for line in server.get("/metrics").splitlines() if line.startswith("kvasir_cache_pages_cached ")))
            late = replayed(context, replay, missed[-1][0] + 1)
            assert not late and 0 < len(pages) <= cached, (len(pages), cached, late)
            before = server.get("/metrics")
            fill(server, 200, 1000)  # nobody reads: `stalled` never did, `reader` no longer does
            memory = [int(next(line.split()[1] for line in text.splitlines() if line.startswith("process_resident_memory_bytes ")))
                      for text in (before, server.get("/metrics"))]
            assert memory[1] - memory[0] < 16 << 20, f"{memory} bytes, while subscribers read nothing"
            # Whatever is asked for in another form is nobody's.
            odd = context.socket(zmq.DEALER)
            odd.connect(replay)
            for frames in ((b"",), (b"", b"12345"), (b"x" * 100000,), (b"",) * 50):
                odd.send_multipart(frames)
            assert replayed(context, replay, 1), "it answers no more"
            odd.close()
        print(f"{len(heard)} events heard, {len(missed)} replayed ({dict(kinds)}), {len(pages)} pages known, {cached} cached")
    context.destroy(linger=0)


main()
