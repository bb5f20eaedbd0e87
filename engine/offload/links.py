"""Links move experts from the slow tier into slots: one queue by urgency, a few workers, chunks that can be overtaken.

A worker asks for the most urgent chunk each time it is free. So a demand overtakes every prefetch, also one that
is half done, after the chunk that is being moved; two workers share the chunks of one expert.
"""

from __future__ import annotations

import heapq
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence

import torch

from engine.errors import Cancelled, CheckpointError, TransferError, one_line
from engine.offload.streams import Fence
from engine.offload.transfer import CANCELLED, DONE, ENDED, FAILED, QUEUED, RUNNING, Chunk, Transfer
from engine.offload.worker import Source, Worker

log = logging.getLogger(__name__)

#: A stop flag belongs to somebody else and cannot wake our waits: look at it this often.
STOP_POLL_S = 0.02
#: A shorter gap between two chunks of a transfer is a worker's own turn-around.
PAUSE_NS = 200_000
_JOIN_S = 5.0
_IDLE_S = 1.0


class Link(ABC):
    """Moves experts of `source`, which it closes at the end, with `workers` threads.

    Safe to use from several threads. `on_done` callbacks run without the link's lock, in a worker, or in the thread
    that cancels, expires or closes.
    """

    emulated = False

    def __init__(self, source: Source, workers: int) -> None:
        self.source = source
        self._lock = threading.Lock()
        self._work_ready = threading.Condition(self._lock)
        self._landed = threading.Condition(self._lock)
        self._queue: list[tuple[tuple[int, int, int], Transfer]] = []
        self._active: dict[int, Transfer] = {}
        self._count = 0
        self._closed = False
        self._failure: BaseException | None = None
        self._disowned: list[Worker] = []
        self._workers: list[Worker] = []
        try:
            for index in range(workers):
                self._workers.append(Worker(self._work, f"link-{index}"))
        except RuntimeError as error:
            self.close()
            raise TransferError(f"the link's threads could not be started ({error}): end other programs") from error

    @property
    def depth(self) -> int:
        """Transfers under way that keep every worker busy, with one more that waits for the first to be free."""
        return len(self._workers) + 1

    @property
    @abstractmethod
    def label(self) -> str:
        """What a person reads on the link's lane."""

    @property
    @abstractmethod
    def bytes_per_s(self) -> float:
        """Stored bytes a second, set or measured."""

    @abstractmethod
    def _chunk_nbytes(self) -> int:
        """How much to move before the queue is looked at again; called with the lock held."""

    def submit(
        self,
        layer: int,
        expert: int,
        destination: torch.Tensor,
        *,
        cause: str,
        deadline: int = 0,
        on_done: Callable[[Transfer], None] | None = None,
    ) -> Transfer:
        """Queue a move into `destination`, flat `(numel,)` in any float dtype; conversion happens on landing.

        `cause` is "demand" or "prefetch"; prefetches go by `deadline`, earliest first. `on_done` is called exactly
        once, whatever happens. Raises TransferError when the link is closed or broken.
        """
        with self._lock:
            if self._closed:
                raise TransferError("the link is closed: load the model again")
            if self._failure:
                raise self._broken() from self._failure
            for index, worker in enumerate(self._workers):
                if worker.dead:
                    self._workers[index] = Worker(self._work, worker.thread.name)
            self._count += 1
            transfer = Transfer(
                self._count,
                layer,
                expert,
                cause,
                deadline,
                destination,
                self.source.expert_nbytes,
                queued_ns=time.perf_counter_ns(),
                on_done=on_done,
                urgent=cause == "demand",
                latency_ns=self._latency_ns(),
                fence=self._fence(),
            )
            self._active[transfer.id] = transfer
            heapq.heappush(self._queue, (transfer.order, transfer))
            self._work_ready.notify_all()
            return transfer

    def _latency_ns(self) -> int:
        """What a transfer waits for before its first byte."""
        return 0

    def _fence(self) -> Fence | None:
        """What the device must have computed before the destination is written to; None if nothing."""
        return None

    def promote(self, transfer: Transfer) -> None:
        """Serve a prefetch like a demand from now on; its `cause` stays."""
        with self._lock:
            if transfer.urgent or transfer.state in ENDED:
                return
            transfer.urgent = True
            heapq.heappush(self._queue, (transfer.order, transfer))

    def cancel(self, transfer: Transfer) -> bool:
        """Stop a transfer: now if it is queued, after the chunk in flight if it runs. False if it ended before."""
        with self._lock:
            if transfer.state in ENDED or transfer.ending:
                return transfer.ending == CANCELLED
            transfer.ending = CANCELLED
            ended = self._try_end(transfer)
        if ended:
            self._conclude(transfer)
        return True

    def wait_any(
        self, transfers: Sequence[Transfer], timeout: float, stop: threading.Event | None = None
    ) -> list[Transfer]:
        """Those of `transfers` that ended, at least one; `timeout` in seconds.

        Raises the TransferError of one that failed, TransferError for all of them on time-out (they are given up),
        Cancelled when `stop` is set.
        """
        deadline = time.monotonic() + timeout
        with self._lock:
            while not (ended := [transfer for transfer in transfers if transfer.finished]):
                if stop is not None and stop.is_set():
                    raise Cancelled("stopped while waiting for an expert")
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                self._landed.wait(left if stop is None else min(left, STOP_POLL_S))
        if not ended:
            self.expire(transfers, timeout)
            ended = list(transfers)
        for transfer in ended:
            if transfer.error:
                raise transfer.error
        return ended

    def wait(self, transfer: Transfer, timeout: float, stop: threading.Event | None = None) -> None:
        """Wait for one transfer; raises as `wait_any` does."""
        self.wait_any([transfer], timeout, stop)

    def expire(self, transfers: Iterable[Transfer], timeout: float) -> None:
        """Give up `transfers` with a TransferError, and every worker that has not come back for `timeout` seconds.

        A stuck read cannot be interrupted. Its worker is replaced, and its destination must not be used again.
        """
        now = time.perf_counter_ns()
        with self._lock:
            given_up = {transfer.id: transfer for transfer in transfers if transfer.state not in ENDED}
            for worker in self._workers:
                if worker.chunk and now - worker.since_ns > timeout * 1e9:
                    given_up[worker.chunk.transfer.id] = worker.chunk.transfer
            for index, worker in enumerate(self._workers):
                if worker.chunk and worker.chunk.transfer.id in given_up:
                    worker.chunk.transfer.abandoned = worker.disowned = True
                    self._disowned.append(worker)
                    self._workers[index] = Worker(self._work, worker.thread.name)
            for transfer in given_up.values():
                transfer.ending, transfer.in_flight = FAILED, 0
                transfer.error = self._explain(transfer, f"nothing arrived for {timeout:g} s")
                self._try_end(transfer)
        for transfer in given_up.values():
            self._conclude(transfer)

    def check(self) -> None:
        """Raise TransferError if an `on_done` failed: what it kept books of cannot be trusted any more."""
        if self._failure:
            raise self._broken() from self._failure

    def _broken(self) -> TransferError:
        assert self._failure is not None
        return TransferError(f"the link broke down ({one_line(self._failure)}): load the model again")

    def close(self) -> None:
        """Cancel everything, wake all waiters, join the workers and close the source."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            pending = [transfer for transfer in self._active.values() if not transfer.ending]
            for transfer in pending:
                transfer.ending = CANCELLED
            ended = [transfer for transfer in pending if self._try_end(transfer)]
            self._work_ready.notify_all()
        for transfer in ended:
            self._conclude(transfer)
        for worker in self._workers:
            worker.thread.join(_JOIN_S)
        if not any(worker.thread.is_alive() for worker in self._workers + self._disowned):
            # Under a stuck read, the number of a closed file could come to mean another file.
            self.source.close()

    def _work(self, worker: Worker) -> None:
        """Land chunks until the link closes. A worker that dies of anything says so: nobody waits for the dead."""
        try:
            while (chunk := self._take(worker)) is not None:
                error: BaseException | None = None
                try:
                    self._move(chunk, worker)
                except BaseException as caught:
                    error = caught
                self._put_down(worker, chunk, error)
        except BaseException as error:
            self._bury(worker, error)

    def _bury(self, worker: Worker, error: BaseException) -> None:
        """`worker` died outside of a read: end what it was about, and let another take its place.

        Others may have served that meanwhile. A worker that was about nothing is replaced by the next `submit`, so that
        no thread dies after the other for ever.
        """
        reason = f"a worker of the link died ({one_line(error)}): run it again"
        with self._lock:
            about = worker.taken
            if worker.chunk is not None:
                worker.chunk.transfer.in_flight -= 1
                worker.chunk = None
            worker.dead = True
            if about is not None and worker in self._workers and not self._closed:
                self._workers[self._workers.index(worker)] = Worker(self._work, worker.thread.name)
            alive = any(not other.dead for other in self._workers)
            pending = [t for t in self._active.values() if t is about or not alive]
            for transfer in pending:
                transfer.ending, transfer.error = FAILED, transfer.error or TransferError(reason)
            ended = [transfer for transfer in pending if self._try_end(transfer)]
        for transfer in ended:
            self._conclude(transfer)
        log.error("a worker of the link died", exc_info=error)

    def _take(self, worker: Worker) -> Chunk | None:
        """The most urgent chunk, waiting for one; None when the worker must end."""
        with self._lock:
            while not (self._closed or worker.disowned):
                while self._queue:
                    order, transfer = self._queue[0]
                    if order == transfer.order and not transfer.ending and transfer.issued < transfer.nbytes:
                        worker.taken = transfer
                        worker.chunk, worker.since_ns = self._cut(transfer), time.perf_counter_ns()
                        self._note_pause(transfer, worker.since_ns)
                        transfer.in_flight += 1
                        return worker.chunk
                    heapq.heappop(self._queue)
                self._work_ready.wait(_IDLE_S)
        return None

    @staticmethod
    def _note_pause(transfer: Transfer, now_ns: int) -> None:
        """Called with the lock held when another chunk of `transfer` begins."""
        if transfer.moved_until_ns and not transfer.in_flight and now_ns - transfer.moved_until_ns > PAUSE_NS:
            transfer.pauses.append([transfer.moved_until_ns, now_ns])

    def _cut(self, transfer: Transfer) -> Chunk:
        """The next chunk of `transfer`; called with the lock held."""
        if transfer.state == QUEUED:
            transfer.state = RUNNING
            transfer.start_ns = time.perf_counter_ns()
        chunk = Chunk(transfer, transfer.issued, min(self._chunk_nbytes(), transfer.nbytes - transfer.issued))
        transfer.issued += chunk.nbytes
        return chunk

    def _move(self, chunk: Chunk, worker: Worker) -> None:
        worker.land(chunk, self.source)

    def _put_down(self, worker: Worker, chunk: Chunk, error: BaseException | None) -> None:
        transfer = chunk.transfer
        with self._lock:
            worker.chunk = None
            if worker.disowned:
                return
            transfer.in_flight -= 1
            transfer.moved_until_ns = time.perf_counter_ns()
            if error is None:
                transfer.bytes_moved += chunk.nbytes
            elif not transfer.ending:
                transfer.error = self._explain(transfer, error)
                transfer.error.__cause__ = error
                transfer.ending = FAILED
            if not transfer.ending and transfer.bytes_moved == transfer.nbytes:
                transfer.ending = DONE
            ended = self._try_end(transfer)
        if ended:
            self._conclude(transfer)

    def _try_end(self, transfer: Transfer) -> bool:
        """End a transfer that must end, once no worker writes to its destination; called with the lock held."""
        if not transfer.ending or transfer.in_flight:
            return False
        transfer.state = transfer.ending
        # What is cancelled while others overtake it has been on the link until its last chunk only.
        stopped = transfer.ending == CANCELLED and transfer.moved_until_ns
        transfer.end_ns = transfer.moved_until_ns if stopped else time.perf_counter_ns()
        transfer.start_ns = transfer.start_ns or transfer.end_ns
        del self._active[transfer.id]
        return True

    def _conclude(self, transfer: Transfer) -> None:
        """Tell the owner, then the waiters: a wait never returns before `on_done` has."""
        try:
            if transfer.on_done is not None:
                transfer.on_done(transfer)
        except BaseException as error:
            self._failure = self._failure or error
        finally:
            with self._lock:
                transfer.finished = True
                self._landed.notify_all()

    def _explain(self, transfer: Transfer, reason: BaseException | str) -> TransferError:
        what = f"expert {transfer.expert} of layer {transfer.layer}"
        if isinstance(reason, CheckpointError):
            return TransferError(f"{what} did not arrive: {reason}")
        told = reason if isinstance(reason, str) else str(reason) or type(reason).__name__
        return TransferError(
            f"{what} could not be read from {self.source.path(transfer.layer, transfer.expert)}: {told}. "
            "Check the disk, or fetch the model again"
        )
