"""`GET /metrics/prometheus`: this process's counters, for a scraper."""

from litestar import get
from litestar.response.base import ASGIResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest


@get("/metrics/prometheus")
async def metrics() -> ASGIResponse:
    """Return the process's metrics in Prometheus's text form."""
    return ASGIResponse(body=generate_latest(), media_type=CONTENT_TYPE_LATEST)


ROUTES = [metrics]
