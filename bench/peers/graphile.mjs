// graphile-worker: addJob and addJobs; a worker with a local queue and batched completion.

import { add, close, enqueue, load, now, opened, sleep, task, untilEnd } from "./program.mjs";

const { Logger, makeWorkerUtils, run, runMigrations } = load("graphile-worker");
const logger = new Logger(() => () => {});
const STOP_SECONDS = 5;
// Consumers that wait are slots of one worker, which share its connections.
const parking = task.kind === "park";
const preset = {
  worker: {
    connectionString: task.url,
    maxPoolSize: (parking ? 1 : (task.clients ?? 1)) + 2,
    concurrentJobs: task.clients ?? 1,
    // Off, it fetches and completes its jobs one by one.
    localQueue: { size: task.singly ? -1 : Math.max(500, task.clients ?? 1) },
    completeJobBatchDelay: task.singly ? -1 : 0,
    failJobBatchDelay: task.singly ? -1 : 0,
    logger,
  },
};
const when = task.delay ? { runAt: new Date(Date.now() + task.delay * 1000) } : {};

if (task.kind === "install") {
  await runMigrations({ preset, logger });
  process.exit(0);
} else if (task.kind === "enqueue") {
  const utils = await makeWorkerUtils({ preset, logger });
  await enqueue((documents) =>
    documents.length === 1
      ? utils.addJob("bench", documents[0], when)
      : utils.addJobs(
          documents.map((document) => ({ identifier: "bench", payload: document, ...when })),
        ),
  );
} else {
  await opened();
  const count = async (document) => add(now(), 1, now() - document.at);
  const runner = await run({
    preset,
    logger,
    noHandleSignals: true,
    taskList: parking ? { parked: count } : { bench: count },
  });
  await untilEnd();
  // So that what it has fetched and not begun is there for the next one.
  await Promise.race([runner.stop(), sleep(STOP_SECONDS)]);
}
close();
