"""Settings: read once from the environment, refused by name, shown without secrets."""

from pathlib import Path

import pytest

from queen_pg.config import Settings, SettingsError, without_password


def test_an_empty_environment_gives_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert Settings.from_env({}) == Settings()
    assert (Settings().host, Settings().port) == ("127.0.0.1", 6632)
    assert Settings().pg_url is None


def test_values_are_read_and_blank_ones_are_not_there() -> None:
    settings = Settings.from_env(
        {"PORT": " 7000 ", "HOST": "", "QUEEN_LOG_LEVEL": "debug", "RETENTION_INTERVAL": "100"}
    )
    assert (settings.port, settings.host, settings.log_level) == (7000, "127.0.0.1", "debug")
    assert settings.retention_interval_ms == 100


@pytest.mark.parametrize(
    ("text", "value"),
    [("on", True), ("TRUE", True), ("1", True), ("yes", True),
     ("off", False), ("False", False), ("0", False), ("no", False)],
)  # fmt: skip
def test_booleans_have_four_spellings(text: str, value: bool) -> None:
    assert Settings.from_env({"QUEEN_MIGRATE": text}).migrate is value


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PORT", "x"),
        ("PORT", "70000"),
        ("PORT", "-1"),
        ("QUEEN_MIGRATE", "maybe"),
        ("QUEEN_LOG_LEVEL", "loud"),
        ("QUEEN_WORKERS", "0"),
        ("QUEEN_PG_POOL_SIZE", "0"),
        ("QUEEN_PG_URL", "mysql://host/db"),
        ("QUEEN_MAX_BODY_BYTES", "1"),
        ("QUEEN_KV_MAX_OPS_PER_CALL", "2000"),
    ],
)
def test_a_value_that_cannot_be_is_refused_by_name(name: str, value: str) -> None:
    with pytest.raises(SettingsError, match=name):
        Settings.from_env({name: value})


def test_an_ordinary_users_data_lies_in_the_users_data_directory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setenv("HOME", "/home/someone")
    assert Settings.from_env({}).data_folder == Path("/home/someone/.local/share/queen-pg")
    assert Settings.from_env({"XDG_DATA_HOME": "/data"}).data_folder == Path("/data/queen-pg")
    assert Settings.from_env({"QUEEN_DATA_DIR": "~/q"}).data_folder == Path("/home/someone/q")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://u:secret@h/db", "postgresql://u:***@h/db"),
        ("postgresql://u@h1:1,h2:2/db?sslmode=require", None),
        (
            "postgresql://h/db?user=u&password=secret&host=/a/b",
            "postgresql://h/db?user=u&password=***&host=/a/b",
        ),
        ("postgresql:///db?host=/a/b", None),
    ],
)
def test_a_url_is_shown_without_its_password(url: str, shown: str | None) -> None:
    assert without_password(url) == (shown or url)


def test_shown_settings_hold_no_secret() -> None:
    rows = Settings.from_env({"QUEEN_PG_URL": "postgresql://u:secret@h/db"}).shown()
    assert "secret" not in str(rows)
    assert ("QUEEN_PG_URL", "postgresql://u:***@h/db") in [row[:2] for row in rows]
