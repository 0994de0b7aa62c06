"""Follow a page of docs/ as a reader would: `python -m tests.docs.follow guides/worker.md`."""

import os
import sys
from typing import Any

from tests.docs.markdown import blocks, psql


def main(page: str) -> None:
    """Run every block; each one sees what those before it defined and stored."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, (language, text) in enumerate(blocks(page), 1):
        if language == "sql":
            psql(os.environ["DATABASE_URL"], text)
        elif language == "python":
            # The pages show Python as it is written in a program.
            exec(compile(text, f"{page}, block {number}", "exec"), names)
        else:
            raise AssertionError(f"{page}: nobody runs {language}")


if __name__ == "__main__":
    main(sys.argv[1])
