"""The scraper's view of one process."""

import httpx

from tests.support.broker import Broker


def test_pushes_show_in_the_metrics_as_calls_per_transaction(broker: Broker) -> None:
    body = {"items": [{"queue": "q", "payload": 1}]}
    assert httpx.post(f"{broker.base_url}/api/v1/push", json=body).status_code == 201
    answer = httpx.get(f"{broker.base_url}/metrics/prometheus")
    assert answer.headers["content-type"].startswith("text/plain")
    assert 'queen_conveyor_batch_calls_count{kind="push"} 1.0' in answer.text
