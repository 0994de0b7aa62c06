// graphile-worker: addJob and addJobs; a worker with a local queue and batched completion.

import { add, close, enqueue, load, now, opened, task, untilEnd } from "./program.mjs";

const { Logger, makeWorkerUtils, run, runMigrations } = load("graphile-worker");
const logger = new Logger(() => () => {});
const preset = {
  worker: {
    connectionString: task.url,
    maxPoolSize: (task.clients ?? 1) + 2,
    concurrentJobs: task.clients ?? 1,
    localQueue: { size: 500 },
    completeJobBatchDelay: 0,
    failJobBatchDelay: 0,
    logger,
  },
};

if (task.kind === "install") {
  await runMigrations({ preset, logger });
  process.exit(0);
} else if (task.kind === "enqueue") {
  const utils = await makeWorkerUtils({ preset, logger });
  await enqueue((documents) =>
    documents.length === 1
      ? utils.addJob("bench", documents[0])
      : utils.addJobs(documents.map((document) => ({ identifier: "bench", payload: document }))),
  );
} else {
  await opened();
  await run({
    preset,
    logger,
    noHandleSignals: true,
    taskList: {
      bench: async (document) => add(now(), 1, now() - document.at),
    },
  });
  await untilEnd();
}
close();
