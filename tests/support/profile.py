"""How much a run may take: QUEEN_PG_TEST_PROFILE=long has the large fixtures and the many kills."""

import os

LONG = os.environ.get("QUEEN_PG_TEST_PROFILE") == "long"
