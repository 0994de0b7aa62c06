// pg-boss: send and insert; fetch in batches and complete them, polled while there is nothing.

import { add, close, ended, enqueue, load, now, opened, sleep, task } from "./program.mjs";

const { PgBoss } = load("pg-boss");
const QUEUE = "bench";
const POLL_SECONDS = 0.01;

const boss = new PgBoss({
  connectionString: task.url,
  max: (task.clients ?? 1) + 2,
  supervise: false,
  schedule: false,
});
boss.on("error", (error) => console.error(error));
await boss.start();
if (task.kind === "install") {
  await boss.createQueue(QUEUE);
  process.exit(0);
} else if (task.kind === "enqueue") {
  await enqueue((documents) =>
    documents.length === 1
      ? boss.send(QUEUE, documents[0])
      : boss.insert(QUEUE, documents.map((document) => ({ data: document }))),
  );
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
