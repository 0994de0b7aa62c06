"""Django, set up for tests without a project: one database, named per test."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

import django
from django.conf import settings
from django.db import connections

# Tests run in an event loop; what they call here blocks it for a moment, and knows it.
os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"] = "true"


def _options(url: str) -> dict[str, Any]:
    parts = urlsplit(url)
    query = dict(parse_qsl(parts.query))
    return {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": parts.path.lstrip("/"),
        "USER": unquote(parts.username or ""),
        "PASSWORD": unquote(parts.password or ""),
        "HOST": query.get("host") or parts.hostname or "",
        "PORT": query.get("port") or str(parts.port or ""),
    }


def set_up() -> None:
    """Configure Django once for this process."""
    if not settings.configured:
        settings.configure(
            DATABASES={"default": {"ENGINE": "django.db.backends.postgresql", "NAME": "none"}},
            INSTALLED_APPS=[],
            USE_TZ=True,
            DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
        )
        django.setup()


@contextlib.contextmanager
def connect_django(url: str) -> Iterator[Any]:
    """Yield Django's default connection to a database, outside autocommit."""
    set_up()
    connection = connections["default"]
    connection.close()
    connection.settings_dict.update(_options(url))
    connection.set_autocommit(False)
    try:
        yield connection
    finally:
        connection.close()
