"""Plans: sessions plan anew when the tables have outgrown what they were planned for.

A session keeps the plans of its statements. What it planned while a table was empty may walk
through all of it once it is full, and PostgreSQL thinks it over only when the table is analyzed,
which autovacuum does after a minute. To discard the plans is enough: the size that a table has is
looked up with each.
"""

from collections.abc import Mapping

import asyncpg

from queen_pg import sql

# How often the sizes are looked at.
LOOK_SECONDS = 2.0
# A table has outgrown a plan at so many times the size that it was made for.
FACTOR = 4
# What is no larger may be walked through: eight pages.
SMALL_BYTES = 8 * 8192

SIZES = sql.read("reads/table_sizes")
DISCARD = "discard plans"


class Plans:
    """The sizes of tables, in bytes, for which the sessions may have planned."""

    def __init__(self) -> None:
        self._planned: dict[str, int] = {}

    def outgrown(self, sizes: Mapping[str, int]) -> bool:
        """Whether a table has outgrown them; if so, they are these sizes from now on."""
        if any(
            size > FACTOR * max(self._planned.get(name, size), SMALL_BYTES)
            for name, size in sizes.items()
        ):
            self._planned = dict(sizes)
            return True
        # A table that has shrunk may be planned for as it is now, and grow again.
        self._planned = {
            name: min(size, self._planned.get(name, size)) for name, size in sizes.items()
        }
        return False


async def sizes(connection: asyncpg.Connection) -> dict[str, int]:
    """Return the size of each of our tables, in bytes."""
    return {row["name"]: row["bytes"] for row in await connection.fetch(SIZES)}
