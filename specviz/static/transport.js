// From the server to the reducer: a websocket that resumes where it was, or the batches of the Gradio
// generator when no websocket comes up (some proxies refuse it).

/** Time that the websocket has to open before the generator's batches are used, in ms. */
const PATIENCE = 3000;
const PING_EVERY = 20_000;
const RETRY_FIRST = 500;
const RETRY_MOST = 8000;
/** Close code of a server that does not want us (unknown run, wrong token): trying again would not help. */
const REFUSED = 1008;
/** Batches held back while the websocket may still open. */
const HELD_LIMIT = 500;

/** `<base>/ws` beside the folder of this script, as ws: or wss:. */
export function socketUrl(base = import.meta.url) {
  const url = new URL("../ws", base);
  url.protocol = url.protocol === "https:" ? "wss:" : "ws:";
  url.search = "";
  return url;
}

/**
 * One run's connection, or with `room` in place of run and token, that to one run after the other.
 * `handlers`: events(list), mode(name), ack(message), error(message), attach(run); `seq()` the last one seen.
 */
export class Transport {
  #socket = null;
  #open = false;
  #closed = false;
  #compat = false;
  #heard = false;
  #held = [];
  #timers = new Map();
  #retry = RETRY_FIRST;

  constructor({ run = null, token, room, seq, over, handlers, url = socketUrl() }) {
    Object.assign(this, { run, token, room, seq, over, handlers, url });
    this.#later("patience", PATIENCE, () => this.#fallBack());
    this.#connect();
  }

  /** A batch that came through the generator. Ignored while the websocket works: it would be the same events. */
  feed(batch) {
    if (this.#closed || this.#open || batch.run !== this.run) return;
    if (this.#compat) this.#hear(batch);
    else if (this.#held.length < HELD_LIMIT) this.#held.push(batch);
  }

  /** Send a command; false when the websocket is not open. */
  send(message) {
    if (!this.#open) return false;
    this.#socket.send(JSON.stringify(message));
    return true;
  }

  close() {
    this.#closed = true;
    this.#open = false;
    for (const timer of this.#timers.values()) clearTimeout(timer);
    this.#socket?.close();
  }

  #connect() {
    let socket;
    try {
      socket = this.#socket = new WebSocket(this.url);
    } catch {
      return this.#lost();
    }
    socket.onopen = () => {
      // `from` is the next sequence number wanted.
      const who = this.room ? { op: "watch", room: this.room } : { op: "hello", token: this.token };
      socket.send(JSON.stringify({ ...who, run: this.run, from: this.seq() + 1 }));
      // The answer proves that the server took our hello, and not merely that a proxy took the connection.
      socket.send(JSON.stringify({ op: "ping" }));
      this.#keepAlive();
    };
    socket.onmessage = (frame) => {
      let message;
      try {
        message = JSON.parse(frame.data);
      } catch {
        return;
      }
      this.#receive(message);
    };
    socket.onclose = ({ code }) => socket === this.#socket && this.#lost(code === REFUSED);
  }

  #receive(message) {
    if (message.op === "ack") return this.handlers.ack(message);
    if (message.op === "error") return this.handlers.error(message);
    this.#opened();
    if (message.op === "attach") {
      this.run = message.run;
      this.handlers.attach(message.run);
    }
    if (message.events && message.run === this.run) this.#take(message);
  }

  #opened() {
    if (this.#open) return;
    this.#open = true;
    this.#retry = RETRY_FIRST;
    this.#held = [];
    this.#cancel("patience");
    this.handlers.mode("live");
  }

  #take(batch) {
    // A hole would make the reducer skip what a later message brings: wait for the resumed stream instead,
    // unless the server says that those events are gone.
    if (batch.from > this.seq() + 1 && !batch.lost) return;
    this.handlers.events(batch.events);
  }

  #fallBack() {
    if (this.#open || this.#closed) return;
    this.#compat = true;
    for (const batch of this.#held.splice(0)) this.#hear(batch);
  }

  /** The first batch is what tells a working generator from a server that is gone. */
  #hear(batch) {
    if (!this.#heard) this.handlers.mode("compat");
    this.#heard = true;
    this.#take(batch);
  }

  #lost(refused = false) {
    const wasOpen = this.#open;
    this.#open = false;
    this.#cancel("ping");
    if (this.#closed || this.over()) return;
    if (wasOpen) {
      this.#compat = this.#heard = false;
      this.handlers.mode("reconnecting");
      this.#later("patience", PATIENCE, () => this.#fallBack());
    }
    if (refused) return;
    this.#later("retry", this.#retry, () => this.#connect());
    this.#retry = Math.min(this.#retry * 2, RETRY_MOST);
  }

  #keepAlive() {
    // Idle sockets are cut by some proxies after a minute.
    this.#later("ping", PING_EVERY, () => {
      if (this.send({ op: "ping" })) this.#keepAlive();
    });
  }

  #later(name, ms, action) {
    this.#cancel(name);
    this.#timers.set(name, setTimeout(action, ms));
  }

  #cancel(name) {
    clearTimeout(this.#timers.get(name));
    this.#timers.delete(name);
  }
}
