"""Programs of the peers: run by the interpreters that `bench.peer` installs them for."""
