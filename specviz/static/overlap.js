// How much of the link's work ran under compute. The same code as engine/overlap.py, which explains it:
//   overlap = Σ |[start, end] of a transfer ∩ busy| / Σ |[start, end] of a transfer|
//   busy    = union of Compute intervals − union of Stall intervals

export const BUSY_LIMIT = 8192;

/** Sorted, disjoint intervals that cover the same points. */
export function union(intervals) {
  const merged = [];
  for (const [start, end] of [...intervals].sort((a, b) => a[0] - b[0] || a[1] - b[1])) {
    const last = merged[merged.length - 1];
    if (last && start <= last[1]) last[1] = Math.max(last[1], end);
    else if (end > start) merged.push([start, end]);
  }
  return merged;
}

/** `intervals` without `holes`; both sorted and disjoint. */
export function subtract(intervals, holes) {
  const left = [];
  let first = 0;
  for (let [start, end] of intervals) {
    while (first < holes.length && holes[first][1] <= start) first++;
    for (let at = first; at < holes.length && holes[at][0] < end; at++) {
      if (holes[at][0] > start) left.push([start, holes[at][0]]);
      start = Math.max(start, holes[at][1]);
    }
    if (start < end) left.push([start, end]);
  }
  return left;
}

/** The stretches of a transfer in which it was on the link: `pauses` are those in which others overtook it. */
export function moving(start, end, pauses) {
  const stretches = [];
  for (const [pauseStart, pauseEnd] of [...pauses, [end, end]]) {
    if (pauseStart > start) stretches.push([start, pauseStart]);
    start = pauseEnd;
  }
  return stretches;
}

/** Sums the time of transfers and the part of it that ran under compute; a round's events may come in any order. */
export class Overlap {
  #compute = [];
  #stalls = [];
  #transfers = [];
  #busy = []; // [start, end, busy nanoseconds before it]
  transferNs = 0;
  overlappedNs = 0;

  compute(start, end) {
    this.#compute.push([start, end]);
  }

  stall(start, end) {
    this.#stalls.push([start, end]);
  }

  transfer(start, end, pauses) {
    this.#transfers.push(...moving(start, end, pauses));
  }

  /** Account for the transfers that ended by `until`; the others wait for a later fold. */
  fold(until = Infinity) {
    for (const [start, end] of subtract(union(this.#compute), union(this.#stalls))) this.#append(start, end);
    this.#compute = [];
    this.#stalls = [];
    const waiting = [];
    for (const [start, end] of this.#transfers) {
      if (end > until) {
        waiting.push([start, end]);
      } else {
        this.transferNs += end - start;
        this.overlappedNs += this.#busyBefore(end) - this.#busyBefore(start);
      }
    }
    this.#transfers = waiting;
  }

  #append(start, end) {
    const last = this.#busy[this.#busy.length - 1];
    if (last) start = Math.max(start, last[1]);
    if (start >= end) return;
    this.#busy.push([start, end, last ? last[2] + last[1] - last[0] : 0]);
    if (this.#busy.length > BUSY_LIMIT) this.#busy.splice(0, BUSY_LIMIT / 2);
  }

  #busyBefore(t) {
    let low = 0;
    let high = this.#busy.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.#busy[middle][0] <= t) low = middle + 1;
      else high = middle;
    }
    if (low === 0) return this.#busy.length ? this.#busy[0][2] : 0;
    const [start, end, before] = this.#busy[low - 1];
    return before + Math.min(t, end) - start;
  }

  toJSON() {
    return {
      transfer_ns: this.transferNs,
      overlapped_ns: this.overlappedNs,
      exposed_ns: this.transferNs - this.overlappedNs,
      overlap: this.transferNs ? this.overlappedNs / this.transferNs : null,
    };
  }
}
