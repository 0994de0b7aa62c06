"""The settings: one frozen struct, read from the environment once, and by nothing else.

A field's encoded name is its environment variable, so a refusal names what the operator wrote.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

import msgspec
from msgspec import Meta

BOOLEANS = {
    **dict.fromkeys(("true", "1", "yes", "on"), True),
    **dict.fromkeys(("false", "0", "no", "off"), False),
}
SYSTEM_DATA_DIR = "/var/lib/queen-pg"
HIDDEN = "***"
# The group of QUEEN_PG_URL, where tenants live that are placed nowhere else.
HOME = "home"
SECRET_PARAMETERS = {"password", "sslpassword"}

LogLevel = Literal["debug", "info", "warning", "error"]


class SettingsError(ValueError):
    """The environment holds a value that the broker cannot run with."""


class Settings(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    rename={
        "host": "HOST",
        "port": "PORT",
        "pg_url": "QUEEN_PG_URL",
        "pg_admin_url": "QUEEN_PG_ADMIN_URL",
        "pg_groups": "QUEEN_PG_GROUPS",
        "tenancy_header": "QUEEN_TENANCY_HEADER",
        "pg_pool_size": "QUEEN_PG_POOL_SIZE",
        "pg_pooler": "QUEEN_PG_POOLER",
        "lanes": "QUEEN_LANES",
        "data_dir": "QUEEN_DATA_DIR",
        "migrate": "QUEEN_MIGRATE",
        "workers": "QUEEN_WORKERS",
        "log_level": "QUEEN_LOG_LEVEL",
        "log_json": "QUEEN_LOG_JSON",
        "max_body_bytes": "QUEEN_MAX_BODY_BYTES",
        "default_subscription_mode": "DEFAULT_SUBSCRIPTION_MODE",
        "retention_interval_ms": "RETENTION_INTERVAL",
        "partition_cleanup_days": "PARTITION_CLEANUP_DAYS",
        "kv_max_value_bytes": "QUEEN_KV_MAX_VALUE_BYTES",
        "kv_max_ops_per_call": "QUEEN_KV_MAX_OPS_PER_CALL",
        "kv_max_keys_per_call": "QUEEN_KV_MAX_KEYS_PER_CALL",
        "kv_max_rows": "QUEEN_KV_MAX_ROWS",
        "kv_max_bytes": "QUEEN_KV_MAX_BYTES",
        "kv_read_rate": "QUEEN_KV_READ_RATE",
        "kv_read_burst": "QUEEN_KV_READ_BURST",
        "kv_write_rate": "QUEEN_KV_WRITE_RATE",
        "kv_write_burst": "QUEEN_KV_WRITE_BURST",
        "timers_max": "QUEEN_TIMERS_MAX",
        "timers_max_horizon_seconds": "QUEEN_TIMERS_MAX_HORIZON_S",
        "timers_max_payload_bytes": "QUEEN_TIMERS_MAX_PAYLOAD_BYTES",
        "timers_max_attempts": "QUEEN_SWEEPER_MAX_ATTEMPTS",
    },
):
    """What an operator may decide for one broker process."""

    host: Annotated[str, Meta(min_length=1, description="The address that HTTP listens on.")] = (
        "127.0.0.1"
    )
    port: Annotated[
        int, Meta(ge=0, le=65535, description="The port that HTTP listens on; 0 takes a free one.")
    ] = 6632
    pg_url: Annotated[
        str | None,
        Meta(
            description="The PostgreSQL to keep everything in, as a URL; several hosts and TLS"
            " options are honoured. Without it the broker runs the PostgreSQL that it brings along."
        ),
    ] = None
    pg_admin_url: Annotated[
        str | None,
        Meta(
            description="The same servers with a role that may set up replication, for"
            " `queen-pg replica`; by default QUEEN_PG_URL."
        ),
    ] = None
    pg_groups: Annotated[
        str | None,
        Meta(
            description="Further databases in which tenants may live, as name=URL, with spaces in"
            " between; each is a replicated log of its own."
        ),
    ] = None
    tenancy_header: Annotated[
        bool,
        Meta(
            description="Whether the header x-queen-tenant says for which tenant a call works;"
            " otherwise all work for the first one."
        ),
    ] = False
    pg_pool_size: Annotated[
        int,
        Meta(
            ge=1,
            le=1000,
            description="Most connections per worker process for steps, and as many for reads.",
        ),
    ] = 16
    lanes: Annotated[
        int,
        Meta(
            ge=1,
            le=64,
            description="Transactions of each kind (pushes, acks, claims) that a worker process"
            " runs side by side; whatever arrives meanwhile shares the next ones. Pushes of many"
            " messages run on twice as many.",
        ),
    ] = 1
    pg_pooler: Annotated[
        bool,
        Meta(
            description="Whether a transaction pooler (PgBouncer and the like) stands before the"
            " database: explicit transactions and no prepared statements."
        ),
    ] = False
    data_dir: Annotated[
        str,
        Meta(
            min_length=1,
            description="The folder of the PostgreSQL that the broker brings along; by default"
            " /var/lib/queen-pg for root, and queen-pg in the user's data directory otherwise.",
        ),
    ] = SYSTEM_DATA_DIR
    migrate: Annotated[
        bool,
        Meta(description="Whether the database is brought up to date when the broker starts."),
    ] = True
    workers: Annotated[
        int, Meta(ge=1, le=256, description="Worker processes that share the HTTP port.")
    ] = 1
    log_level: Annotated[LogLevel, Meta(description="The least severe log line to write.")] = "info"
    log_json: Annotated[
        bool, Meta(description="Whether log lines are JSON documents instead of text.")
    ] = False
    max_body_bytes: Annotated[
        int, Meta(ge=1024, description="The largest request body, in bytes; larger ones get a 413.")
    ] = 64 * 1024 * 1024
    default_subscription_mode: Annotated[
        str,
        Meta(
            description="Where a new consumer group starts when its pop does not say: new, or all."
        ),
    ] = "new"
    retention_interval_ms: Annotated[
        int, Meta(ge=100, description="The pause between two retention passes, in milliseconds.")
    ] = 5000
    partition_cleanup_days: Annotated[
        int,
        Meta(
            ge=1,
            le=100_000,
            description="Days without a push after which an empty partition is deleted.",
        ),
    ] = 30
    kv_max_value_bytes: Annotated[
        int, Meta(ge=1, le=16 * 1024 * 1024, description="The largest KV value, in bytes of JSON.")
    ] = 65536
    kv_max_ops_per_call: Annotated[
        int, Meta(ge=1, le=4096, description="Most operations in one call of the KV route.")
    ] = 256
    kv_max_keys_per_call: Annotated[
        int, Meta(ge=1, le=4096, description="Most keys in one call of the KV route.")
    ] = 1024
    kv_max_rows: Annotated[
        int, Meta(ge=0, description="Most live keys of a tenant, about; 0: any.")
    ] = 0
    kv_max_bytes: Annotated[
        int,
        Meta(
            ge=0, description="Most bytes of a tenant's keys and values as stored, about; 0: any."
        ),
    ] = 0
    kv_read_rate: Annotated[
        int, Meta(ge=0, description="KV reads a second, per tenant and process; 0: any.")
    ] = 200
    kv_read_burst: Annotated[int, Meta(ge=1, description="KV reads that may come at once.")] = 400
    kv_write_rate: Annotated[
        int,
        Meta(
            ge=0,
            description="KV, lock and timer writes a second, per tenant and process; 0: any.",
        ),
    ] = 100
    kv_write_burst: Annotated[int, Meta(ge=1, description="Such writes that may come at once.")] = (
        200
    )
    timers_max: Annotated[
        int, Meta(ge=0, description="Most pending timers of a tenant, about; 0: any.")
    ] = 0
    timers_max_horizon_seconds: Annotated[
        int, Meta(ge=1, description="How far ahead a timer may be scheduled, in seconds.")
    ] = 90 * 24 * 3600
    timers_max_payload_bytes: Annotated[
        int,
        Meta(ge=1, le=16 * 1024 * 1024, description="The largest payload of a timer, in bytes."),
    ] = 1024 * 1024
    timers_max_attempts: Annotated[
        int, Meta(ge=1, description="Failed firings after which a timer becomes a dead letter.")
    ] = 5

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> "Settings":
        """Read the settings; raise SettingsError, naming the variable, for a value that is none."""
        raw: dict[str, Any] = {}
        for field in msgspec.structs.fields(cls):
            value = environ.get(field.encode_name, "").strip()
            if value:
                raw[field.encode_name] = _boolean(field, value) if _is_boolean(field) else value
        raw.setdefault("QUEEN_DATA_DIR", str(_default_data_dir(environ)))
        try:
            settings = msgspec.convert(raw, cls, strict=False)
        except msgspec.ValidationError as error:
            raise SettingsError(str(error).replace("`$.", "`")) from None
        settings.validate()
        return settings

    def validate(self) -> None:
        """Raise SettingsError for settings that contradict one another."""
        for name, url in (
            ("QUEEN_PG_URL", self.pg_url),
            ("QUEEN_PG_ADMIN_URL", self.pg_admin_url),
            *(("QUEEN_PG_GROUPS", url) for url in self.group_urls.values()),
        ):
            if url is not None and urlsplit(url).scheme not in ("postgresql", "postgres"):
                raise SettingsError(f"{name} must start with postgresql://")
        if self.kv_max_ops_per_call > self.kv_max_keys_per_call:
            raise SettingsError(
                "QUEEN_KV_MAX_OPS_PER_CALL must not be more than QUEEN_KV_MAX_KEYS_PER_CALL"
            )

    @property
    def group_urls(self) -> dict[str, str]:
        """The databases of QUEEN_PG_GROUPS by name; raise SettingsError for what is none."""
        found: dict[str, str] = {}
        for entry in (self.pg_groups or "").split():
            name, equals, url = entry.partition("=")
            if not equals or not name or name == HOME or name in found:
                raise SettingsError(
                    f"QUEEN_PG_GROUPS must hold name=URL, each name once and none of them {HOME}"
                )
            found[name] = url
        return found

    @property
    def data_folder(self) -> Path:
        """The embedded server's folder, absolute."""
        return Path(self.data_dir).expanduser().absolute()

    def shown(self) -> list[tuple[str, str, str]]:
        """Return each setting as (variable, value, description), without secrets."""
        rows = []
        for field in msgspec.structs.fields(type(self)):
            value = getattr(self, field.name)
            if field.name in ("pg_url", "pg_admin_url") and value is not None:
                value = without_password(value)
            if field.name == "pg_groups" and value is not None:
                value = " ".join(
                    f"{name}={without_password(url)}" for name, url in self.group_urls.items()
                )
            text = str(value).lower() if isinstance(value, bool) else str(value)
            rows.append((field.encode_name, "" if value is None else text, description(field)))
        return rows


def description(field: msgspec.structs.FieldInfo) -> str:
    """Return the one sentence that explains a setting."""
    for meta in getattr(field.type, "__metadata__", ()):
        if isinstance(meta, Meta) and meta.description:
            return meta.description
    raise AssertionError(f"the setting {field.encode_name} has no description")


def without_password(url: str) -> str:
    """Return a database URL in which every password is hidden."""
    parts = urlsplit(url)
    credentials, at, hosts = parts.netloc.rpartition("@")
    user, colon, _ = credentials.partition(":")
    query = urlencode(
        [
            (name, HIDDEN if name.lower() in SECRET_PARAMETERS else value)
            for name, value in parse_qsl(parts.query, keep_blank_values=True)
        ],
        safe="*/,:",
        quote_via=quote,
    )
    netloc = f"{user}:{HIDDEN}{at}{hosts}" if colon else parts.netloc
    # Not urlunsplit: it drops the two slashes before an empty host.
    return f"{parts.scheme}://{netloc}{parts.path}{'?' if query else ''}{query}"


def _default_data_dir(environ: Mapping[str, str]) -> Path:
    if os.geteuid() == 0:
        return Path(SYSTEM_DATA_DIR)
    data_home = environ.get("XDG_DATA_HOME", "")
    return (Path(data_home) if data_home else Path.home() / ".local" / "share") / "queen-pg"


def _is_boolean(field: msgspec.structs.FieldInfo) -> bool:
    return getattr(field.type, "__origin__", field.type) is bool


def _boolean(field: msgspec.structs.FieldInfo, value: str) -> bool:
    try:
        return BOOLEANS[value.lower()]
    except KeyError:
        raise SettingsError(f"{field.encode_name} must be on or off, not `{value}`") from None
