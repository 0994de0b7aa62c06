// What the Node peers' programs share: the window, the counts, the batches. See window.py.

import { createRequire } from "node:module";
import { createInterface } from "node:readline";

const PAYLOAD_BYTES = 256;

export const task = JSON.parse(process.argv[2]);
export const load = createRequire(`${process.env.PEERS}/`);
export const now = () => Number(process.hrtime.bigint()) / 1e9;
export const payload = (at) => ({ at, pad: "x".repeat(PAYLOAD_BYTES - 30) });

const bucketRatio = Math.log(1.02);
const histogram = {};
const errors = {};
let since = 0;
let until = Infinity;
let count = 0;
let before = 0;

export function add(instant, many, latency) {
  if (instant < since) before += many;
  else if (instant < until) {
    count += many;
    if (latency !== undefined) {
      const bucket = Math.round(Math.log(Math.max(latency, 1e-6)) / bucketRatio);
      histogram[bucket] = (histogram[bucket] ?? 0) + many;
    }
  }
}

export const sleep = (seconds) => new Promise((done) => setTimeout(done, seconds * 1000));
export const ended = () => now() >= until;
export const untilEnd = () => sleep(Math.max(until - now(), 0));

export async function opened() {
  console.log("ready");
  const [line] = await new Promise((done) =>
    createInterface({ input: process.stdin }).once("line", (text) => done([text])),
  );
  [since, until] = JSON.parse(line);
}

export function close() {
  const { user, system } = process.cpuUsage();
  const cpu = (user + system) / 1e6;
  console.log(JSON.stringify({ count, before, histogram, errors, cpu }));
  process.exit(0);
}

/** Send batches from `clients` loops, open loop when there is a rate, until `total` or the end. */
export async function enqueue(send) {
  const { clients, batch, rate } = task;
  const total = (task.total ?? Infinity) / clients;
  await opened();
  const client = async (place) => {
    const every = rate ? clients / rate : 0;
    let due = now() + (every * place) / clients;
    for (let sent = 0; sent < total && !ended(); sent += batch) {
      if (every && due > now()) await sleep(due - now());
      const started = every ? due : now();
      await send(Array.from({ length: batch }, () => payload(started)));
      add(now(), batch, now() - started);
      due += every;
    }
  };
  await Promise.all(Array.from({ length: clients }, (_, place) => client(place)));
}
