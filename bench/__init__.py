"""What queen-pg costs: loads, the floor under them, and peers doing the same work, in one run.

Loads run in processes of their own (`load`, `floor`, and one program per peer under `peers/`), all
with one manner: a JSON document says what to do, `ready` is answered, and a line with the window to
measure starts them (`window`). `workloads` lists what is measured, `stage` starts the server and
the brokers, `run` interleaves the candidates round by round, and `report` writes what came of it.
"""
