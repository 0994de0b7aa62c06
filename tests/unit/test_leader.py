import pytest

from queen_pg.leader import Sight, hosts


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("postgresql://u:p@a/d", ["postgresql://u:p@a/d"]),
        ("postgresql://a:1,b:2/d", ["postgresql://a:1/d", "postgresql://b:2/d"]),
        (
            "postgresql://u:p%40@a,[::1]:2/d?sslmode=require",
            [
                "postgresql://u:p%40@a/d?sslmode=require",
                "postgresql://u:p%40@[::1]:2/d?sslmode=require",
            ],
        ),
        (
            "postgresql://u@/d?host=/run/a,/run/b&port=1,2&sslmode=disable",
            [
                "postgresql://u@/d?host=/run/a&port=1&sslmode=disable",
                "postgresql://u@/d?host=/run/b&port=2&sslmode=disable",
            ],
        ),
        (
            "postgresql:///d?host=a,b&port=7",
            ["postgresql:///d?host=a&port=7", "postgresql:///d?host=b&port=7"],
        ),
        ("postgresql:///d", ["postgresql:///d"]),
    ],
)
def test_a_url_names_its_hosts(url: str, expected: list[str]) -> None:
    assert hosts(url) == expected


def test_only_a_primary_outside_recovery_leads() -> None:
    assert Sight("a").leads
    assert not Sight("a", role="follower").leads
    assert not Sight("a", role="fenced").leads
    assert not Sight("a", recovering=True).leads


def test_the_epoch_decides_before_the_timeline() -> None:
    old = Sight("a", epoch=1, timeline=9)
    assert old.rank < Sight("b", epoch=2, timeline=1).rank
    assert old.rank < Sight("b", epoch=1, timeline=10).rank
