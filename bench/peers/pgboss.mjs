// pg-boss: send and insert; fetch in batches and complete them, polled while there is nothing.

import { add, close, ended, enqueue, load, now, opened, sleep, task, untilEnd } from "./program.mjs";

const { PgBoss } = load("pg-boss");
const QUEUE = "bench";
const EMPTY = "parked";
const POLL_SECONDS = 0.01;

const parking = task.kind === "park";
const boss = new PgBoss({
  connectionString: task.url,
  max: (parking ? 8 : (task.clients ?? 1)) + 2,
  supervise: false,
  schedule: false,
  useListenNotify: parking,
});
boss.on("error", (error) => console.error(error));
await boss.start();
const when = task.delay ? { startAfter: task.delay } : {};
if (task.kind === "install") {
  await boss.createQueue(QUEUE);
  await boss.createQueue(EMPTY, { notify: true });
  process.exit(0);
} else if (task.kind === "enqueue") {
  await enqueue((documents) =>
    documents.length === 1
      ? boss.send(QUEUE, documents[0], when)
      : boss.insert(QUEUE, documents.map((document) => ({ data: document, ...when }))),
  );
} else if (parking) {
  await opened();
  // Its own workers: woken by notices, with a poll every half a minute behind them.
  await boss.work(EMPTY, { localConcurrency: task.clients }, async () => {});
  await untilEnd();
} else {
  await opened();
  const work = async () => {
    while (!ended()) {
      const jobs = await boss.fetch(QUEUE, { batchSize: task.batch });
      if (jobs.length === 0) {
        await sleep(POLL_SECONDS);
        continue;
      }
      const delivered = now();
      await boss.complete(QUEUE, jobs.map((job) => job.id));
      const settled = now();
      for (const job of jobs) add(settled, 1, delivered - job.data.at);
    }
  };
  await Promise.all(Array.from({ length: task.clients }, work));
}
close();
